"""The version table against recorded logs and metrics, and against the sources of the installed engine."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from inference_wall import engines
from inference_wall.engines import Engine, engine
from inference_wall.errors import WallError
from inference_wall.watch import read_metrics

FIXTURES = Path(__file__).parent / "fixtures"
FAILURES = FIXTURES / "server_failures"
START_LOG = (FIXTURES / "server_log_0.32.0_cpu.txt").read_text()

# Lines as the sources of 0.18.0 and 0.25.1 format them, with the figures published for the series' A10G where there are some.
GPU_0_18 = """\
(EngineCore_DP0 pid=7) INFO 03-01 10:00:00 [core.py:97] Initializing a V1 LLM engine (v0.18.0) with config: model='m', \
dtype=torch.float16, max_seq_len=2048, load_format=auto, quantization=awq_marlin, enforce_eager=False, \
enable_prefix_caching=False, enable_chunked_prefill=True, compilation_config={'compile_ranges_endpoints': [8192]}
INFO 03-01 10:00:01 [scheduler.py:231] Chunked prefill is enabled with max_num_batched_tokens=2048.
INFO 03-01 10:00:01 [vllm.py:754] Asynchronous scheduling is enabled.
INFO 03-01 10:00:01 [config.py:212] Setting attention block size to 528 tokens to ensure that attention page size is >= mamba.
INFO 03-01 10:00:02 [cuda.py:317] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].
INFO 03-01 10:00:02 [flash_attn.py:598] Using FlashAttention version 2
INFO 03-01 10:00:02 [gptq_marlin.py:376] Using MarlinLinearKernel for GPTQMarlinLinearMethod
INFO 03-01 10:00:02 [qwen3_next.py:198] Using Triton/FLA GDN prefill kernel
INFO 03-01 10:00:09 [default_loader.py:384] Loading weights took 4.25 seconds
INFO 03-01 10:00:09 [gpu_model_runner.py:4566] Model loading took 8.61 GiB memory and 7.123456 seconds
INFO 03-01 10:00:20 [monitor.py:35] torch.compile took 20.50 s in total
INFO 03-01 10:00:30 [gpu_worker.py:456] Available KV cache memory: 10.14 GiB
INFO 03-01 10:00:30 [kv_cache_utils.py:826] Overriding num_gpu_blocks=586 with num_gpu_blocks_override=40
INFO 03-01 10:00:30 [kv_cache_utils.py:1316] GPU KV cache size: 76,824 tokens
INFO 03-01 10:00:30 [kv_cache_utils.py:1321] Maximum concurrency for 2,048 tokens per request: 5.71x
INFO 03-01 10:00:40 [gpu_model_runner.py:5746] Graph capturing finished in 7 secs, took 0.61 GiB
INFO 03-01 10:00:40 [core.py:281] init engine (profile, create kv cache, warmup model) took 31.25 seconds
"""
GPU_0_25 = """\
INFO 07-01 10:00:02 [qwen_gdn_linear_attn.py:230] Using Triton/FLA GDN prefill kernel (requested=triton, head_k_dim=128).
INFO 07-01 10:00:40 [core.py:337] init engine (profile, create kv cache, warmup model) took 99.10 s (compilation: 41.20 s)
"""


def test_start_log_of_the_embedded_engine():
    facts = engine("0.32.0").parse_log(START_LOG)
    expected = {
        "vllm_version": "0.32.0",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "chunked_prefill": True,
        "prefix_caching": False,
        "enforce_eager": True,
        "kv_cache_tokens": 46592,
        "kv_cache_gib": 1.0,
        "max_concurrency": 22.75,
        "max_concurrency_tokens": 2048,
        "weights_load_s": 1.07,
        "engine_start_s": 3.12,
        "engine_cores": [0],
    }
    assert {name: facts.get(name) for name in expected} == expected
    assert facts["arguments"]["max_num_seqs"] == 8
    # Said nowhere in this log, so they must be absent, not zero.
    assert not {"weights_gib", "attention_backend", "quantization", "kv_cache_blocks", "block_size"} & set(facts)


def test_start_log_of_a_gpu():
    assert engine("0.18.0").parse_log(GPU_0_18) == {
        "vllm_version": "0.18.0",
        "dtype": "float16",
        "max_model_len": 2048,
        "load_format": "auto",
        "quantization": "awq_marlin",
        "enforce_eager": False,
        "prefix_caching": False,
        "chunked_prefill": True,
        "max_num_batched_tokens": 2048,
        "async_scheduling": True,
        "attention_backend": "FLASH_ATTN",
        "flash_attention_version": 2,
        "gdn_prefill_kernel": "Triton/FLA",
        "quantization_kernel": "MarlinLinearKernel",
        "weights_gib": 8.61,
        "model_load_s": 7.123456,
        "weights_load_s": 4.25,
        "kv_cache_gib": 10.14,
        "kv_cache_tokens": 76824,
        "kv_cache_blocks": 40,
        "kv_cache_blocks_before_override": 586,
        "block_size": 528,
        "max_concurrency": 5.71,
        "max_concurrency_tokens": 2048,
        "compile_s": 20.5,
        "graph_capture_s": 7.0,
        "graph_gib": 0.61,
        "engine_start_s": 31.25,
    }


def test_later_wording_of_the_same_facts():
    facts = engine("0.25.1").parse_log(GPU_0_25)
    assert facts == {"gdn_prefill_kernel": "Triton/FLA", "compile_s": 41.2, "engine_start_s": 99.1}


def test_colours_do_not_hide_a_fact_and_an_empty_log_has_none():
    assert engine("0.18.0").parse_log("GPU KV cache size: \x1b[36m1,024\x1b[0m tokens") == {"kv_cache_tokens": 1024}
    assert engine("0.18.0").parse_log("") == {}


def test_cache_config_labels():
    labels = {"num_gpu_blocks": "1456", "block_size": "32", "enable_prefix_caching": "False", "mamba_block_size": "None"}
    assert engine("0.32.0").parse_cache_config(labels) == {"kv_cache_blocks": 1456, "block_size": 32, "prefix_caching": False}


def test_metric_names_find_the_recorded_metrics():
    entry = engine("0.32.0")
    names = {**entry.metric_names, **entry.more_metric_names}
    row = read_metrics((FIXTURES / "metrics_0.32.0_cpu.txt").read_text(), names)
    assert set(row) == set(names)
    assert (row["prompt_tokens_total"], row["generation_tokens_total"], row["request_success_total"]) == (5, 8, 1)
    assert row["request_queue_time_s_count"] == 1


def test_the_older_name_of_the_cache_usage_is_understood():
    assert read_metrics("vllm:gpu_cache_usage_perc 0.25\n", engine("0.18.0").metric_names) == {"kv_cache_usage": 0.25}


@pytest.mark.parametrize(
    ("name", "cause", "remedy"),
    [
        ("unknown_argument", "--max-num-seq-typo", "spelling"),
        ("port_in_use", "port is in use", "choose another port"),
        ("missing_model", "no model folder models/nothing", "path in the rig"),
        ("budget_below_model_len", "the budget 512 is below max_model_len 2048", "2048"),
        ("budget_below_seqs", "4 tokens is below max_num_seqs 8", "at least 8"),
        ("model_len_too_long", "max_model_len 20000 is more than the 8192", "at most 8192"),
        ("not_quantized", "not quantized as awq", "leave the quantization out"),
        ("cache_too_small", "one request of 2048 tokens needs 0.04 GiB", "max_model_len to 32"),
        ("cache_above_memory", "the KV cache is to take 64.0 GiB", "VLLM_CPU_KVCACHE_SPACE"),
    ],
)
def test_failures_recorded_from_0_32(name, cause, remedy):
    found = engine("0.32.0").diagnose((FAILURES / f"{name}.txt").read_text())
    assert found and cause in found[0] and remedy in found[1]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (60). Each", "256 is more than the 60 state"),
        ("ValueError: Free memory on device cuda:0 (3.1/22.06 GiB) on startup is less than desired", "3.1 of 22.06 GiB"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "GPU's memory is full"),
        ("ValueError: No available memory for the cache blocks. Try", "no memory for the KV cache"),
        ("RuntimeError: Failed to infer device type, please set", "needs an NVIDIA GPU"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12020)", "driver is too old"),
        ("ValueError: Unknown quantization method: awqq. Must be one of", "does not support the quantization awqq"),
        ("OSError: [Errno 28] No space left on device", "disk (or /dev/shm) is full"),
        ("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", "lacks its own package name"),
        ("RuntimeError: operator torchvision::nms does not exist", "torchvision does not match"),
        ("ModuleNotFoundError: No module named 'flashinfer'", "package flashinfer is missing"),
    ],
)
def test_failures_worded_as_in_the_sources(line, cause):
    found = engine("0.25.1").diagnose(f"INFO starting\n{line}\nRuntimeError: Engine core initialization failed.")
    assert found and cause in found[0] and found[1] and "{" not in "".join(found)


def test_a_healthy_log_has_no_failure():
    assert engine("0.32.0").diagnose(START_LOG.partition("[shutdown]")[0]) is None


def test_nearest_older_row():
    assert (engine("0.18.0").table, engine("0.18.0").exact) == ("0.18.0", True)
    assert (engine("0.31.2").table, engine("0.31.2").exact) == ("0.25.1", False)
    assert engine("1.0").table == "0.32.0"
    assert engine("0.9.1").table == "0.18.0"
    assert "waiting_by_reason" not in engine("0.18.0").more_metric_names
    assert "request_preemptions_sum" in engine("0.32.0").more_metric_names
    with pytest.raises(WallError, match="not a vLLM version"):
        engine("latest")


def test_flags_are_checked_with_a_hint():
    entry = engine("0.32.0")
    entry.check_flags(["max-num-seqs", "no-enable-prefix-caching", "enforce-eager"])
    with pytest.raises(WallError) as caught:
        entry.check_flags(["max-num-seq"])
    assert "max-num-seqs" in caught.value.remedy


def test_installed_does_not_import_the_engine():
    code = "from inference_wall import engines; engines.installed(); import sys; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the installed engine's own sources -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources() -> tuple[Engine, str]:
    """The entry of the installed engine and its Python sources as one text, tests and models left out."""
    found = engines.installed()
    if found is None:
        pytest.skip("no vLLM in this environment")
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    parts = ("config", "v1", "engine", "entrypoints", "benchmarks", "platforms", "compilation", "transformers_utils")
    texts = [path.read_text() for part in parts for path in (folder / part).rglob("*.py")]
    texts += [path.read_text() for path in (folder / "model_executor" / "model_loader").glob("*.py")]
    texts += [path.read_text() for path in (folder / "profiler").glob("*.py")]
    return found, "\n".join(texts)


def test_installed_flags(sources):
    entry, text = sources
    for flag in engines.VALUES | engines.SWITCHES:
        assert f'"--{flag}"' in text or f"\n    {flag.replace('-', '_')}:" in text, flag
    for flag in entry.bench_flags.values():
        assert f'"{flag}"' in text, flag


def test_installed_metric_names(sources):
    entry, text = sources
    names = [aliases[0] for aliases in entry.metric_names.values()]
    names += [aliases[0] for aliases in entry.more_metric_names.values()]
    for name in [*names, engines.CACHE_CONFIG]:
        # The client library appends _total to counters, _sum and _count to histograms.
        spellings = {name, name.removesuffix("_total"), name.removesuffix("_sum"), name.removesuffix("_count")}
        assert any(f'"{spelling}"' in text for spelling in spellings), name


def test_installed_log_lines(sources):
    _, text = sources
    flat = " ".join(text.replace('"', " ").split())
    for words in (
        "KV cache size: %s tokens",
        "Maximum concurrency for %s tokens per request: %.2fx",
        "Available KV cache memory: %s GiB",
        "Overriding num_gpu_blocks=%d with num_gpu_blocks_override=%d",
        "Loading weights took %.2f seconds",
        "Model loading took %s GiB memory and %.6f seconds",
        "Chunked prefill is enabled with max_num_batched_tokens=%d.",
        "init engine (profile, create kv cache, warmup model) took",
        "Graph capturing finished in %.0f secs, took %.2f GiB",
        "attention backend out of potential backends",
        "enable_chunked_prefill={self.scheduler_config.enable_chunked_prefill}",
    ):
        assert words in flat, words


def test_installed_failure_lines(sources):
    _, text = sources
    flat = " ".join(text.replace('"', " ").replace(" f ", " ").split())
    for words in (
        "No available memory for the cache blocks",
        "is needed, which is larger than the available KV cache",
        "on startup is less than desired GPU memory utilization",
        "is smaller than max_model_len",
        "User-specified max_model_len",
        "Failed to infer device type",
        "Unknown quantization method",
        "Invalid repository ID or local directory specified",
    ):
        assert words in flat.replace("  ", " "), words


@pytest.mark.parametrize(("log", "refuses"), [
    ("ValueError: To serve at least one request with the model's max seq len (2048), (0.09 GiB KV cache is needed", True),
    ("max_num_seqs (256) exceeds available Mamba cache blocks (60)", True),
    ("NotImplementedError: chunking off is not supported\nRuntimeError: Engine core initialization failed. See root cause above.", True),
    ("RuntimeError: expected scalar type BFloat16 but found Float", True),
    ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}", False),
    ("AttributeError: '_OpNamespace' '_C' object has no attribute 'create_onednn_scaled_mm_handler'", True),
    ("torch.OutOfMemoryError: CUDA out of memory", False),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", False),
    ("OSError: [Errno 28] No space left on device", False),
    ("requests.exceptions.ReadTimeout: HTTPSConnectionPool", False),
    ("nothing that we know", False),
])
def test_a_refusal_is_told_from_an_accident_of_the_machine(log, refuses):
    assert engines.engine("0.32.0").refuses(log) is refuses


def test_causes_of_the_machine_are_known_failures():
    assert {cause for _, cause, _ in engines.FAILURES} >= engines.MACHINE_CAUSES
