"""Part 1, hit the wall: what the post says of its record, as named numbers and as sentences.

What:   `numbers(arms)` and `published()` for `headline.collect`; the sentences of the page that follow from the record.
Why:    see `headline`: no number in a sentence is typed by hand.
Use:    numbers(arms)["knee_low"]; cold_sentence(run, numbers)
Not:    the knee in words (`knee_words`); the published rig's own numbers, which the primer uses too (`published_numbers`); figures (`figures`);
        what a prompt costs the others (`reading_steps`); whether the card waits for the host (`launch_bound`).

Several repeats of a load give the median, the lower of two middle ones, as in the table and the figures; `..._range` says where all of them lie.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pandas as pd

from . import headline, knee_words, launch_bound, reading_steps, records, trace
from .arms import ArmSet
from .chart import by_rate, digits
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
    slo = run.document["settings"]["slo"]
    _verdict(book, run.document["settings"]["repeats"], knee_words.stops_short(frame, slo))
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
    book.put("request_blocks", cache.need(per_request - 1) if cache else None, "blocks", reason=why_not or "the server did not say")
    book.put("usable_blocks", cache.blocks if cache else None, "blocks", reason=why_not or "the server did not say")
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

    finite = measured[measured["request_rate"] != math.inf]
    lightest, heaviest = (finite["request_rate"].min(), finite["request_rate"].max()) if len(finite) else (None, None)
    for name, rate in {"lightest": lightest, "heaviest": heaviest, "flood": math.inf, "at_knee": low, "past_knee": high}.items():
        why, rows = f"no valid {name.replace('_', ' ')} point", measured[measured["request_rate"] == rate]
        row = rows.iloc[0] if len(rows) else None

        def get(column: str, row: Any = row, rows: pd.DataFrame = rows) -> Any:
            return None if row is None else row[column] if column == "rate_label" else _middle(rows[column])

        book.put(f"{name}_rate", get("rate_label"), "req/s", reason=why)
        for latency in ("ttft", "tpot", "itl", "e2e"):
            for statistic in ("p50_ms", "p90_ms", "p99_ms", "max_ms"):
                reason = why if row is None else f"n = {row[f'{latency}_n']:.0f} cannot bear it"
                book.put(f"{name}_{latency}_{statistic}", get(f"{latency}_{statistic}"), "ms", n=get(f"{latency}_n"), reason=reason)
                book.put(f"{name}_{latency}_{statistic[:-3]}_range", _range(rows, f"{latency}_{statistic}", " ms"), reason=reason)
        for column, unit in (("completed", "requests"), ("completed_req_s", "req/s"), ("steady_req_s", "req/s"),
                             ("output_tok_s", "tok/s"), ("steady_output_tok_s", "tok/s"),
                             ("running_mean", "requests"), ("running_max", "requests"), ("waiting_max", "requests"), ("preemptions", "events")):
            book.put(f"{name}_{column}", get(column), unit, reason=why if row is None else "not recorded")
        book.put(f"{name}_completed_range", _range(rows, "completed_req_s"), reason=why)
        batches = [of_point(book.run, each) for each in rows.to_dict("records")]
        book.put(f"{name}_batch_mean", _middle(pd.Series([each["batch_steady"] or each["batch_whole"] for each in batches], dtype=float)),
                 "requests", reason=why if row is None else "a request without a known end")
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
    flood, bound = value("flood_steady_req_s") or value("flood_completed_req_s"), value("bound_req_s")
    book.put("flood_of_bound_percent", 100 * flood / bound if flood and bound else None, "%", reason="one of its two numbers was not measured")


def _middle(values: pd.Series) -> Any:
    """The median of the repeats, the lower of two middle ones; null where none has a value."""
    known = pd.to_numeric(values).dropna().sort_values()
    return known.iloc[(len(known) - 1) // 2].item() if len(known) else None


def _range(rows: pd.DataFrame, column: str, unit: str = "") -> str | None:
    """`230 to 254 ms`: the repeats of one load, one value where they agree in what is shown; null where none has a value."""
    known = pd.to_numeric(rows[column]).dropna()
    if known.empty:
        return None
    low, high = digits(known.min()), digits(known.max())
    return (low if low == high else f"{low} to {high}") + unit


def _verdict(book: Book, repeats: int, short: str) -> None:
    """The headline, the published one beside it, and whether the shape held: the wall is where it is, but is it the same kind of wall?

    `short`: why the sweep ends before the wall (`knee_words.stops_short`); empty where it does not.
    """

    def value(name: str) -> Any:
        return book.entries[name]["value"]

    low, high, status = value("knee_low"), value("knee_high"), value("knee_status")
    slo = f"p{value('slo_percentile'):g} TTFT ≤ {value('slo_ttft_s'):g} s" + (f", worst of {repeats} repeats" if repeats > 1 else "")
    place = f"{knee_words.rate_text(low)} to {knee_words.rate_text(high)} requests/s" if status == "bracketed" else f"no bracket: {status}"
    book.put("headline", f"{place} ({slo})")
    theirs = published_numbers()
    book.put("headline_published", f"{theirs['published.a10g.knee_low_req_s']['value']:g} to "
                                   f"{theirs['published.a10g.knee_high_req_s']['value']:g} requests/s (p99 TTFT ≤ 1 s)")
    shape, because = _shape(status, value("ttft_growth"), value("finite_tpot_growth"))
    if short:
        shape, because = "not measured here", short
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


def cold_sentence(run: Run, numbers: dict[str, Any]) -> str:
    """What the cold pass of this record shows, and why there may be little to see."""
    cold, warm, ready = (numbers[name]["value"] for name in ("cold_ttft_max_ms", "lightest_ttft_max_ms", "ready_s"))
    eager = run.document["flags"].get("enforce-eager")
    start = f" ({ready:.0f} s to its first answer)" if ready else ""
    why = ("Nothing is compiled at start on this rig (`enforce-eager`)." if eager else
           f"The engine compiles kernels and records its graphs while it starts{start}.")
    if cold is None or warm is None:
        return f"One of the two was not measured. {why}"
    if cold < COLD * warm:
        return f"**No cold effect can be seen here.** {why}" + ("" if eager else " Whatever that did not cover, the first requests did not feel.")
    return f"**The first tokens of the cold server took {cold / warm:.0f} times as long.** {why}" + (
        "" if eager else " What was left to the first requests shows here.")


def flood_sentence(run: Run, numbers: dict[str, Any]) -> str:
    """What the server answered when everything was sent at once, over the repeats, and what its front end took of it."""
    def value(name: str) -> Any:
        return numbers[name]["value"]

    if value("flood_completed_range") is None:
        return "A flood, all requests at once, has no valid point here."
    steady, share = value("flood_steady_req_s"), value("flood_of_bound_percent")
    tokens = value("flood_steady_output_tok_s") if steady else value("flood_output_tok_s")
    where = "in its steady window" if steady else "from the first sending to the last answer (it is over too soon for a steady window)"
    rate = digits(steady) if steady else value("flood_completed_range")
    text = f"Sent all at once, this server answered {rate} requests a second {where}, "
    text += f"{tokens:,.0f} tokens a second" + (f": {share:.0f} percent of the bound on paper." if share is not None else ".")
    wait = value("flood_ttft_p50_range")
    passed = front_end_s(run)
    if passed and wait:
        span = digits(passed[0]) if digits(passed[0]) == digits(passed[1]) else f"{digits(passed[0])} to {digits(passed[1])}"
        text += (f" Half of the flood's first tokens came within {wait}. Not all of that is the engine: its {{term}}`front end`, which turns text "
                 f"into tokens and passes the requests on, had taken in the whole burst only after {span} s.")
    return text


FRONT_END = re.compile(r"from ([\d.]+) s on, when the front end had passed the burst on")


def front_end_s(run: Run) -> tuple[float, float] | None:
    """Seconds until the front end had passed a flood on, (shortest, longest) over the repeats, from the validity check's note; null without one."""
    notes = [point["validity"]["checks"].get("littles_law", {}).get("note") or "" for point in run.points
             if point["pass"] == "measured" and point["request_rate"] is None]
    found = [float(match[1]) for note in notes if (match := FRONT_END.search(note))]
    return (min(found), max(found)) if found else None


def inside_sentence(numbers: dict[str, Any]) -> str:
    """What the wall looks like from inside, as far as the medians bear it."""
    light, heavy, flood = (numbers[f"{place}_tpot_p50_ms"]["value"] for place in ("lightest", "heaviest", "flood"))
    growth = numbers["finite_tpot_growth"]["value"]
    if growth is None:
        return "Too few valid points to compare the beat of the answers at the lightest and at the heaviest load."
    text = (f"An answer that has started got a token every {heavy:,.0f} ms on average (TPOT) at the heaviest finite load, "
            f"against {light:,.0f} ms at the lightest. ")
    if growth < BEAT:
        return text + "That is much the same pace. The batch is capped, so a step cannot grow further; what grows is the wait before the first token."
    text += f"That is {growth:.1f} times as long: a fuller batch and the reading of other people's prompts lengthen each step, up to the cap. "
    if flood and flood * BEAT < heavy:
        return text + (f"In the flood it was only {flood:,.0f} ms. So the full batch alone is not what slows the answers down: in a flood "
                       "the prompts come first and the answers are written undisturbed.")
    return text + "Beyond the cap the beat cannot get much worse; what goes on growing is the wait before the first token."


def ceiling_sentence(found: pd.DataFrame, frame: pd.DataFrame, result: dict[str, Any]) -> str:
    """`reading_steps.ceiling_sentence` of this sweep: the flood's completed rate against the first load that failed."""
    return reading_steps.ceiling_sentence(found, _completed(frame, flood=True), result["bracket"][1], _completed(frame, flood=False))


def _completed(frame: pd.DataFrame, flood: bool) -> tuple[float, float] | None:
    """(low, high) of the completed rate over the repeats, in the flood or at the heaviest finite load; null without one."""
    curve = by_rate(frame[frame["pass"] == "measured"], "completed_req_s")
    curve = curve[curve["request_rate"].eq(math.inf) == flood]
    return (curve.iloc[-1]["low"], curve.iloc[-1]["high"]) if len(curve) else None


def trace_sentence(path: Any, found: pd.DataFrame, input_len: int) -> str:
    """Whether the card waited for the host in the trace, held against the same kind of step without a profiler (`reading_steps.of_run`)."""
    text = launch_bound.sentence(path)
    if not text:
        return ""
    steps = trace.steps(path)
    reads = steps[steps["context_tokens"] > 0]
    row = reads.iloc[reads["context_tokens"].argmax()]
    prompts = round(row["context_tokens"] / input_len)
    free = found.loc[(found["prompts"] == prompts) & found["ms"].notna(), "ms"]
    if row["busy_share"] >= launch_bound.WORKS or len(free) < reading_steps.ENOUGH:
        return text
    times = free.median() / row["busy_ms"]
    end = "so the profiler did not make up the wait" if times >= 2 else "so part of the wait is the profiler's doing"
    return (f"{text} The profiler makes launching slower, so hold it against steps without one: those with as many prompts took "
            f"{digits(free.median())} ms above (the median of {len(free)}), {times:.1f} times what the card needs; {end}.")


def takeaways(found: pd.DataFrame, frame: pd.DataFrame, result: dict[str, Any]) -> str:
    """What to remember, as a list; the points that depend on the measurement say what it showed."""
    line, flood, high = reading_steps.price(found), _completed(frame, flood=True), result["bracket"][1]
    far = flood is not None and high is not None and flood[0] >= reading_steps.FAR * high
    lines = ["**A wall is a bracket, not a point.** Name the service level, then say between which two loads it broke, and in how many repeats.",
             "**Watch both ends: the tail of TTFT, and what is completed of what arrives.** Either may give way first.",
             "**A flood's rate is no capacity.** It is measured with prompts packed together, which visitors never are. Sweep the load, and run "
             "below the knee." if far else
             "**Run below the knee, not at the ceiling.** The distance between the two is your safety margin.",
             "**Past the knee, a latency can measure your patience.** While a queue grows, so does the wait, for as long as the test lasts.",
             "**Below the knee, tokens a second describe your visitors**, not your server."]
    if line["per_step"]:
        lines.insert(2, f"**Here a prompt is paid for by the step:** {digits(line['one_ms'])} ms for one, {digits(line['prompt_ms'])} ms more for "
                        "each that shares its step. Whoever makes steps that read rarer or cheaper moves this wall.")
    return "\n".join(f"- {line}" for line in lines)


def repeats_sentence(frame: pd.DataFrame) -> str:
    """How often each load was measured, in words."""
    rows = frame[frame["pass"] == "measured"]
    counts = rows.groupby("request_rate").size()
    words = {1: "once", 2: "twice"}

    def often(count: int) -> str:
        return words.get(count, f"{count} times")

    if counts.empty:
        return "No load was measured."
    usual = int(counts.mode().max())
    rest = [f"{'the flood' if rate == math.inf else f'{rate:g} a second'} {often(int(count))}" for rate, count in counts.items() if count != usual]
    return f"Each load was measured {often(usual)}" + (f", {', '.join(rest)}" if rest else "") + "." + (
        " Without repeats nobody knows how much a second run would differ." if usual == 1 else "")


def weights_sentence(run: Run) -> str:
    """That the weights are random, where they are; else empty."""
    if run.document["model"].get("weights") != "random":
        return ""
    return ("**The weights are random.** The model has the exact shape and as many bytes as the real one, so times are those of the shape; "
            "what it writes means nothing, and nobody judged it.")


def trace_of(run: Run) -> Any:
    """Path of the first trace of the record, or null."""
    return next((path for point in run.points if (path := run.trace(point["point"]))), None)


def point_for_timeline(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """The point to draw request by request: the first rate past the knee, else the heaviest finite one, else any."""
    points = [point for point in run.points if point["pass"] == "measured"] or run.points
    finite = [point for point in points if point["request_rate"] is not None]
    past = [point for point in finite if point["request_rate"] == found["bracket"][1]]
    return (past or sorted(finite, key=lambda point: point["request_rate"])[-1:] or points)[0]
