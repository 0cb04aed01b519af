"""The same quantities on every rig, each in units of its own machine: does a bigger card with a bigger model meet the same walls?

What:   `entries(named, rigs)` divides numbers that the posts have named already; `sentence(found, rigs)` says which rig is nearest to the
        published one.
Why:    requests a second of two machines say little about one another. How far a step lies above its bytes, how many steps a prompt costs, and where
        the knee lies under the flood are shapes, and shapes can be compared.
Use:    entries(headline.collect(pages), ["h200-27b", "cpu"])["rigs.h200-27b.unit_step_over_bound"]
Not:    the numbers themselves (`part_1` ... `part_5`, `published_numbers`), curves (`laid_over`).

    step over its bytes  = fixed term of a step / (streamed bytes / bandwidth)        1 would be a step that only moves the weights
    crossover            = fixed term / what each sequence adds                       the batch from which on adding seats helps little
    flood over its bytes = requests/s in a flood / (seats / (tokens of an answer x streamed bytes / bandwidth))
    price of a prompt    = ms for 1,000 prompt tokens / an ordinary step              beside running answers, from the stalls of Part 2
    knee under the flood = requests/s at the knee (low, high) / requests/s in the flood
"""

from __future__ import annotations

import math
from typing import Any

PUBLISHED = "a10g-published"
SEATS, ANSWER = 256, 128  # of the published flood; see benchmarks/published
QUANTITIES = {"bound_ms": "the bytes of a step", "step_over_bound": "a step over its bytes", "crossover": "the crossover",
              "prompt_steps": "the price of a prompt", "flood_percent": "the flood over its bytes", "knee": "the knee under the flood"}
UNITS = {"bound_ms": "ms", "crossover": "sequences", "prompt_steps": "steps", "flood_percent": "%"}
COMPARED = ("step_over_bound", "crossover", "prompt_steps", "flood_percent")  # not the bytes, which are the machine's own, nor a bracket

Entries = dict[str, dict[str, Any]]


def entries(named: Entries, rigs: list[str]) -> Entries:
    """`rigs.<rig>.unit_<quantity>` for each rig and for the published one, and `rigs.all.nearest`, a `sentence`.

    Null, with a reason, where one of its numbers was not measured.
    """
    found: Entries = {}
    for rig in (*rigs, PUBLISHED):
        values = _published(named) if rig == PUBLISHED else _measured(named, rig)
        for name in QUANTITIES:
            found[f"rigs.{rig}.unit_{name}"] = {
                "value": values[name], "unit": UNITS.get(name, "x"), "n": None, "run": None,
                "source": "published" if rig == PUBLISHED else "measured",
                "reason": None if values[name] is not None else "one of its numbers was not measured on this rig, or cannot be relied on"}
    said = sentence(found, rigs)
    return found | {"rigs.all.nearest": {"value": said or None, "unit": "", "n": None, "run": None, "source": "measured",
                                         "reason": None if said else "no quantity was measured on two rigs"}}


def _measured(named: Entries, rig: str) -> dict[str, float | str | None]:
    def get(*keys: str) -> float | None:
        return next((named[f"{key}"]["value"] for key in (f"{part}.{rig}.{name}" for part, name in (key.split(".") for key in keys))
                     if key in named and named[key]["value"] is not None), None)

    bound, flood = get("part_1.stream_ms", "part_3.stream_ms", "part_5.stream_ms"), get("part_1.flood_steady_req_s", "part_1.flood_completed_req_s")
    fixed = get("part_3.fit_fixed_ms") if get("part_3.fit_crossover") else get("part_5.base_fixed_ms", "part_5.base_one_ms")
    price, calm = get("part_2.prefill_ms_per_token"), get("part_2.calm_ms")
    return {"bound_ms": bound, "step_over_bound": _over(fixed, bound), "crossover": get("part_3.fit_crossover", "part_5.base_crossover"),
            "prompt_steps": _over(1e3 * price if price else None, calm), "flood_percent": get("part_1.flood_of_bound_percent"),
            "knee": _bracket(get("part_1.knee_low"), get("part_1.knee_high"), flood)}


def _published(named: Entries) -> dict[str, float | str | None]:
    value = {name.removeprefix("published.a10g."): entry["value"] for name, entry in named.items() if name.startswith("published.a10g.")}
    bound, flood = value["stream_ms"], value["flood_req_s"]
    # The longest gap without chunking is one step that read a whole prompt.
    price = (value["off_heavy_all_max_ms"] - value["off_heavy_all_p50_ms"]) / value["freeze_prompt_tokens"] * 1e3
    return {"bound_ms": bound, "step_over_bound": value["step_fixed_ms"] / bound, "crossover": value["step_crossover_requests"],
            "prompt_steps": price / value["off_heavy_all_p50_ms"], "flood_percent": 100 * flood / (SEATS / (ANSWER * bound / 1e3)),
            "knee": _bracket(value["knee_low_req_s"], value["knee_high_req_s"], flood)}


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _bracket(low: float | None, high: float | None, flood: float | None) -> str | None:
    return f"{low / flood:.2f} to {high / flood:.2f}" if low is not None and high is not None and flood else None


def nearest(found: Entries, rigs: list[str]) -> dict[str, str]:
    """For each compared quantity that at least two rigs have: the rig whose value is nearest to the published one, by the factor between them."""
    result = {}
    for name in COMPARED:
        theirs = found[f"rigs.{PUBLISHED}.unit_{name}"]["value"]
        known = {rig: value for rig in rigs if (value := found[f"rigs.{rig}.unit_{name}"]["value"])}
        if theirs and len(known) > 1:
            result[name] = min(known, key=lambda rig: abs(math.log(known[rig] / theirs)))
    return result


def sentence(found: Entries, rigs: list[str]) -> str:
    """Which rig is nearest to the published one in how many quantities; empty where no two rigs can be compared."""
    near = nearest(found, rigs)
    if not near:
        return ""
    counts = sorted(((list(near.values()).count(rig), rig) for rig in set(near.values())), key=lambda pair: (-pair[0], pair[1]))
    parts = [f"{rig} in {count} ({', '.join(QUANTITIES[name] for name, each in near.items() if each == rig)})" for count, rig in counts]
    return f"Nearest to the published card, over the {len(near)} shapes that can be compared: {'; '.join(parts)}."
