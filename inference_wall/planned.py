"""What a batch would take, before anything starts; and what it took, when it is over.

What:   `describe` prints server starts, arms, points and expected minutes of a batch of posts; `summary` the starts and minutes that the records
        of a rig took, each shared start counted once; `again_since` lets an interrupted batch that measures anew go on.
Why:    GPU minutes are the cost. Whoever pays them should know them before, and see afterwards how many went into starts and how many into load.
Use:    print(describe({"part_2": jobs.prepare("part_2", "cpu", {})}))     (`wall run all --plan`)
Not:    the plan itself (`plans`), measuring (`measure`).

Expected minutes come from the newest records of the same rig, point by point, stretched by the number of prompts. Where there is no such point
the arrivals are counted, and the text says for how many points it knew nothing better.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import arms, records
from .jobs import Job, missing_points


def describe(prepared: dict[str, list[Job]]) -> str:
    """The plan of a batch as text: one block a post, then starts and expected minutes over all of them."""
    every = [job for jobs in prepared.values() for job in jobs]
    first = every[0]
    known = _Known(first.rig.name)
    lines = [f"rig {first.rig.name}: {first.rig.title}, vLLM {first.engine.version}"]
    for name, jobs in prepared.items():
        lines.append(f"{name}: {jobs[0].protocol.title}")
        for job in jobs:
            points = job.plan(known.ceiling) if job.settings.get("rate_fractions") else missing_points(job, [])
            before = known.guessed
            seconds = [known.seconds(job, point) for point in points]
            minutes = "of unknown length" if known.guessed - before == len(points) else f"about {sum(seconds) / 60:.1f} min of load"
            open_end = ", rates follow from a first flood" if job.settings.get("rate_fractions") else ""
            lines.append(f"  {job.arm.name:<14} {len(points):3d} points, {minutes}{open_end}"
                         + (f"   [{_flags(job)}]" if _flags(job) else ""))
            for load in dict.fromkeys((point.pass_name, point.load) for point in points):
                chosen = [point for point in points if (point.pass_name, point.load) == load]
                lines.append(f"      {load[0]:<11} {load[1]:<9} {len(chosen):2d} x  "
                             + "; ".join(dict.fromkeys(_size(point) for point in chosen)))
    starts = 0 if first.values.get("base_url") else len({job.server_key for job in every})
    start_s = starts * known.start_s
    unknown = f" (at least: {known.guessed} points have no earlier record to go by)" if known.guessed else ""
    lines.append(f"{starts} server starts, " + (f"about {start_s / 60:.1f} min" if known.start_s else "of unknown length (no record of this rig yet)")
                 + f"; about {known.total_s / 60:.1f} min of load{unknown}")
    return "\n".join(lines)


def _flags(job: Job) -> str:
    return ", ".join([*(f"{name}={value}" if value is not True else name for name, value in job.arm.flags.items()),
                      *([job.model["name"]] if job.arm.model else [])])


def _size(point: Any) -> str:
    own = f"{point.num_prompts} x {point.input_len} in / {point.output_len} out"
    if point.kind == "quality":
        return "a fixed text"
    if point.kind == "victims":
        return f"{own} looping, {point.rounds} x {point.injected} prompts of {point.injected_len}"
    return own + (f", {point.max_concurrency} at a time" if point.max_concurrency else "")


class _Known:
    """What earlier records of a rig say about seconds."""

    def __init__(self, rig: str):
        sets = [found for found in (arms.newest(post, rig) for post in _posts()) if found]
        runs = [run for found in sets for run in found]
        starts = [start["server"]["ready_s"] for run in runs for start in run.document["starts"] if start.get("server", {}).get("ready_s")]
        self.start_s = sorted(starts)[len(starts) // 2] if starts else 0.0
        self.ceiling = next((run.document["ceiling_req_s"] for run in runs if run.document.get("ceiling_req_s")), None)
        self.seen: dict[tuple, tuple[float, int]] = {}
        for run in runs:
            for point in run.points:
                key = (run.document["post"], run.arm, point["pass"], point.get("load"), point.get("max_concurrency"), point["num_prompts"])
                size = point["num_prompts"] * max(1, point.get("rounds") or 1)
                self.seen[key] = self.seen[key[:-2]] = (point["end_s"] - point["start_s"] + point["overhead_s"], size)
        self.total_s, self.guessed = 0.0, 0

    def seconds(self, job: Job, point: Any) -> float:
        key = (job.protocol.name, job.arm.name, point.pass_name, point.load, point.max_concurrency, point.num_prompts)
        found = self.seen.get(key) or self.seen.get(key[:-2])
        if found is None:
            self.guessed += 1
        seconds = found[0] * point.num_prompts * max(1, point.rounds) / found[1] if found else point.planned_s()
        self.total_s += seconds
        return seconds


def _posts() -> list[str]:
    return sorted({folder.parts[-3] for folder in records.record_folders()})


def again_since(request: dict[str, Any]) -> str:
    """From when on records count in a batch that measures anew: from now, or from the start of the same batch if it was interrupted."""
    note = _again_note()
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["request"] == request:
            return known["since"]
    except (OSError, ValueError, KeyError):
        pass
    since = records.now()
    note.parent.mkdir(parents=True, exist_ok=True)
    records.write_json(note, {"request": request, "since": since})
    return since


def again_done() -> None:
    """The batch is over: the next one that measures anew begins anew."""
    _again_note().unlink(missing_ok=True)


def _again_note() -> Path:
    return records.benchmarks() / "local" / "again.json"


def summary(posts: list[str], rig: str) -> str:
    """One line on what the newest records of these posts on a rig took."""
    sets = [found for found in (arms.newest(post, rig) for post in posts) if found]
    runs = [run for found in sets for run in found]
    took, refused = arms.accounting(runs), [f"{found.post} {name}" for found in sets for name in found.refused]
    text = (f"{len(sets)} posts, {len(runs)} arms, {took['points']} points: {took['starts']} server starts in {took['start_s'] / 60:.1f} min, "
            f"load in {took['load_s'] / 60:.1f} min")
    return text + (f"; not testable here: {', '.join(refused)}" if refused else "")
