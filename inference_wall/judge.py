"""Judge a record again: the same raw rows, the checks of today.

What:   `judge(path)` computes summary and validity of every point of a local record anew from its raw rows and counters, and seals it
        again; `run.json` says by which code and what the verdicts were before.
Why:    GPU minutes are dear and raw rows are kept. When a check turns out to be wrong, what was measured need not be measured again.
Use:    wall judge benchmarks/local/part_1/RIG/RECORD
Not:    committed records, which never change; anything that was not recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import records, stats
from .errors import WallError


def judge(path: Path) -> dict[str, list[str]]:
    """Returns, by point whose verdict changed, the reasons before and now. WallError for a damaged or a committed record."""
    run = records.open_run(path)
    if not run.is_local:
        raise WallError(f"{run.name} is committed, and committed records never change", "judge records in benchmarks/local only")
    caching = run.said.get("prefix_caching")
    points = [_judged(run, point, caching) for point in run.points]
    changed = {str(new["point"]): [", ".join(old["validity"]["reasons"]) or "valid", ", ".join(new["validity"]["reasons"]) or "valid"]
               for old, new in zip(run.points, points, strict=True) if old["validity"]["reasons"] != new["validity"]["reasons"]}
    invalid = {point["point"]: point["validity"]["reasons"] for point in points if not point["validity"]["valid"]}
    document = run.document | {
        "validity": {"points": len(points), "invalid": invalid},
        "judged": [*run.document.get("judged", []), {"at": records.now(), "code": records.code_version(), "changed": changed}]}
    records.rewrite(path, {"points.jsonl": "".join(json.dumps(point, allow_nan=False, ensure_ascii=False) + "\n" for point in points),
                           "run.json": json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"})
    return changed


def _judged(run: records.Run, point: dict[str, Any], caching: bool | None) -> dict[str, Any]:
    requests, chunks, metrics = (run.frame(name, point["point"]) for name in records.FRAMES)
    shape = (point["request_rate"], point["input_len"], point["output_len"])
    return point | stats.verdict(requests, chunks, metrics, shape, prefix_caching=caching,
                                 num_prompts=point["num_prompts"] if point.get("kind", "bench") == "bench" else None)
