"""The measure process: one protocol on one rig, from the server's start to the sealed record.

What:   reads one JSON document (what to measure) from standard input, owns the server, runs every point that is not done yet,
        and reports on standard output, one JSON document a line. It ends when its input is closed: whoever asked is gone.
Why:    one long-lived process outside the notebook kernel gives one clock for client, counters and GPU, pays for vLLM's imports
        once, and can clean up after a kernel that was killed.
Use:    python -m inference_wall.measure < request.json     (see `post.measure`, which is what a notebook calls)
        request: {"post": "part_1", "rig": "cpu", "parameters": {...}}
Not:    pages (`post`, `figures`), batches of posts (`regenerate`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from . import hardware, records, rigs, stats
from .engines import Engine, engine, installed
from .errors import WallError
from .server import Attached, Server, end_leftovers, free_port, require_free_port, serve_argv
from .watch import Watcher

CLOCK_ZERO = time.perf_counter()
POINT_GRACE_S = 600.0  # a point may take this much longer than planned before the run gives up
DISK_NEEDED_MIB = 200
REFINEMENT_STEP = 1.5  # how far beyond a sweep without a knee the next rate lies


class Stopped(SystemExit):
    """Raised in the main thread by SIGTERM, SIGINT, or the end of standard input. Every `finally` on the way runs."""


class Reporter:
    """Progress, one JSON document a line. A reader that is gone is not an error: the end of input will stop us."""

    def __init__(self, sink: TextIO):
        self.sink = sink

    def __call__(self, event: str, **facts: Any) -> None:
        try:
            self.sink.write(json.dumps({"event": event, **facts}) + "\n")
            self.sink.flush()
        except (BrokenPipeError, ValueError):
            pass


@dataclasses.dataclass
class Job:
    """A checked request: what is measured, under which identity."""

    protocol: rigs.Protocol
    rig: rigs.Rig
    arm: dict[str, Any]
    values: dict[str, Any]
    settings: dict[str, Any]
    engine: Engine
    model: str
    flags: dict[str, Any]
    identity: dict[str, Any]


def prepare(post: str, rig_name: str, parameters: dict[str, Any]) -> Job:
    """Check everything that can be checked without a server. Every problem is a WallError, before anything starts."""
    protocol = rigs.load_protocol(post)
    values = rigs.check_parameters(protocol, parameters)
    rig = rigs.pick_rig(rig_name)
    if not values.get("base_url"):
        rigs.require_hardware(rig)
    arm = protocol.arms[0]
    settings = rigs.settings(rig, post, values)
    found = installed()
    if found is None:
        raise WallError("no vLLM is installed in this environment",
                        "run `make book`, or install requirements.txt (GPU) or requirements-cpu.txt (CPU)")
    flags = {**({"dtype": rig.model["dtype"]} if "dtype" in rig.model else {}),
             **({"load-format": "dummy"} if rig.model.get("weights") == "random" else {}), **rig.engine.get("flags", {}), **arm.get("flags", {})}
    found.check_flags(flags)
    longest = settings["input_len"] + settings["output_len"]
    if longest > flags.get("max-model-len", longest):
        raise WallError(f"input_len + output_len = {longest} tokens, but the rig's max-model-len is {flags['max-model-len']}",
                        f"shorten them in experiments/rigs/{rig.name}.toml or raise max-model-len")
    if values.get("port") and not values.get("base_url"):
        require_free_port(values["port"])
    model = model_folder(rig)
    if Path(model).is_dir():  # and not the name of a model on a hub
        _PATHS[str(Path(model).parent)] = "<models>"
    identity = {
        "post": post, "rig": rig.name, "arm": arm["name"], "settings": _strict(settings), "scale": values.get("scale"), "flags": flags,
        "model": rig.model, "model_config": config_digest(model),
        "environment": rig.engine.get("environment", {}), "engine": found.version, "base_url": values.get("base_url") or None,
        "code": records.code_version(),
    }
    return Job(protocol, rig, arm, values, settings, found, model, flags, identity)


def model_folder(rig: rigs.Rig) -> str:
    """Folder or hub name of the rig's model. The embedded one is made on first use."""
    if "embedded" in rig.model:
        from .weights import ensure

        return str(ensure(rig.model["embedded"]))
    if "path" in rig.model:
        path = (rigs.root() / rig.model["path"]).expanduser()
        if not (path / "config.json").is_file():
            raise WallError(f"no model at {path}", f"put it there, or change model.path in experiments/rigs/{rig.name}.toml")
        return str(path)
    return rig.model["hub"]


def config_digest(model: str) -> str | None:
    """Digest of the model's config.json; null for a model that vLLM fetches from a hub by itself."""
    path = Path(model) / "config.json"
    return rigs.digest(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(model: str, dtype: str | None) -> int | None:
    """Bytes of the weights as the server holds them: floating-point tensors in the rig's dtype, others as stored.

    Read from the headers of the model's safetensors files; null for a model that vLLM fetches from a hub by itself.
    """
    total = 0
    for path in Path(model).glob("*.safetensors") if Path(model).is_dir() else []:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            floating = tensor["dtype"] in ("F32", "F16", "BF16") and dtype in FLOAT_BYTES
            total += math.prod(tensor["shape"]) * FLOAT_BYTES[dtype] if floating else end - start
    return total or None


def measure(request: dict[str, Any], report: Reporter) -> Path:
    """Run what is missing, seal the record, return its folder."""
    job = prepare(request["post"], request["rig"], request.get("parameters", {}))
    draft = records.Draft.open(job.protocol.name, job.rig.name, job.arm["name"], job.identity)
    free_mib = shutil.disk_usage(draft.folder).free / 2**20
    if free_mib < DISK_NEEDED_MIB:
        raise WallError(f"only {free_mib:.0f} MiB are free at {draft.folder}", f"free at least {DISK_NEEDED_MIB} MiB")
    if missing_points(job, draft):
        for pid in end_leftovers():
            report("note", text=f"stopped a server left over by a killed run (process {pid})")
        _run_points(job, draft, report)
    starts = sorted(draft.folder.glob("start-*.json"))
    document = run_document(job, draft, [json.loads(path.read_text(encoding="utf-8")) for path in starts])
    logs = [path.with_name(path.name.replace("start-", "server-")).with_suffix(".log") for path in starts]
    return draft.finish(document, {path.name: scrub(path.read_text(errors="replace")) for path in logs if path.is_file()})


def missing_points(job: Job, draft: records.Draft) -> list[rigs.Point]:
    """What is still to be measured, as far as it is known: the plan, then the refinements of the knee, one rate at a time.

    Everything here follows from the finished points alone, so a resumed run goes on exactly as the interrupted one would have.
    """
    finished = draft.points()
    plan = rigs.plan(job.rig, job.protocol.name, job.values, job.arm["name"], ceiling(finished))
    done = {point["point"] for point in finished}
    missing = [point for point in plan if point.index not in done]
    if missing:
        return missing
    refined = {point["request_rate"] for point in finished if point["point"] >= len(plan)}
    last = [point for point in finished if point["point"] >= len(plan)][-1:]
    repeats = job.settings["repeats"]
    if last and last[0]["repeat"] + 1 < repeats:
        rate, repeat = last[0]["request_rate"], last[0]["repeat"] + 1
    elif len(refined) < job.settings.get("refinements", 0):
        rate, repeat = refinement(records.frame_of_points(finished, job.rig.name), job.settings["slo"]), 0
    else:
        rate = None
    if rate is None:
        return []
    return [rigs.point_at(len(finished), job.settings, job.values, "measured", repeat, rate, job.settings["num_prompts"], job.arm["name"])]


def refinement(frame: Any, slo: dict[str, Any]) -> float | None:
    """The rate that tells most about the knee: inside its bracket, or below or above a sweep that does not hold one; null for none."""
    found = stats.knee(frame, slo)
    low, high = found["bracket"]
    if found["status"] == "fails at the lowest rate":
        return float(f"{high / REFINEMENT_STEP:.2g}")
    if found["status"] == "no knee in range":
        return float(f"{low * REFINEMENT_STEP:.2g}")
    return stats.next_rate(frame, slo)


def ceiling(finished: list[dict[str, Any]]) -> float | None:
    """Requests per second that the calibration flood completed; null before it, or where the rig has fixed rates."""
    return next((point["summary"]["completed_req_s"] for point in finished if point["pass"] == "calibration"), None)


def _announce(job: Job, draft: records.Draft, report: Reporter) -> None:
    """Tell how much is left, as far as it is known."""
    finished, missing = draft.points(), missing_points(job, draft)
    top = _top_rate(finished)
    report("plan", post=job.protocol.name, rig=job.rig.name, kept=len(finished), points=len(finished) + len(missing),
           seconds=round(sum(point.planned_s(top) for point in missing)))


def _top_rate(finished: list[dict[str, Any]]) -> float | None:
    """The highest completed rate so far: a guess of the server's ceiling for the time left, never used in a result."""
    return max((point["summary"]["completed_req_s"] or 0 for point in finished), default=0) or None


def _run_points(job: Job, draft: records.Draft, report: Reporter) -> None:
    """One server start: warm up, then every missing point."""
    number = len(list(draft.folder.glob("start-*.json")))
    before = {"host": hardware.host_facts(), "gpus": hardware.gpus(), "bandwidth": bandwidth(job.rig.device, report)}
    log = draft.folder / f"server-{number}.log"
    report("server", state="starting", log=str(log))
    with ThreadPoolExecutor(1) as pool:
        server = _server(job, log)
        loading = pool.submit(_bench, job, server.base_url)  # imports overlap with the server's start
        with server:
            bench = loading.result()
            start = {"server_start": number, "clock_s": time.perf_counter() - CLOCK_ZERO, **before, "server": server.facts,
                     "first_point": missing_points(job, draft)[0].index}
            records.write_json(draft.folder / f"start-{number}.json", start)
            report("server", state="ready", seconds=server.facts.get("ready_s"), said=server.facts.get("said", {}))
            gpu = 0 if job.rig.kind == "cuda" else None
            with Watcher(server.base_url, job.engine, CLOCK_ZERO, gpu) as watcher:
                place = (job, draft, number, server, bench, watcher, report)
                for point in _warm_up(job, draft):
                    _one_point(*place, point, keep=False)
                _announce(job, draft, report)
                while missing := missing_points(job, draft):
                    _one_point(*place, missing[0], keep=True)
            start["gpus_after"] = hardware.gpus()
            records.write_json(draft.folder / f"start-{number}.json", start)


def _warm_up(job: Job, draft: records.Draft) -> list[rigs.Point]:
    """The cold pass as far as a former server has run it: a resumed run has a new server, and a new server is cold.

    It is run again and thrown away. What of the cold pass is still missing follows as points of the plan.
    """
    finished = draft.points()
    plan = rigs.plan(job.rig, job.protocol.name, job.values, job.arm["name"], ceiling(finished))
    done = {point["point"] for point in finished}
    return [point for point in plan if point.pass_name == "cold" and point.index in done]


def _one_point(job: Job, draft: records.Draft, number: int, server: Server | Attached, bench: Any, watcher: Watcher, report: Reporter,
               point: rigs.Point, *, keep: bool) -> None:
    """Load, counters, summary, checks, and the record of one point."""
    entered = time.perf_counter()
    place = {"index": point.index, "pass": point.pass_name if keep else "warm-up", "rate": point.rate_label, "prompts": point.num_prompts}
    planned = point.planned_s(_top_rate(draft.points()))
    report("point", **place, planned_s=round(planned, 1))
    watcher.settle()
    result = bench.run(point, timeout_s=planned * 3 + POINT_GRACE_S, on_done=lambda done: report("progress", index=point.index, done=done))
    watcher.settle()
    server.require_alive()
    metrics = watcher.frame(result.start_s, result.end_s)
    summary = stats.point_summary(result.requests, result.chunks, metrics, point.request_rate, point.input_len, point.output_len)
    validity = stats.validity(result.requests, result.chunks, metrics, point.request_rate, point.input_len, point.output_len,
                              num_prompts=point.num_prompts, prefix_caching=server.facts.get("said", {}).get("prefix_caching"))
    overhead = time.perf_counter() - entered - (result.load_end_s - result.load_start_s)
    if keep:
        draft.save_point({**point.as_dict(), "start_s": round(result.start_s, 4), "end_s": round(result.end_s, 4),
                          "overhead_s": round(overhead, 3), "server_start": number, "summary": summary, "validity": validity,
                          "bench": scrub(result.bench)}, result.requests, result.chunks, metrics)
    report("point_done", **place, seconds=round(time.perf_counter() - entered, 1), overhead_s=round(overhead, 2),
           completed_req_s=summary["completed_req_s"], ttft_p50_ms=summary["ttft"]["p50_ms"], valid=validity["valid"],
           reasons=validity["reasons"])


def _server(job: Job, log: Path) -> Server | Attached:
    served = job.rig.model["served_name"]
    if job.values.get("base_url"):
        return Attached(job.values["base_url"], served, job.engine)
    return Server(serve_argv(job.model, served, job.flags), served_name=served, engine=job.engine, log=log,
                  port=job.values.get("port") or free_port(), environment=job.rig.engine.get("environment", {}),
                  ready_timeout_s=job.rig.engine.get("ready_timeout_s", 600.0))


def _bench(job: Job, base_url: str) -> Any:
    from .load import BenchServe  # the expensive import

    return BenchServe(base_url, job.rig.model.get("tokenizer", job.model), job.rig.model["served_name"], CLOCK_ZERO)


def bandwidth(device: str, report: Reporter) -> dict[str, Any]:
    """This machine's copy bandwidth, measured in a process of its own so that no GPU memory stays taken."""
    report("note", text=f"measuring the copy bandwidth of the {device}")
    return hardware.copy_bandwidth_apart(device)


def run_document(job: Job, draft: records.Draft, starts: list[dict[str, Any]]) -> dict[str, Any]:
    """`run.json` without its id and dates: everything that is not a point."""
    points = draft.points()
    invalid = {point["point"]: point["validity"]["reasons"] for point in points if not point["validity"]["valid"]}
    exact = engine(job.engine.version).exact
    return {
        "post": job.protocol.name, "arm": job.arm["name"], "parameters": _strict(job.values), "identity": job.identity,
        "rig": {"name": job.rig.name, "title": job.rig.title, "kind": job.rig.kind, "note": job.rig.note},
        "model": job.rig.model | {"config_digest": job.identity["model_config"], "weight_bytes": weight_bytes(job.model, job.rig.model.get("dtype"))},
        "engine": {"name": "vLLM", "version": job.engine.version, "table_exact": exact}, "flags": job.flags,
        "settings": _strict(job.settings), "ceiling_req_s": ceiling(points),
        "starts": scrub(starts), "units": {"time": "10 us on the run's clock"},
        "percentile_rule": stats.RULE,
        "validity": {"points": len(points), "invalid": invalid},
    }


def _strict(value: Any) -> Any:
    """JSON has no infinity: the rate of a flood is written "inf"."""
    if isinstance(value, dict):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_strict(each) for each in value]
    return "inf" if value == float("inf") else value


def scrub(value: Any) -> Any:
    """Replace this machine's home and repository paths, so that a record can be published as it is."""
    if isinstance(value, dict):
        return {key: scrub(each) for key, each in value.items()}
    if isinstance(value, list):
        return [scrub(each) for each in value]
    if isinstance(value, str):
        for path, name in sorted(_PATHS.items(), key=lambda pair: -len(pair[0])):
            value = value.replace(path, name)
    return value


_PATHS = {str(Path(sys.prefix)): "<venv>", str(Path(sys.base_prefix)): "<python>", tempfile.gettempdir(): "<temporary>", str(Path.home()): "~"}


def _watch_input(source: TextIO) -> None:
    """End of input means that whoever asked is gone: stop as on SIGTERM."""
    while source.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(number: int, _frame: object) -> None:
    # One stop is enough: a second signal must not interrupt the clean-up that the first one began.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Stopped(128 + number)


def main() -> None:
    # Standard output carries the reports alone: whatever libraries print goes to standard error.
    report = Reporter(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    report("hello", pid=os.getpid())
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_watch_input, args=(sys.stdin,), daemon=True).start()
    _PATHS[str(rigs.root())] = "<repo>"
    try:
        report("done", run=str(measure(request, report)))
    except WallError as problem:
        report("error", message=problem.message, remedy=problem.remedy)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
