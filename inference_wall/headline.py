"""Headline numbers: records to named numbers for the prose.

What:   `Book` collects named numbers of one run; `setup` and `bound` put in those that every post needs; `collect` asks each post's own module
        (`part_1` ... `part_5`) for its numbers and joins them with the published ones.
Why:    no number in a sentence is typed by hand. The site writes them to `build/numbers.json`; the role ``{num}`part_1.here.knee_low` ``
        puts them into a sentence. A number that was not measured is null with a reason, and the page says so.
Use:    book = Book(run); setup(book); book.put("hurt_tokens", 12, "tokens", n=240); `collect(pages)` -> the whole file's content
Not:    what a post says of its records (`part_1` ... `part_5`), the published rig's numbers (`published_numbers`).
"""

from __future__ import annotations

import importlib
from typing import Any

import pandas as pd

from . import arms, evidence, minutes, proportions, published, records
from .arms import ArmSet
from .records import Run

GIB = 2**30


class Book:
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


def setup(book: Book) -> None:
    """Machine, model, engine and limits of the book's run: what every post's setup section names."""
    document, frame = book.run.document, records.points_frame(book.run)
    facts, start = book.run.said, document["starts"][-1] if document["starts"] else {}
    quiet = "the server's log did not say"
    for name, unit in (("kv_cache_tokens", "tokens"), ("max_concurrency", "x"), ("max_concurrency_tokens", "tokens"), ("block_size", "tokens"),
                       ("max_num_batched_tokens", "tokens")):
        book.put(name, facts.get(name), unit, reason=quiet)
    _weights(book)
    book.put("max_num_seqs", document["flags"].get("max-num-seqs"), "requests", reason="left at the engine's default")
    book.put("max_model_len", document["flags"].get("max-model-len"), "tokens", reason="left at the engine's default")
    book.put("ready_s", start.get("server", {}).get("ready_s"), "s", reason="the server was started by somebody else")
    book.put("rig_title", document["rig"]["title"])
    book.put("rig_name", document["rig"]["name"])
    book.put("model_name", document["model"]["name"])
    book.put("engine_version", document["engine"]["version"])
    book.put("repeats", document["settings"].get("repeats", 1), "repeats")
    book.put("points", len(frame), "points")
    book.put("invalid_points", int((~frame["valid"].astype(bool)).sum()) if len(frame) else 0, "points")
    overheads = [point["overhead_s"] for point in book.run.points]
    book.put("overhead_median_s", float(pd.Series(overheads).median()), "s", n=len(overheads))


def _weights(book: Book) -> None:
    """Bytes that a step streams, where the shape is known; else those that are loaded, which may be a few percent more."""
    model, said_gib = book.run.document["model"], book.run.said.get("weights_gib")
    streamed = (model.get("facts") or {}).get("streamed_bytes")
    loaded = model.get("weight_bytes") or (said_gib * GIB if said_gib else None)
    book.put("weights_gb", (streamed or loaded) / 1e9 if streamed or loaded else None, "GB", reason="the server's log did not say")
    book.put("weights_are", "those that a step needs" if streamed else
             "all that are loaded (a step may need a few percent less, since their shape is not known here)")


def bound(book: Book) -> None:
    """Bytes over bandwidth: no step can be faster than one stream of the weights. Needs `setup` before it."""
    document = book.run.document
    bandwidth = document["starts"][-1].get("bandwidth", {}) if document["starts"] else {}
    copy = book.put("copy_bandwidth_gb_s", bandwidth.get("copy_gb_s"), "GB/s")
    read = book.put("read_bandwidth_gb_s", bandwidth.get("read_gb_s"), "GB/s")
    best = book.put("best_bandwidth_gb_s", max((value for value in (copy, read) if value), default=None), "GB/s")
    threads, engine = bandwidth.get("threads"), bandwidth.get("engine_threads")
    book.put("bandwidth_with", "on the card" if bandwidth.get("device") == "cuda" else
             f"with {threads} thread{'s' if threads != 1 else ''}, as the engine computes" if threads and threads == engine else
             f"with all {threads} cores, though the engine may use fewer" if threads else "by means that were not recorded")
    weights = book.entries["weights_gb"]["value"]
    stream_ms = weights / best * 1e3 if weights and best else None
    book.put("stream_ms", stream_ms, "ms", reason="weights or bandwidth were not measured")
    book.put("stream_tok_s", 1e3 / stream_ms if stream_ms else None, "tok/s", reason="weights or bandwidth were not measured")


# --- text that every post needs -----------------------------------------------------------------------------------


def reproduce(found: ArmSet) -> str:
    """Commands, raw files and conditions of the records on a page, as Markdown."""
    run = found.first
    document, post = run.document, found.post
    took = arms.accounting(found)
    scale = document["parameters"].get("scale") or 1.0
    commands = [command for command in (_command(each) for each in found.testable.values()) if command]
    servers = "\n".join(commands) or "(a server that somebody else started)"
    names = ", ".join(f"`{each.name}`" for each in found)
    by_name = "shape" in document["model"]  # `auto`, and so `make book`, never picks such a rig
    everything = ("make engine                      # the environment; without a network: see experiments/boxes" if by_name else
                  "make book                        # everything: environment, engine, every post, the site")
    return f"""```bash
{everything}
source .venv/bin/activate
wall run {post} --rig {found.rig} --again   # this post only, measured anew
wall run {post} --rig {found.rig} --plan    # what that would do, without starting anything
```

The rig's file may have changed since; what these records were asked for is in their `run.json` (`settings`).

This page shows {names}: vLLM {document['engine']['version']}, started {document['started']}, {took['points']} points at scale {scale:g}.
{_time(took)} Their raw files (every request, every streamed chunk, the server's counters, log and trace) are on the
[provenance page](../pages/provenance.md). The {"servers were" if len(commands) > 1 else "server was"}

```text
{servers}
```
"""


def _command(run: Run) -> str | None:
    server = run.document["starts"][-1]["server"] if run.document["starts"] else {}
    if "argv" not in server:
        return None
    argv = server["argv"][server["argv"].index("serve") + 1:]
    if "--profiler-config" in argv:  # a folder of the machine that ran it
        place = argv.index("--profiler-config")
        argv = argv[:place] + argv[place + 2:]
    return " ".join(["vllm serve", *argv])


def _time(took: dict[str, Any]) -> str:
    if not took["starts"]:
        return f"Load took {took['load_s'] / 60:.1f} minutes."
    return (f"{took['starts']} server start{'s' if took['starts'] > 1 else ''} took {took['start_s'] / 60:.1f} minutes (other posts may share them), "
            f"load {took['load_s'] / 60:.1f} minutes.")


def collect(pages: dict[str, ArmSet], committed_only: bool = False) -> dict[str, dict[str, Any]]:
    """The content of `build/numbers.json`: published numbers, every rig's newest records, `<post>.here` for those that a page shows by default, and
    `rigs.<rig>` with the minutes over all posts and with quantities in units of the rig's own machine."""
    entries = dict(published.numbers())
    by_rig: dict[str, list[ArmSet]] = {}
    for post, shown in pages.items():
        module = importlib.import_module(f"inference_wall.{post}")
        entries |= {f"published.a10g.{name}": entry for name, entry in module.published().items()}
        for rig, found in {**evidence.sets(post, committed_only), shown.rig: shown}.items():
            by_rig.setdefault(rig, []).append(found)
            named = module.numbers(found)
            for place in (rig, "here") if found is shown else (rig,):
                entries |= {f"{post}.{place}.{name}": entry for name, entry in named.items()}
    for rig, found in by_rig.items():
        entries |= {f"rigs.{rig}.{name}": entry for name, entry in minutes.entries(found).items()}
    return entries | proportions.entries(entries, list(by_rig))
