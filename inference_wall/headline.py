"""Headline numbers: a record to named numbers for the prose.

What:   `numbers(run)` gives every number that a post's sentences use, as `{name: {value, unit, n, run, source, reason}}`.
Why:    no number in a sentence is typed by hand. The site writes them to `build/numbers.json`; the role ``{num}`part_1.here.knee_low` ``
        puts them into a sentence. A number that was not measured is null with a reason, and the page says so.
Use:    numbers(run) -> names without prefix; `collect(pages)` -> the whole file's content
Not:    the published rig's numbers (`published.numbers`).
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from . import published, records
from .records import Run
from .stats import knee

GIB = 2**30


class _Book:
    """Collects numbers of one run; a null value must say why."""

    def __init__(self, run: Run):
        self.run, self.entries = run, {}

    def put(self, name: str, value: Any, unit: str = "", n: int | None = None, reason: str = "not recorded") -> Any:
        value = value.item() if hasattr(value, "item") else value  # numpy's numbers are not JSON's
        if isinstance(value, float) and pd.isna(value):
            value = None
        self.entries[name] = {"value": value, "unit": unit, "n": None if n is None or pd.isna(n) else int(n), "run": self.run.name,
                              "source": "measured", "reason": None if value is not None else reason}
        return value

    def ratio(self, name: str, over: Any, under: Any, unit: str = "x") -> None:
        self.put(name, over / under if over is not None and under else None, unit, reason="one of its two numbers was not measured")


def numbers(run: Run) -> dict[str, dict[str, Any]]:
    """All named numbers of a run of Part 1. Units are in the entries; times in ms, rates in requests or tokens per second."""
    book = _Book(run)
    document, frame = run.document, records.points_frame(run)
    _setup(book, document, frame)
    _bound(book, document)
    _sweep(book, document, frame)
    return book.entries


def said(run: Run) -> dict[str, Any]:
    """What the server said at its last start: canonical names of `engines.Engine.parse_log`."""
    return run.document["starts"][-1]["server"].get("said", {}) if run.document["starts"] else {}


def _setup(book: _Book, document: dict[str, Any], frame: pd.DataFrame) -> None:
    facts, start = said(book.run), document["starts"][-1] if document["starts"] else {}
    quiet = "the server's log did not say"
    for name, unit in (("kv_cache_tokens", "tokens"), ("max_concurrency", "x"), ("max_concurrency_tokens", "tokens"), ("block_size", "tokens"),
                       ("max_num_batched_tokens", "tokens")):
        book.put(name, facts.get(name), unit, reason=quiet)
    book.put("weights_gb", document["model"]["weight_bytes"] / 1e9 if document["model"].get("weight_bytes") else
             facts["weights_gib"] * GIB / 1e9 if "weights_gib" in facts else None, "GB", reason=quiet)
    book.put("max_num_seqs", document["flags"].get("max-num-seqs"), "requests", reason="left at the engine's default")
    book.put("max_model_len", document["flags"].get("max-model-len"), "tokens", reason="left at the engine's default")
    book.put("ready_s", start.get("server", {}).get("ready_s"), "s", reason="the server was started by somebody else")
    book.put("rig_title", document["rig"]["title"])
    book.put("model_name", document["model"]["name"])
    book.put("engine_version", document["engine"]["version"])
    settings = document["settings"]
    for name, unit in (("input_len", "tokens"), ("output_len", "tokens"), ("num_prompts", "requests"), ("repeats", "repeats")):
        book.put(name, settings[name], unit)
    per_request = settings["input_len"] + settings["output_len"]
    book.put("request_tokens", per_request, "tokens")
    room = facts["kv_cache_tokens"] // per_request if "kv_cache_tokens" in facts else None
    book.put("room_requests", room, "requests", reason=quiet)
    book.put("points", len(frame), "points")
    book.put("invalid_points", int((~frame["valid"].astype(bool)).sum()), "points")
    overheads = [point["overhead_s"] for point in book.run.points]
    book.put("overhead_median_s", float(pd.Series(overheads).median()), "s", n=len(overheads))


def _bound(book: _Book, document: dict[str, Any]) -> None:
    """Bytes over bandwidth: no step can be faster than one stream of the weights."""
    bandwidth = document["starts"][-1].get("bandwidth", {}) if document["starts"] else {}
    copy = book.put("copy_bandwidth_gb_s", bandwidth.get("copy_gb_s"), "GB/s")
    read = book.put("read_bandwidth_gb_s", bandwidth.get("read_gb_s"), "GB/s")
    best = book.put("best_bandwidth_gb_s", max((value for value in (copy, read) if value), default=None), "GB/s")
    weights = book.entries["weights_gb"]["value"]
    bound = weights / best * 1e3 if weights and best else None
    book.put("stream_ms", bound, "ms", reason="weights or bandwidth were not measured")
    book.put("stream_tok_s", 1e3 / bound if bound else None, "tok/s", reason="weights or bandwidth were not measured")
    output = document["settings"]["output_len"]
    seats = book.entries["max_num_seqs"]["value"]
    book.put("bound_req_s", seats * 1e3 / bound / output if bound and seats else None, "req/s", reason="needs a bandwidth and a cap")


def _sweep(book: _Book, document: dict[str, Any], frame: pd.DataFrame) -> None:
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
    steady = measured["steady_req_s"].dropna()
    book.put("ceiling_low", float(steady[measured["request_rate"] > (high or float("inf"))].min()) if high else None, "req/s", reason="no knee")
    book.put("ceiling_high", float(steady.max()) if len(steady) else None, "req/s", reason="no steady window")

    def value(name: str) -> Any:
        return book.entries[name]["value"]

    cold = frame[(frame["pass"] == "cold") & (frame["request_rate"] == finite["request_rate"].min())] if len(finite) else frame.iloc[:0]
    book.put("cold_ttft_max_ms", cold.iloc[0]["ttft_max_ms"] if len(cold) else None, "ms", n=cold.iloc[0]["ttft_n"] if len(cold) else None)
    book.put("cold_requests", int(cold.iloc[0]["completed"]) if len(cold) else None, "requests")
    book.ratio("tpot_over_stream", value("lightest_tpot_p50_ms"), value("stream_ms"))
    book.ratio("tpot_growth", value("flood_tpot_p50_ms"), value("lightest_tpot_p50_ms"))
    book.ratio("ttft_growth", value("heaviest_ttft_p50_ms"), value("lightest_ttft_p50_ms"))
    flood, bound = value("flood_steady_req_s"), value("bound_req_s")
    book.put("flood_of_bound_percent", 100 * flood / bound if flood and bound else None, "%", reason="one of its two numbers was not measured")


def _at(rows: pd.DataFrame, rate: float | None) -> pd.Series | None:
    chosen = rows[rows["request_rate"] == rate] if rate is not None else rows.iloc[:0]
    return chosen.iloc[0] if len(chosen) else None


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


def point_for_timeline(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """The point to draw request by request: the first rate past the knee, else the heaviest finite one, else any."""
    points = [point for point in run.points if point["pass"] == "measured"] or run.points
    finite = [point for point in points if point["request_rate"] is not None]
    past = [point for point in finite if point["request_rate"] == found["bracket"][1]]
    return (past or sorted(finite, key=lambda point: point["request_rate"])[-1:] or points)[0]


def reproduce(run: Run) -> str:
    """Commands, raw files and conditions of the run, as Markdown."""
    document, rig = run.document, run.document["rig"]["name"]
    server = document["starts"][-1]["server"] if document["starts"] else {}
    if "argv" in server:
        command = " ".join(["vllm serve", *server["argv"][server["argv"].index("serve") + 1:]])
    else:
        command = "(a server that somebody else started)"
    return f"""```bash
make book                          # everything: environment, engine, this page
wall run part_1 --rig {rig} --again   # this post only, measured anew
```

This page shows the record `{run.name}`: vLLM {document['engine']['version']}, started {document['started']}, {len(run.points)} points.
Its raw files (every request, every streamed chunk, the server's counters and log) are on the [provenance page](../pages/provenance.md).
The server was

```text
{command}
```
"""


def collect(pages: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """The content of `build/numbers.json`: published numbers, every rig's newest record, and `<post>.here` for the record a page shows."""
    entries = dict(published.numbers())
    for post, shown in pages.items():
        rigs = sorted({path.parent.name for path in records.record_folders(post)})
        runs = {rig: records.newest(post, rig) for rig in rigs} | {"here": shown}
        for place, run in runs.items():
            if run is not None:
                entries |= {f"{post}.{place}.{name}": entry for name, entry in numbers(run).items()}
    return entries
