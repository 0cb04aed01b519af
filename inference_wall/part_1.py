"""Part 1, hit the wall: what the post says of its record, as named numbers and as sentences.

What:   `numbers(arms)` and `published()` for `headline.collect`; the sentences whose words depend on where the knee is.
Why:    see `headline`: no number in a sentence is typed by hand.
Use:    numbers(arms)["knee_low"]; knee_sentence(stats.knee(frame, slo))
Not:    the published rig's own numbers, which the primer uses too (`published_numbers`); figures (`figures`).
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from . import headline, records
from .arms import ArmSet
from .headline import Book
from .published import numbers as published_numbers
from .records import Run
from .running_batch import of_point
from .starvation import cache_of
from .stats import knee

GROWTH = 2.0  # TTFT at the heaviest finite load over the lightest, from which the wall counts as seen
COLD = 3.0  # slowest first token of the cold server over the warm one, from which a difference of unlike loads means something
BEAT = 1.25  # time per token, likewise: below it "hardly" is the word


def numbers(arms: ArmSet) -> dict[str, dict[str, Any]]:
    """All named numbers of a run of Part 1. Units are in the entries; times in ms, rates in requests or tokens per second."""
    run = arms.first
    book, frame = Book(run), records.points_frame(run)
    headline.setup(book)
    headline.bound(book)
    _workload(book)
    _sweep(book, run.document, frame)
    _verdict(book)
    return book.entries


def published() -> dict[str, dict[str, Any]]:
    """Nothing of its own: the primer needs the same published numbers, so they live in `published_numbers`."""
    return {}


def _workload(book: Book) -> None:
    settings, said = book.run.document["settings"], book.run.said
    for name, unit in (("input_len", "tokens"), ("output_len", "tokens"), ("num_prompts", "requests")):
        book.put(name, settings[name], unit)
    per_request = settings["input_len"] + settings["output_len"]
    book.put("request_tokens", per_request, "tokens")
    cache, why_not = cache_of(book.run)
    # The last token of an answer is never written to the cache.
    book.put("room_requests", cache.room(per_request - 1) if cache else None, "requests", reason=why_not or "the server did not say")
    book.put("block_tokens", said.get("block_size"), "tokens", reason="the server did not say")
    stream_ms, seats = book.entries["stream_ms"]["value"], book.entries["max_num_seqs"]["value"]
    book.put("bound_req_s", seats * 1e3 / stream_ms / settings["output_len"] if stream_ms and seats else None, "req/s",
             reason="needs a bandwidth and a cap")


def _sweep(book: Book, document: dict[str, Any], frame: pd.DataFrame) -> None:
    measured = frame[(frame["pass"] == "measured") & frame["valid"].astype(bool)]
    slo = document["settings"]["slo"]
    book.put("slo_ttft_s", slo.get("ttft_s"), "s")
    book.put("slo_percentile", slo.get("ttft_percentile"), "")
    book.put("slo_completed_percent", 100 * slo["completed_ratio"] if "completed_ratio" in slo else None, "%")
    found = knee(frame, slo)
    low, high = found["bracket"]
    book.put("knee_status", found["status"])
    book.put("knee_low", low, "req/s", reason=found["status"])
    book.put("knee_high", high, "req/s", reason=found["status"])

    finite = measured[measured["request_rate"] != float("inf")].sort_values("request_rate")
    flood = measured[measured["request_rate"] == float("inf")]
    places = {"lightest": finite.iloc[0] if len(finite) else None, "heaviest": finite.iloc[-1] if len(finite) else None,
              "flood": flood.iloc[0] if len(flood) else None,
              "at_knee": _at(finite, low), "past_knee": _at(finite, high)}
    for name, row in places.items():
        why = f"no valid {name.replace('_', ' ')} point"

        def get(column: str, row: Any = row) -> Any:
            return None if row is None else row[column]

        book.put(f"{name}_rate", get("rate_label"), "req/s", reason=why)
        for latency in ("ttft", "tpot", "itl", "e2e"):
            for statistic in ("p50_ms", "p90_ms", "p99_ms", "max_ms"):
                book.put(f"{name}_{latency}_{statistic}", get(f"{latency}_{statistic}"), "ms", n=get(f"{latency}_n"),
                         reason=why if row is None else f"n = {row[f'{latency}_n']:.0f} cannot bear it")
        for column, unit in (("completed", "requests"), ("completed_req_s", "req/s"), ("steady_req_s", "req/s"),
                             ("output_tok_s", "tok/s"), ("steady_output_tok_s", "tok/s"),
                             ("running_mean", "requests"), ("running_max", "requests"), ("waiting_max", "requests"), ("preemptions", "events")):
            book.put(f"{name}_{column}", get(column), unit, reason=why if row is None else "not recorded")
        batch = None if row is None else of_point(book.run, row.to_dict())
        book.put(f"{name}_batch_mean", batch and (batch["batch_steady"] or batch["batch_whole"]), "requests",
                 reason=why if row is None else "a request without a known end")
    steady = measured["steady_req_s"].dropna()
    book.put("ceiling_low", float(steady[measured["request_rate"] > (high or float("inf"))].min()) if high else None, "req/s", reason="no knee")
    book.put("ceiling_high", float(steady.max()) if len(steady) else None, "req/s", reason="no steady window")

    def value(name: str) -> Any:
        return book.entries[name]["value"]

    cold = frame[frame["pass"] == "cold"].head(1)
    book.put("cold_ttft_max_ms", cold.iloc[0]["ttft_max_ms"] if len(cold) else None, "ms", n=cold.iloc[0]["ttft_n"] if len(cold) else None)
    book.put("cold_requests", int(cold.iloc[0]["completed"]) if len(cold) else None, "requests")
    book.put("cold_how", None if not len(cold) else "all at once" if cold.iloc[0]["rate_label"] == "inf" else
             f"at {cold.iloc[0]['rate_label']} requests a second")
    book.ratio("tpot_over_stream", value("lightest_tpot_p50_ms"), value("stream_ms"))
    book.ratio("tpot_growth", value("flood_tpot_p50_ms"), value("lightest_tpot_p50_ms"))
    book.ratio("finite_tpot_growth", value("heaviest_tpot_p50_ms"), value("lightest_tpot_p50_ms"))
    book.ratio("ttft_growth", value("heaviest_ttft_p50_ms"), value("lightest_ttft_p50_ms"))
    flood, bound = value("flood_steady_req_s"), value("bound_req_s")
    book.put("flood_of_bound_percent", 100 * flood / bound if flood and bound else None, "%", reason="one of its two numbers was not measured")


def _at(rows: pd.DataFrame, rate: float | None) -> pd.Series | None:
    chosen = rows[rows["request_rate"] == rate] if rate is not None else rows.iloc[:0]
    return chosen.iloc[0] if len(chosen) else None


def _verdict(book: Book) -> None:
    """The headline, the published one beside it, and whether the shape held: the wall is where it is, but is it the same kind of wall?"""

    def value(name: str) -> Any:
        return book.entries[name]["value"]

    low, high, status = value("knee_low"), value("knee_high"), value("knee_status")
    slo = f"p{value('slo_percentile'):g} TTFT ≤ {value('slo_ttft_s'):g} s"
    book.put("headline", (f"{_rate(low)} to {_rate(high)} requests/s" if status == "bracketed" else f"no bracket: {status}") + f" ({slo})")
    theirs = published_numbers()
    book.put("headline_published", f"{theirs['published.a10g.knee_low_req_s']['value']:g} to "
                                   f"{theirs['published.a10g.knee_high_req_s']['value']:g} requests/s (p99 TTFT ≤ 1 s)")
    shape, because = _shape(status, value("ttft_growth"), value("finite_tpot_growth"))
    book.put("shape", shape)
    book.put("shape_because", because)


def _shape(status: str, waiting: float | None, beat: float | None) -> tuple[str, str]:
    """Whether this is the series' kind of wall: the wait for a first token grows, the time between tokens far less.

    Both are medians at the heaviest finite load over those at the lightest.
    """
    if waiting is None or beat is None:
        return "not measured here", "the sweep has no two valid points to compare"
    grew = f"from the lightest to the heaviest finite load the median TTFT grew {waiting:.1f} times, the time per token {beat:.1f} times"
    if status != "bracketed":
        return ("moved" if waiting >= GROWTH else "did not hold"), f"{grew}; there is no bracket: {status}"
    if waiting < GROWTH:
        return "did not hold", f"{grew}: the service level broke without a wait to speak of"
    if waiting < 2 * beat:
        return "moved", f"{grew}: the beat suffers about as much as the wait"
    return "held", f"{grew}: " + ("the wait grows, the beat hardly" if beat < BEAT else "the wait grows more than the beat")


# --- sentences whose words depend on the data ---------------------------------------------------------------------


def knee_sentence(found: dict[str, Any]) -> str:
    """The result of `stats.knee` as Markdown, whichever way it came out."""
    low, high = found["bracket"]
    texts = {
        "bracketed": f"**The wall stands between {_rate(low)} and {_rate(high)} requests a second.**",
        "no knee in range": f"**No wall was found:** every offered load up to {_rate(low)} requests a second met the service level.",
        "fails at the lowest rate": f"**Already the lightest load, {_rate(high)} requests a second, missed the service level.** "
                                    "The wall is below it.",
        "not monotone": f"**The wall is not sharp here:** {_rate(high)} requests a second missed the service level, yet a heavier load met it. "
                        f"The last load below it that held was {_rate(low)}.",
        "cannot judge": "**No verdict:** no point can bear the percentile of the service level, or none is valid.",
    }
    notes = [note for note in found["notes"] if note]
    return texts[found["status"]] + (f" ({'; '.join(notes)}.)" if notes else "")


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}"


def cold_sentence(run: Run, numbers: dict[str, Any]) -> str:
    """What the cold pass of this record shows, and why there may be little to see."""
    cold, warm = (numbers[name]["value"] for name in ("cold_ttft_max_ms", "lightest_ttft_max_ms"))
    eager = run.document["flags"].get("enforce-eager")
    why = ("Nothing is compiled at start on this rig (`enforce-eager`)." if eager else
           "The engine compiles and tunes kernels, at its start and on first use.")
    if cold is None or warm is None:
        return f"One of the two was not measured. {why}"
    if cold < COLD * warm:
        return f"Here it does not: **no cold effect can be seen.** {why}"
    return f"Here it does: **the first tokens of a cold server took {cold / warm:.0f} times as long.** {why}"


def inside_sentence(numbers: dict[str, Any]) -> str:
    """What the wall looks like from inside, as far as the two medians of a token bear it."""
    light, heavy = (numbers[f"{place}_tpot_p50_ms"]["value"] for place in ("lightest", "heaviest"))
    growth = numbers["finite_tpot_growth"]["value"]
    if growth is None:
        return "Too few valid points to compare the beat of the answers at the lightest and at the heaviest load."
    text = f"An answer that has started got a token every {heavy:,.0f} ms at the heaviest finite load, against {light:,.0f} ms at the lightest. "
    if growth < BEAT:
        return text + "That is much the same pace. The batch is capped, so a step cannot grow further; what grows is the wait before the first token."
    return text + (f"That is {growth:.1f} times as long: a fuller batch and the reading of other people's prompts lengthen each step, up to the cap. "
                   "Beyond the cap the beat cannot get worse; what goes on growing is the wait before the first token.")


def trace_of(run: Run) -> Any:
    """Path of the first trace of the record, or null."""
    return next((path for point in run.points if (path := run.trace(point["point"]))), None)


def point_for_timeline(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """The point to draw request by request: the first rate past the knee, else the heaviest finite one, else any."""
    points = [point for point in run.points if point["pass"] == "measured"] or run.points
    finite = [point for point in points if point["request_rate"] is not None]
    past = [point for point in finite if point["request_rate"] == found["bracket"][1]]
    return (past or sorted(finite, key=lambda point: point["request_rate"])[-1:] or points)[0]
