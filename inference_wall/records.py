"""Records: what a run leaves on disk, written so that nothing half-done can pass for done.

What:   the folder of one run (see docs/decisions/0001), its identity, its atomic writing point by point, its seal, and reading.
Why:    a number on a page is worth what its record is worth. A folder counts only with its seal: the file `COMPLETE`, written
        last, holding the sha256 of every other file. Killing any process at any moment loses at most the point in flight.
Use:    draft = Draft.open("part_1", "cpu", "default", identity); draft.save_point(...); path = draft.finish(document, logs)
        run = newest("part_1", "cpu"); points_frame(run)
Not:    summaries and validity (`stats`), the author's published figures (`published`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from .errors import WallError
from .rigs import digest, root
from .samples import UNIT_S
from .stats import LATENCIES

SCHEMA_VERSION = 1
SEAL = "COMPLETE"
TRACE = "trace.json.gz"  # in the folder of a point; in a record it carries the point's number
STATISTICS = ("n", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms")
# The parts of the instrument that decide what a record says. Figures, prose and the site do not.
INSTRUMENT = ("engines", "hardware", "jobs", "knee", "load", "measure", "percentiles", "plans", "probe", "quality", "quantized", "records", "rigs",
              "run_document", "samples", "server", "shapes", "stats", "trace", "trace_excerpt", "trace_file", "watch", "weights")

_SCHEMAS = {
    "requests": pa.schema([
        ("point", pa.int16()), ("request", pa.int32()), ("role", pa.string()), ("stream", pa.int16()), ("round", pa.int16()),
        ("intended", pa.int64()), ("sent", pa.int64()), ("first_token", pa.int64()), ("end", pa.int64()),
        ("asked_prompt_tokens", pa.int32()), ("asked_output_tokens", pa.int32()), ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()), ("outcome", pa.string()), ("error", pa.string())]),
    "chunks": pa.schema([("point", pa.int16()), ("request", pa.int32()), ("time", pa.int64()), ("tokens", pa.int16())]),
}
UNFINISHED = (".writing", ".partial", ".old")  # folders that are no record, or none any more
FRAMES = ("requests", "chunks", "metrics")


def benchmarks() -> Path:
    """`$WALL_BENCHMARKS`, or `benchmarks/` of the repository."""
    named = os.environ.get("WALL_BENCHMARKS")
    return Path(named) if named else root() / "benchmarks"


def code_version() -> str:
    """Hex digest of the sources that decide what a record says (first 16 digits of sha256)."""
    folder = Path(__file__).parent
    joined = b"".join((folder / f"{name}.py").read_bytes() for name in INSTRUMENT)
    joined += b"".join(path.read_bytes() for path in sorted((root() / "experiments").glob("*/text.txt")))  # what `quality` reads
    return hashlib.sha256(joined).hexdigest()[:16]


def run_id(identity: dict[str, Any]) -> str:
    """The run's name for resuming: a digest of protocol, plan, rig, model, code and engine. Hex, 64 digits."""
    return digest({"schema": SCHEMA_VERSION, **identity})


# --- writing ------------------------------------------------------------------------------------------------------


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    """A full or read-only disk is the user's to mend, not a stack of frames."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG):
            raise WallError(f"cannot write {what}: {problem.strerror}",
                            "free some space or mend the permissions, then run the same command again: finished points are kept") from problem
        raise


def write_json(path: Path, value: Any) -> None:
    """Strict JSON, whole or not at all: a NaN or an infinity is a ValueError, a kill in the middle leaves the old file."""
    building = path.with_name(f".{path.name}.writing")
    building.write_text(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(building, path)


def _write_frame(path: Path, frame: pd.DataFrame, name: str) -> None:
    schema = _SCHEMAS.get(name)
    if schema is None:  # metrics: point, time, and one float column a counter
        schema = pa.schema([("point", pa.int16()), ("time", pa.int64()),
                            *((column, pa.float64()) for column in frame.columns if column not in ("point", "time"))])
    table = pa.Table.from_pandas(frame.reindex(columns=schema.names), schema=schema, preserve_index=False)
    times = [column for column in ("intended", "sent", "first_token", "end", "time") if column in schema.names]
    # Times rise by small steps: as differences they take a byte or two each instead of eight.
    pq.write_table(table, path, compression="zstd", compression_level=9, use_dictionary=[c for c in schema.names if c not in times],
                   column_encoding={column: "DELTA_BINARY_PACKED" for column in times})


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir()) if path.name != SEAL}


def _replace_sealed(building: Path, final: Path) -> None:
    """Seal a finished folder, make it durable, and give it its name in one step."""
    write_json(building / SEAL, {"sha256": _hashes(building)})
    for path in building.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    os.replace(building, final)


def rewrite(folder: Path, files: dict[str, str]) -> None:
    """Replace text files of a sealed record and seal it anew. A crash in between loses nothing: the former record lies beside it, as `.old`."""
    building, old = folder.with_name(folder.name + ".writing"), folder.with_name(folder.name + ".old")
    with _disk_errors(str(folder)):
        for leftover in (building, old):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(folder, building)
        for name, text in files.items():
            (building / name).write_text(text, encoding="utf-8")
        os.replace(folder, old)
        _replace_sealed(building, folder)
        shutil.rmtree(old)


def seal_problem(folder: Path) -> str | None:
    """Why the folder does not count as a record, or null when it does."""
    if not (folder / SEAL).is_file():
        return "not finished: it has no COMPLETE file"
    try:
        expected = json.loads((folder / SEAL).read_text(encoding="utf-8"))["sha256"]
    except (ValueError, KeyError, TypeError):
        return "its COMPLETE file is damaged"
    found = _hashes(folder)
    if found != expected:
        changed = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        return f"changed or lost after it was sealed: {', '.join(changed)}"
    return None


class Draft:
    """A run that is being measured: one sealed folder a point below `<arm>-<id>.partial/points/`."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def open(cls, post: str, rig: str, arm: str, identity: dict[str, Any], where: Path | None = None, since: str | None = None) -> Draft:
        """The unfinished run with this identity, or a new one. Leftovers of a point that was being written are removed.

        `since` (ISO time): an unfinished run that was begun earlier is thrown away, since its points are older than what is wanted.
        """
        parent = (where or benchmarks() / "local") / post / rig
        draft = cls(parent / f"{arm}-{run_id(identity)[:8]}.partial")
        with _disk_errors(str(draft.folder)):
            for done in parent.glob("*.done"):
                shutil.rmtree(done)
            started = draft.started
            if draft.folder.is_dir() and (started is None or started < (since or "") or draft.final.is_dir()):
                shutil.rmtree(draft.folder)
            (draft.folder / "points").mkdir(parents=True, exist_ok=True)
            if not (draft.folder / "identity.json").is_file():
                moment = datetime.now(UTC)
                while draft.named(moment.isoformat()).exists():  # a record of the same second keeps its name
                    moment += timedelta(seconds=1)
                write_json(draft.folder / "identity.json",
                           {"run_id": run_id(identity), "started": moment.isoformat(timespec="seconds"), **identity})
            for path in (draft.folder / "points").iterdir():
                if path.name.endswith(".writing") or seal_problem(path):
                    shutil.rmtree(path)
        return draft

    @property
    def started(self) -> str | None:
        """ISO time of the first start of this run; null where the draft is not there or cannot be read."""
        try:
            return json.loads((self.folder / "identity.json").read_text(encoding="utf-8"))["started"]
        except (OSError, ValueError, KeyError):
            return None

    @property
    def final(self) -> Path:
        """The folder of the record that this draft becomes."""
        return self.named(self.started or now())

    def named(self, moment: str) -> Path:
        """The record's folder for a start at that ISO time."""
        arm, short = self.folder.name.removesuffix(".partial").rsplit("-", 1)
        return self.folder.with_name(f"{arm}-{short}-{stamp(moment)}")

    @property
    def done(self) -> list[int]:
        """Indices of the finished points, ascending."""
        return sorted(int(path.name) for path in (self.folder / "points").iterdir() if path.name.isdigit())

    def save_point(self, document: dict[str, Any], requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame,
                   trace: Path | None = None) -> None:
        """Write one point, with its trace where there is one; when this returns it survives anything."""
        index = document["point"]
        building, final = (self.folder / "points" / f"{index:04d}{suffix}" for suffix in (".writing", ""))
        with _disk_errors(str(final)):
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            for name, frame in zip(FRAMES, (requests, chunks, metrics), strict=True):
                _write_frame(building / f"{name}.parquet", frame.assign(point=index), name)
            if trace is not None:
                shutil.copyfile(trace, building / TRACE)
            write_json(building / "point.json", document)
            _replace_sealed(building, final)

    def points(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / "points" / f"{index:04d}" / "point.json").read_text(encoding="utf-8")) for index in self.done]

    def finish(self, document: dict[str, Any], logs: dict[str, str]) -> Path:
        """Join the points into one sealed record, remove the draft, return the record's folder. `logs`: text by name."""
        identity = json.loads((self.folder / "identity.json").read_text(encoding="utf-8"))
        final = self.final
        building = final.with_name(final.name + ".writing")
        with _disk_errors(str(final)):
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            for name in FRAMES:
                parts = [pq.read_table(self.folder / "points" / f"{index:04d}" / f"{name}.parquet").to_pandas() for index in self.done]
                # An arm that was refused has no points.
                joined = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"point": [], "time": []})
                _write_frame(building / f"{name}.parquet", joined, name)
            for index in self.done:
                if (trace := self.folder / "points" / f"{index:04d}" / TRACE).is_file():
                    shutil.copyfile(trace, building / f"trace-{index:04d}.json.gz")
            with (building / "points.jsonl").open("w", encoding="utf-8") as lines:
                for point in self.points():
                    lines.write(json.dumps(point, allow_nan=False, ensure_ascii=False) + "\n")
            write_json(building / "run.json", {"schema_version": SCHEMA_VERSION, "run_id": identity["run_id"],
                                               "started": identity["started"], "finished": now(), **document})
            with (building / "server.log.zst").open("wb") as sink, zstandard.ZstdCompressor(level=10).stream_writer(sink) as packer:
                for name, text in logs.items():
                    packer.write(f"==> {name} <==\n{text}\n".encode())
            _replace_sealed(building, final)
            # Out of the way in one step: half a draft must never be taken up again.
            done = self.folder.with_suffix(".done")
            os.replace(self.folder, done)
            shutil.rmtree(done)
        return final


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def stamp(moment: str) -> str:
    """ISO time -> the form used in folder names, 20261129T183000Z."""
    return datetime.fromisoformat(moment).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A sealed record. Frames are read when asked for."""

    path: Path
    document: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def arm(self) -> str:
        return self.document["arm"]

    @property
    def set_id(self) -> str:
        """What the records of all arms that were asked for together have in common."""
        return self.document.get("set_id") or self.document["run_id"]

    @property
    def not_testable(self) -> dict[str, str] | None:
        """Why the engine refused this arm ({"reason", "remedy"}), or null for an arm that was measured."""
        return self.document.get("not_testable")

    @property
    def said(self) -> dict[str, Any]:
        """What the server said at its last start: canonical names of `engines.Engine.parse_log`."""
        return self.document["starts"][-1]["server"].get("said", {}) if self.document["starts"] else {}

    def trace(self, point: int) -> Path | None:
        """The profiler's trace of a point of the pass `trace`, or null."""
        path = self.path / f"trace-{point:04d}.json.gz"
        return path if path.is_file() else None

    @property
    def is_local(self) -> bool:
        return "local" in self.path.relative_to(benchmarks()).parts if self.path.is_relative_to(benchmarks()) else True

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "points.jsonl").read_text(encoding="utf-8").splitlines()]

    def frame(self, name: str, point: int | None = None) -> pd.DataFrame:
        """`requests`, `chunks` or `metrics`; of one point, or of the whole run. Metrics of a point reach one sample beyond it on either side."""
        frame = pq.read_table(self.path / f"{name}.parquet").to_pandas()
        if point is None:
            return frame
        if "point" in frame:
            return frame[frame["point"] == point].reset_index(drop=True)
        # Records of before: samples without a point, on one clock.
        chosen = next(each for each in self.points if each["point"] == point)
        first = int(frame["time"].searchsorted(chosen["start_s"] / UNIT_S)) - 1
        last = int(frame["time"].searchsorted(chosen["end_s"] / UNIT_S, side="right"))
        return frame.iloc[max(first, 0):last + 1].reset_index(drop=True)

    def log(self) -> str:
        with (self.path / "server.log.zst").open("rb") as packed:
            return zstandard.ZstdDecompressor().stream_reader(packed).read().decode(errors="replace")


def open_run(path: Path) -> Run:
    """Read a record, or raise: not there, not finished, changed after sealing, or written by a newer version."""
    if not path.is_dir():
        raise WallError(f"no record at {path}", "list what there is with `wall runs`")
    problem = seal_problem(path)
    if problem:
        raise WallError(f"record {path.name} cannot be used: {problem}",
                        "measure it again with `wall run`; an unfinished one goes on where it stopped")
    document = json.loads((path / "run.json").read_text(encoding="utf-8"))
    if document.get("schema_version", 0) > SCHEMA_VERSION:
        raise WallError(f"record {path.name} has schema version {document['schema_version']}, newer than this code reads ({SCHEMA_VERSION})",
                        "update the repository")
    return Run(path, document)


def record_folders(post: str | None = None, rig: str | None = None, committed_only: bool = False) -> list[Path]:
    """Folders of finished records, newest start last. Drafts and half-written ones are not among them."""
    places = [benchmarks()] if committed_only else [benchmarks(), benchmarks() / "local"]
    found = [path.parent for place in places for path in place.glob(f"{post or 'part_*'}/{rig or '*'}/*/run.json")]
    return sorted((path for path in found if path.suffix not in UNFINISHED), key=lambda path: (path.name.rsplit("-", 1)[-1], path.name))


def newest(post: str, rig: str, committed_only: bool = False) -> Run | None:
    """The latest whole record of a post on a rig, or null. A damaged record is passed over: it proves nothing."""
    for folder in reversed(record_folders(post, rig, committed_only)):
        if seal_problem(folder) is None:
            return open_run(folder)
    return None


def find(post: str, rig: str, identifier: str, since: str | None = None) -> Run | None:
    """The newest whole local record with that run id, or null; with `since` (ISO time) only one that was finished after it."""
    for folder in reversed(record_folders(post, rig)):
        if f"-{identifier[:8]}-" in folder.name and seal_problem(folder) is None:
            run = open_run(folder)
            if run.document["run_id"] == identifier and run.is_local and (since is None or run.document["finished"] >= since):
                return run
    return None


def inventory() -> list[dict[str, Any]]:
    """Every run folder with its state: `finished`, `finished (local)`, `unfinished: ...` or `damaged: ...`."""
    rows = []
    drafts = list(benchmarks().glob("local/part_*/*/*.partial"))
    for folder in sorted([*record_folders(), *drafts]):
        problem = seal_problem(folder)
        if folder.suffix == ".partial":
            state = f"unfinished: {len(Draft(folder).done)} points done"
        else:
            state = f"damaged: {problem}" if problem else "finished" + (" (local)" if folder.parts[-4] == "local" else "")
        rows.append({"post": folder.parts[-3], "rig": folder.parts[-2], "run": folder.name, "state": state, "path": str(folder)})
    return rows


def keep(path: Path) -> Path:
    """Move a local record to the committed ones. A damaged, invalid-schema or scaled-down record is refused."""
    run = open_run(path)
    if not run.is_local:
        raise WallError(f"{run.name} is already among the committed records", "nothing to do")
    if (run.document["parameters"].get("scale") or 1.0) != 1.0:
        raise WallError(f"{run.name} was measured at scale {run.document['parameters']['scale']}", "measure at scale 1 before keeping it")
    final = benchmarks() / run.document["post"] / run.document["rig"]["name"] / run.name
    with _disk_errors(str(final)):
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, final)
    return final


def points_frame(run: Run) -> pd.DataFrame:
    """One row a point with the columns of docs/decisions/0001, "The frame that pages read"."""
    return frame_of_points(run.points, run.document["rig"]["name"])


def frame_of_points(points: list[dict[str, Any]], rig: str) -> pd.DataFrame:
    """Documents of points, finished or of a draft, as that frame."""
    rows = []
    for point in points:
        summary, validity = point["summary"], point["validity"]
        row = {"rig": rig, "source": "measured", "pass": point["pass"], "rate_label": point["rate_label"],
               "request_rate": float("inf") if point["request_rate"] is None else point["request_rate"],
               "valid": validity["valid"], "reasons": validity["reasons"], "point": point["point"],
               **{name: point.get(name) for name in POINT_COLUMNS},
               **{name: summary.get(name) for name in COUNTS}}
        for latency in LATENCIES:
            row |= {f"{latency}_{statistic}": summary[latency].get(statistic) for statistic in STATISTICS}
        rows.append(row)
    return pd.DataFrame(rows)


POINT_COLUMNS = ("repeat", "num_prompts", "arm", "load", "kind", "max_concurrency", "victims", "injected", "injected_len", "rounds", "input_len",
                 "output_len", "server_start")
COUNTS = ("completed", "failed", "completed_req_s", "output_tok_s", "steady_req_s", "steady_offered_req_s", "steady_output_tok_s",
          "running_mean", "running_max",
          "waiting_max", "kv_cache_usage_max", "preemptions")
