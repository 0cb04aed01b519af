"""The tables of the page of rigs, as Markdown.

What:   `write` makes `build/pages/rigs/headlines.md` (rig x headline of each post, beside the published figure), `own_units.md` (what
        can be compared), `minutes.md` (where the minutes of each rig went), `starts.md` (what each server start of a GPU rig took) and
        `sizes.md` (megabytes of records and traces), which `book/rigs.md` includes.
Why:    which rigs have records is known only when the site is built; the words around the tables are prose and stand in the book.
Use:    called by `inference_wall.site.build`.
Not:    the numbers themselves (`headline`, `minutes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from inference_wall import arms, evidence, proportions, records, starts

FOLDER = "build/pages/rigs"
TO_PAGES = "../build/executed/"  # from book/rigs.md
MINUTES = (("kind", "Minutes of a"), ("starts", "Server starts"), ("span_min:,.1f", "All, min"),
           ("start_min:,.1f", "Starts, min"), ("load_min:,.1f", "Load, min"),
           ("warm_min:,.1f", "of it warm-up, min"), ("idle_min:,.1f", "Rest, min"), ("plain_starts", "Plain way: server starts"),
           ("plain_min:,.1f", "Plain way: all, min"), ("plain_import_min:,.1f", "of it imports, min"), ("plain_over_span:.2f", "Plain way / all"))


def write(root: Path, titles: dict[str, str], pages: dict[str, list[dict[str, Any]]], committed_only: bool = False) -> None:
    """Write the files below `root`, only when they change. `titles`: of the posts, in order; `pages`: as in `build/rigs.json`."""
    for name, text in (("headlines", headlines(titles, pages)), ("minutes", minutes(pages)), ("own_units", own_units(pages)),
                       ("starts", server_starts(pages, committed_only)), ("sizes", sizes(pages, committed_only))):
        path = root / FOLDER / f"{name}.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def headlines(titles: dict[str, str], pages: dict[str, list[dict[str, Any]]]) -> str:
    """One row a post and rig, under it the published figure."""
    rows = [("Part", "Rig", "Headline", "Shape")]
    for post, title in titles.items():
        head = f"{post.removeprefix('part_')}. {title}"
        for each in pages.get(post, []):
            stem = f"{post}.{each['rig']}"
            rows.append((head, f"[{each['rig']}]({TO_PAGES}{each['page']}.ipynb)", _number(f"{stem}.headline"), _number(f"{stem}.shape")))
            head = ""
        if post in pages:
            rows.append((head, "a10g {bdg-warning-line}`published`", _number(f"{post}.here.headline_published"), ""))
    return _table(rows)


UNITS = (("bound_ms:.1f", "Bytes of a step over the bandwidth, ms"), ("step_over_bound:.2f", "Step over its bytes"),
         ("crossover:.0f", "Crossover, sequences"), ("prompt_steps:.1f", "1,000 prompt tokens, in steps"),
         ("flood_percent:.0f", "Flood over its bytes, %"), ("knee", "Knee over the flood"))


def own_units(pages: dict[str, list[dict[str, Any]]]) -> str:
    """One column a rig and one for the published card, one row a quantity of `proportions`; under it, which rig is nearest to the card."""
    rigs = [*evidence.in_order({each["rig"] for rows in pages.values() for each in rows}), proportions.PUBLISHED]
    rows = [(head, *(_number(f"rigs.{rig}.unit_{name}") for rig in rigs)) for name, head in UNITS]
    return _table([("In units of its own machine", *rigs), *rows]) + f"\n{_number('rigs.all.nearest')}\n"


def minutes(pages: dict[str, list[dict[str, Any]]]) -> str:
    """One column a rig that has records, in the order of prominence; one row a quantity. A phone has room for few columns."""
    rigs = evidence.in_order({each["rig"] for rows in pages.values() for each in rows})
    parts = {rig: [post.removeprefix("part_") for post, rows in pages.items() if rig in [each["rig"] for each in rows]] for rig in rigs}
    return _table([("Quantity", *rigs), ("Parts", *(", ".join(parts[rig]) for rig in rigs)),
                   *((head, *(_number(f"rigs.{rig}.{name}") for rig in rigs)) for name, head in MINUTES)])


def server_starts(pages: dict[str, list[dict[str, Any]]], committed_only: bool = False) -> str:
    """One row a server start of every rig whose records know the state of the compile caches."""
    rows = [("Rig", "Server for", "Caches", "First answer, s", "Imports", "Before the engine, s", "Compile, s", "Profile run, s", "Graphs, s",
             "New kernels")]
    for rig in evidence.in_order({each["rig"] for found in pages.values() for each in found}):
        sets = [arms.newest(post, rig, committed_only) for post in pages]
        found = starts.table(run for each in sets if each is not None for run in each)
        rows += [(rig, each.arms, each.state, f"{each.ready_s:,.0f}", each.imports or "its own", _seconds(each.before_engine_s),
                  *(_seconds(getattr(each, phase)) for phase in starts.PHASES), f"{each.new_kernels:.0f}")
                 for each in found.itertuples() if pd.notna(each.state)]
    return _table(rows) if len(rows) > 1 else "No record here knows what its server's compile caches held.\n"


def sizes(pages: dict[str, list[dict[str, Any]]], committed_only: bool = False) -> str:
    """One row a rig: its records and the profiler's traces in them, in megabytes (1e6 bytes); under it all of `benchmarks/` but local records."""
    rows = [("Rig", "Records", "MB", "Traces", "MB of traces", "Largest trace, kB")]
    for rig in evidence.in_order({each["rig"] for found in pages.values() for each in found}):
        folders = [folder for post in pages for folder in records.record_folders(post, rig, committed_only)]
        files = [path for folder in folders for path in folder.iterdir()]
        traces = [path.stat().st_size for path in files if path.name.startswith("trace-")]
        rows.append((rig, str(len(folders)), _megabytes(path.stat().st_size for path in files), str(len(traces)), _megabytes(traces),
                     f"{max(traces) / 1e3:,.0f}" if traces else "–"))
    local = records.benchmarks() / "local"
    rows.append(("all of `benchmarks/`", "", _megabytes(path.stat().st_size for path in records.benchmarks().rglob("*")
                                                         if path.is_file() and not path.is_relative_to(local)), "", "", ""))
    return _table(rows)


def _megabytes(counts: Iterable[int]) -> str:
    return f"{sum(counts) / 1e6:,.1f}"


def _seconds(value: float | None) -> str:
    return "–" if pd.isna(value) else f"{value:,.1f}"


def _number(key: str) -> str:
    return f"{{num}}`{key}`"


def _table(rows: list[tuple[str, ...]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body]) + "\n"
