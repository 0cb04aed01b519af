"""The measure process: the arms of some posts on one rig, from the first server's start to the last sealed record.

What:   reads one JSON document (what to measure) from standard input, starts one server for each configuration that is needed, runs every
        point that is not done yet (also of other posts that can use the same server, see docs/decisions/0004), and reports on standard
        output, one JSON document a line. It ends when its input is closed: whoever asked is gone.
Why:    one long-lived process outside the notebook kernel gives one clock for client, counters and GPU, pays for vLLM's imports
        once, and can clean up after a kernel that was killed.
Use:    python -m inference_wall.measure < request.json     (see `post.measure`, which is what a notebook calls)
        request: {"posts": {"part_2": {...}}, "rig": "cpu", "also": {"part_3": {...}}, "since": null}; {...}: the post's parameters
Not:    pages (`post`, `figures`), batches of posts (`regenerate`).
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from . import hardware, jobs, plans, records, rigs, run_document, stats
from .errors import EngineRefused, WallError
from .probe import Probe
from .quality import Quality
from .server import Attached, Server, end_leftovers, free_port, serve_argv
from .trace import Profiler, excerpt, profiler_config
from .watch import Watcher

CLOCK_ZERO = time.perf_counter()
POINT_GRACE_S = 600.0  # a point may take this much longer than planned before the run gives up
DISK_NEEDED_MIB = 200
_NUMBERS = itertools.count(1)  # of server starts of this process
KEEP_SERVER_S = 7 * 86_400
LOG, TRACES = "server.log", "traces"  # in a server's own folder


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


def measure(request: dict[str, Any], report: Reporter) -> list[Path]:
    """Measure what the wanted posts (`posts`) still lack, and return the folders of their records, one an arm.

    `also` holds posts whose arms ride along on the servers that the wanted ones start; arms of theirs that need another server stay undone.
    A finished record counts when it was finished after `since` (null: at any time). Of several posts one that fails does not stop the others;
    the error comes at the end.
    """
    wanted = [job for post, parameters in request["posts"].items() for job in jobs.prepare(post, request["rig"], parameters)]
    riders = [job for post, parameters in request.get("also", {}).items() for job in jobs.prepare(post, request["rig"], parameters)]
    for job in (*wanted, *riders):
        if Path(job.folder).is_dir():  # and not the name of a model on a hub
            run_document.PATHS[str(Path(job.folder).parent)] = "<models>"
    run_document.PATHS[str(records.benchmarks())] = "<benchmarks>"
    with _alone():
        return _measure(wanted, riders, _Batch(wanted, request.get("since"), report))


@contextmanager
def _alone() -> Iterator[None]:
    """Two measurements at once would disturb each other and still look valid; the lock goes with the process, however it ends."""
    path = records.benchmarks() / "local" / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            lock.seek(0)
            raise WallError(f"another measurement is running here (process {lock.read().strip() or 'unknown'})",
                            "wait for its end, or stop it; then run the same command again") from problem
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _measure(wanted: list[jobs.Job], riders: list[jobs.Job], batch: _Batch) -> list[Path]:
    free_mib = shutil.disk_usage(records.benchmarks()).free / 2**20
    if free_mib < DISK_NEEDED_MIB:
        raise WallError(f"only {free_mib:.0f} MiB are free at {records.benchmarks()}", f"free at least {DISK_NEEDED_MIB} MiB")
    groups: dict[str, list[jobs.Job]] = {}
    for job in (*wanted, *riders):
        groups.setdefault(job.server_key, []).append(job)
    needed = [group for group in groups.values() if any(job in wanted and batch.finished(job) is None for job in group)]
    batch.todo = [job for group in needed for job in group if batch.finished(job) is None]
    failed: dict[str, WallError] = {}
    for group in needed:
        try:
            batch.run(group)
        except WallError as problem:
            posts = {job.protocol.name for job in group if job in wanted and batch.finished(job) is None}
            if len({job.protocol.name for job in wanted}) == 1:
                raise
            batch.report("note", text=f"{group[0].name} failed: {problem.message}")
            failed |= dict.fromkeys(sorted(posts - set(failed)), problem)
    if failed:
        name, problem = next(iter(failed.items()))
        raise WallError(f"not measured to the end: {', '.join(failed)}. {name}: {problem.message}", problem.remedy)
    return [batch.finished(job) for job in wanted]


class _Batch:
    """The jobs of one measure process, one server start after the other."""

    def __init__(self, wanted: list[jobs.Job], since: str | None, report: Reporter):
        self.wanted, self.since, self.report = wanted, since, report
        self.todo: list[jobs.Job] = []
        self._finished: dict[str, Path] = {}
        self._before: dict[str, Any] | None = None
        self._bench_modules = ThreadPoolExecutor(1)

    def _draft(self, job: jobs.Job) -> records.Draft:
        return records.Draft.open(job.protocol.name, job.rig.name, job.arm.name, job.identity, since=self.since)

    def finished(self, job: jobs.Job) -> Path | None:
        """The sealed record of a job, or null."""
        identifier = records.run_id(job.identity)
        if identifier not in self._finished:
            found = records.find(job.protocol.name, job.rig.name, identifier, self.since)
            if found is None:
                return None
            self._finished[identifier] = found.path
        return self._finished[identifier]

    def run(self, group: list[jobs.Job]) -> None:
        """One server start for all jobs of a group that are not finished. An arm that the engine refuses is sealed as such."""
        drafts = {job.name: self._draft(job) for job in group if self.finished(job) is None}
        group = [job for job in group if job.name in drafts]
        if any(jobs.missing_points(job, drafts[job.name].points()) for job in group):
            for pid in end_leftovers():
                self.report("note", text=f"stopped a server left over by a killed run (process {pid})")
            try:
                self._serve(group, drafts)
            except EngineRefused as problem:
                # The rig itself must start; and an arm that has been measured is not refused, whatever happens to a later start.
                if any(job.arm.is_base or drafts[job.name].done for job in group):
                    raise
                self.report("note", text=f"not testable here: {group[0].name}: {problem.reason}")
                for job in group:
                    self._seal(job, drafts[job.name], {"reason": run_document.scrub(problem.reason), "remedy": run_document.scrub(problem.remedy)})
                return
        for job in group:
            if self.finished(job) is None and not jobs.missing_points(job, drafts[job.name].points()):
                self._seal(job, drafts[job.name])

    def _serve(self, group: list[jobs.Job], drafts: dict[str, records.Draft]) -> None:
        first, number = group[0], f"{records.stamp(records.now())}-{os.getpid()}-{next(_NUMBERS)}"
        folder = records.benchmarks() / "local" / "servers" / number
        _remove_old(folder.parent)
        folder.mkdir(parents=True, exist_ok=True)
        self._before = self._before or before(first, self.report)
        start = {"id": number, "clock_s": time.perf_counter() - CLOCK_ZERO, **self._before, "server": {}}
        self.report("server", state="starting", log=str(folder / LOG), arms=[job.name for job in group])
        server = _server(first, folder)
        loading = self._bench_modules.submit(_clients, first, server.base_url)  # imports overlap with the server's start
        try:
            with server:
                clients = loading.result()
                start["client_import_s"] = clients["bench"].import_s
                start["server"] = server.facts
                self.report("server", state="ready", seconds=server.facts.get("ready_s"), said=server.facts.get("said", {}))
                with Watcher(server.base_url, first.engine, CLOCK_ZERO, _sampled_gpu(first)) as watcher:
                    stations = [_Station(job, drafts[job.name], start, server, clients, watcher, folder, self.report) for job in group]
                    # The profiler comes last: a server that has been profiled may be slower ever after.
                    for profiled in (False, True):
                        for station in stations:
                            self._work(station, profiled, lambda: self._announce(drafts))
                for station in stations:
                    if not station.failed:
                        self._seal(station.job, station.draft)
                # One that was wanted did not come through: an error, but not before the others are safe.
                for station in stations:
                    if station.failed and any(station.job is job for job in self.wanted):
                        raise station.failed
        except EngineRefused:
            for draft in drafts.values():
                spent = round(time.perf_counter() - CLOCK_ZERO - start["clock_s"], 2)
                records.write_json(draft.folder / f"start-{number}.json", {**start, "server": {"refused_after_s": spent}})
            raise

    def _work(self, station: _Station, profiled: bool, announce: Callable[[], None]) -> None:
        """One job's points with or without the profiler. One that fails while the server lives is left; the others go on."""
        if station.failed:
            return
        try:
            station.run(profiled, announce)
        except WallError as problem:
            station.server.require_alive()
            station.failed = problem
            self.report("note", text=f"{station.job.name} is left for later: {problem.message}")

    def _announce(self, drafts: dict[str, records.Draft]) -> None:
        """Tell how much is left, as far as it is known."""
        kept, missing = 0, 0
        for job in self.todo:
            path = self.finished(job)
            points = drafts[job.name].points() if path is None and job.name in drafts else []
            kept += len(records.open_run(path).points) if path else len(points)
            missing += 0 if path else len(jobs.missing_points(job, points))
        self.report("plan", kept=kept, points=kept + missing, jobs=[job.name for job in self.todo])

    def _seal(self, job: jobs.Job, draft: records.Draft, refused: dict[str, str] | None = None) -> None:
        starts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(draft.folder.glob("start-*.json"))]
        logs = {start["id"]: records.benchmarks() / "local" / "servers" / start["id"] / LOG for start in starts}
        document = run_document.run_document(job, draft, starts, refused)
        path = draft.finish(document, {name: run_document.scrub(log.read_text(errors="replace")) for name, log in logs.items() if log.is_file()})
        self._finished[records.run_id(job.identity)] = path
        self.report("sealed", run=str(path), arm=job.name)


def _remove_old(folder: Path) -> None:
    """Logs and raw traces of servers of former weeks. What a record needs of them it holds itself."""
    for path in folder.glob("*"):
        if time.time() - path.stat().st_mtime > KEEP_SERVER_S:
            shutil.rmtree(path, ignore_errors=True)


@dataclasses.dataclass
class _Station:
    """One job on one running server."""

    job: jobs.Job
    draft: records.Draft
    start: dict[str, Any]
    server: Server | Attached
    clients: dict[str, Any]
    watcher: Watcher
    folder: Path
    report: Reporter
    failed: WallError | None = None

    def missing(self, profiled: bool) -> list[plans.Point]:
        return [point for point in jobs.missing_points(self.job, self.draft.points()) if (point.pass_name == "trace") == profiled]

    def run(self, profiled: bool, announce: Callable[[], None]) -> None:
        """Warm up, then every missing point, either those under the profiler or the others."""
        if not self.missing(profiled):
            return
        note = self.draft.folder / f"start-{self.start['id']}.json"
        fresh = not note.is_file()
        number = len(list(self.draft.folder.glob("start-*.json"))) - (not fresh)
        # Before the first point: a run that is killed here must still know which servers its points ran on.
        records.write_json(note, {**self.start, "server_start": number})
        for point in self._warm_up() if fresh else []:
            self._one_point(point, number, keep=False)
        announce()
        while missing := self.missing(profiled):
            self._one_point(missing[0], number, keep=True)
        records.write_json(note, {**self.start, "server_start": number, "gpus_after": hardware.gpus()})

    def _warm_up(self) -> list[plans.Point]:
        """The cold pass as far as a former server has run it: a resumed run has a new server, and a new server is cold.

        It is run again and thrown away. What of the cold pass is still missing follows as points of the plan.
        """
        finished = self.draft.points()
        done = {point["point"] for point in finished}
        return [point for point in self.job.plan(jobs.ceiling(finished)) if point.pass_name == "cold" and point.index in done]

    def _one_point(self, point: plans.Point, number: int, *, keep: bool) -> None:
        """Load, counters, summary, checks, and the record of one point."""
        entered = time.perf_counter()
        place = {"index": point.index, "pass": point.pass_name if keep else "warm-up", "label": point.label, "prompts": point.num_prompts,
                 "arm": self.job.name}
        planned = point.planned_s(_top_rate(self.draft.points()))
        self.report("point", **place, planned_s=round(planned, 1))
        self.watcher.settle()
        result, trace = self._load(point, planned * 3 + POINT_GRACE_S)
        self.watcher.settle()
        self.server.require_alive()
        metrics = self.watcher.frame(result.start_s, result.end_s)
        shape = (point.request_rate, point.input_len, point.output_len)
        found = stats.verdict(result.requests, result.chunks, metrics, shape, num_prompts=point.num_prompts if point.kind == "bench" else None,
                              prefix_caching=self.server.facts.get("said", {}).get("prefix_caching"))
        summary, validity = found["summary"], found["validity"]
        overhead = time.perf_counter() - entered - (result.load_end_s - result.load_start_s)
        if keep:
            self.draft.save_point({**point.as_dict(), "start_s": round(result.start_s, 4), "end_s": round(result.end_s, 4),
                                   "overhead_s": round(overhead, 3), "server_start": number, **found,
                                   "bench": run_document.scrub(result.bench)}, result.requests, result.chunks, metrics, trace)
        self.report("point_done", **place, seconds=round(time.perf_counter() - entered, 1), overhead_s=round(overhead, 2),
                    completed_req_s=summary["completed_req_s"], ttft_p50_ms=summary["ttft"]["p50_ms"], valid=validity["valid"],
                    reasons=validity["reasons"])

    def _load(self, point: plans.Point, timeout_s: float) -> tuple[Any, Path | None]:
        """Run a point's client; a point of the pass `trace` runs under the profiler, and its excerpt is returned as well."""

        def done(count: int) -> None:
            self.report("progress", index=point.index, done=count)

        client = self.clients["probe" if point.kind in ("streams", "victims") else point.kind]
        if point.pass_name != "trace":
            return client.run(point, timeout_s=timeout_s, on_done=done), None
        profiler = Profiler(self.server.base_url, self.folder / TRACES)
        result = client.run(point, timeout_s=timeout_s, on_done=done, profile=profiler)
        trace, result.bench["trace"] = _excerpt(profiler, self.folder, point.index)
        return result, trace


def _excerpt(profiler: Profiler, folder: Path, index: int) -> tuple[Path | None, dict[str, Any]]:
    """The bounded trace of a point, or null with the reason: a trace is worth having, but a point is not lost for lack of one."""
    raw = profiler.result()
    if raw is None:
        return None, {"reason": profiler.problem}
    try:
        target = folder / f"excerpt-{index:04d}.json.gz"
        facts = excerpt(raw, target)
        return target, facts
    except WallError as problem:
        return None, {"reason": problem.message}
    finally:
        raw.unlink(missing_ok=True)


def _top_rate(finished: list[dict[str, Any]]) -> float | None:
    """The highest completed rate so far: a guess of the server's ceiling for the time left, never used in a result."""
    return max((point["summary"]["completed_req_s"] or 0 for point in finished), default=0) or None


def _server(job: jobs.Job, folder: Path) -> Server | Attached:
    served = job.model["served_name"]
    if job.values.get("base_url"):
        return Attached(job.values["base_url"], served, job.engine)
    # The profiler costs nothing until it is started.
    flags = {**job.flags, "profiler-config": profiler_config(folder / TRACES)}
    return Server(serve_argv(job.folder, served, flags), served_name=served, engine=job.engine, log=folder / LOG,
                  port=job.values.get("port") or free_port(), environment=job.environment,
                  ready_timeout_s=job.rig.engine.get("ready_timeout_s", 600.0), keep_imports=job.rig.engine.get("keep_imports", False))


def _clients(job: jobs.Job, base_url: str) -> dict[str, Any]:
    """The client for each kind of load."""
    from .load import BenchServe  # the expensive import

    served, tokenizer = job.model["served_name"], job.model.get("tokenizer", job.folder)
    return {"bench": BenchServe(base_url, tokenizer, served, CLOCK_ZERO), "probe": Probe(base_url, served, clock_zero=CLOCK_ZERO),
            "quality": Quality(base_url, served, tokenizer, CLOCK_ZERO)}


def before(job: jobs.Job, report: Reporter) -> dict[str, Any]:
    """Facts about the machine, once a process: host, GPUs, and memory bandwidth with as many threads as the engine computes with."""
    if job.values.get("base_url"):
        return {"host": hardware.host_facts(), "gpus": hardware.gpus(), "bandwidth": {}}  # the server may be anywhere
    device, threads = job.rig.device, job.environment.get("OMP_NUM_THREADS")
    report("note", text=f"measuring the memory bandwidth of the {device}")
    return {"host": hardware.host_facts(), "gpus": hardware.gpus(),
            "bandwidth": hardware.copy_bandwidth_apart(device, threads=int(threads) if threads and device == "cpu" else None)}


def _sampled_gpu(job: jobs.Job) -> int | None:
    """The GPU whose clocks and power are sampled; null without one, or where the server may be elsewhere."""
    return hardware.visible_gpu() if job.rig.kind == "cuda" and not job.values.get("base_url") else None


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
    run_document.PATHS[str(rigs.root())] = "<repo>"
    try:
        report("done", runs=[str(path) for path in measure(request, report)])
    except WallError as problem:
        report("error", message=problem.message, remedy=problem.remedy)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
