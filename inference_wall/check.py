"""Explain the validity of a record: which checks its points passed, what a failed one means, and what to do.

What:   `look(path)` reads one record and counts, check by check, how many points passed, failed, or could not be checked; `describe` puts that
        into lines for a terminal, `as_json` into data for a script.
Why:    "invalid: littles_law" tells nobody what is wrong. A number is only worth arguing about when its reader can see why it was believed.
Use:    wall check benchmarks/part_1/RIG/RECORD         status 0: every point is valid; 3: some are not; 1: the record cannot be used
Not:    making the checks (`stats.validity`), making them again by today's rules (`judge`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import records

STATES = ("passed", "FAILED", "not made", "noted")
INVALID_STATUS = 3  # of the command: neither an error (1) nor a misuse (2)

# What each check of `stats.validity` compares, and what to do when it fails.
MEANINGS: dict[str, tuple[str, str]] = {
    "conservation": ("every request that was asked for was sent and has one end", "measure again; if it comes back, the client loses requests"),
    "failures": ("no request failed or was cancelled", "read the record's log for what the server refused"),
    "time_order": ("sending, first token and end of each answer are in this order", "do not use the point: its clock or its stream is broken"),
    "output_length": ("each answer has exactly the tokens asked for", "let the server ignore the end-of-text token, or shorten the answers"),
    "stream_tokens": ("the pieces of each stream add up to its tokens", "do not use its pauses between tokens: some pieces are missing"),
    "prompt_length": ("prompts are as long as asked for", "check that client and server use the same tokenizer"),
    "prompt_tokens": ("client and server count the same prompt tokens", "have the server to yourself: others use it, or its counters restarted"),
    "output_tokens": ("client and server count the same answer tokens", "have the server to yourself: others use it, or its counters restarted"),
    "littles_law": ("requests in flight by the client agree with the server's gauges", "look for a second client, a slow one, or a proxy between"),
    "arrival_rate": ("requests came at the rate asked for", "the client is too slow for this rate: give it a core of its own, or lower the rate"),
    "client_delay": ("requests left when they were due", "give the client a core of its own: part of its latencies is its own"),
    "throttle": ("the card was not slowed by heat, hardware protection or a power brake", "let it cool, then measure again"),
    "prefix_cache": ("no prompt was answered from the cache of another", "start the server with prefix caching off, or use fresh prompts"),
    "drift": ("the first half of the requests fared like the second; no fault, since beyond the wall a queue grows",
              "read a tail beyond the wall as how long you looked"),
}


@dataclass
class Findings:
    """One record. `counts`: by check [passed, failed, not made, noted], the last for checks that inform and decide nothing; `failed`: (point, what it
    is, check, note) for each check that failed or was noted."""

    name: str
    what: str
    points: int
    invalid: int
    counts: dict[str, list[int]]
    failed: list[tuple[int, str, str, str]] = field(default_factory=list)
    not_testable: str | None = None

    @property
    def valid(self) -> bool:
        return self.invalid == 0


def look(path: Path) -> Findings:
    """Read the record in the folder `path`. WallError for one that is damaged, unfinished or no record."""
    run = records.open_run(path)
    counts: dict[str, list[int]] = {}
    failed = []
    for point in run.points:
        for name, check in point["validity"]["checks"].items():
            place = 2 if check["ok"] is None else 0 if check["ok"] else 3 if check.get("informative") else 1
            counts.setdefault(name, [0, 0, 0, 0])[place] += 1
            if check["ok"] is False:
                failed.append((point["point"], " ".join([point["pass"], point.get("load") or "sweep", point["rate_label"]]), name, check["note"]))
    refused = run.document.get("not_testable")
    return Findings(run.name, f"{run.document['post']}, rig {run.document['rig']['name']}, arm {run.arm}", len(run.points),
                    sum(not point["validity"]["valid"] for point in run.points), counts, failed, refused["reason"] if refused else None)


def describe(found: Findings) -> str:
    """The findings as lines of text."""
    lines = [f"{found.name} ({found.what})"]
    if found.not_testable:
        return "\n".join([*lines, f"  not testable here: {found.not_testable}"])
    lines.append(f"  {found.points} points, " + ("all valid" if found.valid else f"{found.invalid} not valid: a page leaves them out"))
    width = max((len(name) for name in found.counts), default=0)
    for name, counted in found.counts.items():
        state = ", ".join(f"{count} {word}" for count, word in zip(counted, STATES, strict=True) if count)
        lines.append(f"  {name:<{width}}  {state:<28}  {_meaning(name)[0]}")
    for point, what, name, note in found.failed:
        lines.append(f"  point {point} ({what}), {name}: {note}")
    lines += [f"  remedy for {name}: {_meaning(name)[1]}" for name in dict.fromkeys(name for _, _, name, _ in found.failed)]
    return "\n".join(lines)


def as_json(found: Findings) -> dict[str, Any]:
    """The findings as plain data."""
    return {"run": found.name, "valid": found.valid, "points": found.points, "invalid": found.invalid, "not_testable": found.not_testable,
            "checks": {name: dict(zip(("passed", "failed", "not_made", "noted"), counted, strict=True)) | {"meaning": _meaning(name)[0]}
                       for name, counted in found.counts.items()},
            "failed": [{"point": point, "what": what, "check": name, "note": note, "remedy": _meaning(name)[1]}
                       for point, what, name, note in found.failed]}


def _meaning(name: str) -> tuple[str, str]:
    """A record of another version may hold a check that this one does not know."""
    return MEANINGS.get(name, ("a check that this version does not know", "read the record with the version that made it"))
