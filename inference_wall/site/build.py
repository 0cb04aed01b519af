"""Build the site: executed posts, numbers and pages from the records, then Sphinx over all of it.

What:   `build` executes the posts whose records or sources changed, writes `build/numbers.json` and `build/pages/`,
        checks what Sphinx cannot (trace types of figures, runs that numbers name), runs Jupyter Book with every warning
        an error, and copies the raw files of the records.
Why:    a page that is stale, has a blank figure or a number without a run must not come out of a build that says
        "done".
Use:    build() from the command line (`wall site`). The site is then in `_build/html`; it works from a server and from
        the disk.
Not:    measuring (`wall run`), drawing (`mime`, `static/wall.js`), the role that reads the numbers (`numbers`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from inference_wall import records
from inference_wall.errors import WallError
from inference_wall.rigs import root as repository
from inference_wall.site import mime, provenance, rig_tables, switch

NUMBERS, RIGS = "build/numbers.json", "build/rigs.json"
PROVENANCE = "build/pages/provenance.md"
EXECUTED = "build/executed/"
SHOWN_WARNINGS = 5


def build(
    out: Path | None = None,
    *,
    root: Path | None = None,
    rig: str = "auto",
    committed_only: bool = False,
    again: bool = False,
    numbers: dict[str, dict[str, Any]] | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Build the book below `root` (the repository) into `out`/html (default `root`/_build/html) and return that folder.

    `rig`: whose records the posts show by default. `committed_only`: no record of this machine may be on a page. `again`: execute
    every post anew. `numbers` replaces executing posts and reading records (tests). Raises WallError: a page that is
    not there, no record for a post, a figure that the bundle cannot draw, a number of an unknown run, or what Sphinx
    warns of.
    """
    root = (root or repository()).resolve()
    out = (out or root / "_build").resolve()
    if numbers is None:
        numbers = _execute_posts(_names(root), rig, committed_only, again, say)
    benchmarks = records.benchmarks()
    shown = provenance.write_page(benchmarks, root / PROVENANCE, committed_only)
    _check_runs(numbers, shown)
    text = json.dumps(numbers, indent=1, allow_nan=False, ensure_ascii=False, sort_keys=True)
    _write_if_changed(root / NUMBERS, text + "\n")
    pages = _pages(root)
    for page in pages:
        if page.suffix == ".ipynb":
            check_notebook(page)
    site = _sphinx(root, out)
    copied = provenance.copy_raw(benchmarks, shown, site)
    say(f"site: {len(pages)} pages, {len(shown)} records, {copied} raw files")
    return site


def _execute_posts(names: list[str], rig: str, committed_only: bool, again: bool, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Execute what is stale, from records alone, and return all named numbers of the records that the pages show.

    Each post has a page for each rig with records; which they are goes to `build/rigs.json` (see `switch`) and into the tables of `book/rigs.md`.
    """
    # Here, because executing needs papermill and a kernel, and building a book that is executed already does not.
    from inference_wall import evidence, headline, post, regenerate, rigs

    wanted = [name.removeprefix(EXECUTED) for name in names if name.startswith(EXECUTED)]
    posts = [name for name in wanted if name in rigs.protocol_names()]
    shown = {name: post.recorded(name, rig, committed_only) for name in posts}
    sets = {name: {shown[name].rig: shown[name]} | evidence.sets(name, committed_only) for name in posts}
    # A page that measures nothing of its own draws from the rig that the first post shows.
    jobs = [{"post": name, "page": name, "rig": shown[posts[0]].rig if posts else rig, "runs": []} for name in wanted if name not in posts]
    jobs += [{"post": name, "page": evidence.page_of(name, each.rig, shown[name].rig), "rig": each.rig, "runs": [run.name for run in each]}
             for name in posts for each in sets[name].values()]
    stale = [job for job in jobs if again or not regenerate.is_current(
        job["post"], job["runs"], page=job["page"], rig=None if job["runs"] else job["rig"], committed_only=committed_only)]
    for job in stale:
        say(f"executing {job['page']}" + (f" from {', '.join(job['runs'])}" if job["runs"] else ""))
    _execute(stale, committed_only)
    pages = {name: [{"rig": each.rig, "title": each.first.document["rig"].get("title") or each.rig, "local": any(run.is_local for run in each),
                     "page": evidence.page_of(name, each.rig, shown[name].rig)} for each in sets[name].values()] for name in posts}
    _drop_pages({job["page"] for job in jobs}, regenerate.executed("part_0").parent)
    _write_if_changed(rigs.root() / RIGS, json.dumps(pages, indent=1, ensure_ascii=False) + "\n")
    rig_tables.write(rigs.root(), {name: rigs.load_protocol(name).title for name in posts}, pages, committed_only)
    return headline.collect(shown, committed_only)


def _execute(jobs: list[dict[str, Any]], committed_only: bool) -> None:
    """Execute pages, two at a time: a kernel mostly waits for its own start. Each in a process, since they differ in their environment."""
    with ProcessPoolExecutor(max(1, min(2, len(jobs))), mp_context=multiprocessing.get_context("spawn")) as workers:
        waiting = [workers.submit(_execute_one, job, committed_only) for job in jobs]
        try:
            for each in waiting:
                each.result()
        finally:
            for each in waiting:
                each.cancel()


def _execute_one(job: dict[str, Any], committed_only: bool) -> None:
    from inference_wall import regenerate

    regenerate.execute(job["post"], {"rig": job["rig"], "mode": "recorded"}, committed_only=committed_only, page=job["page"])


def _drop_pages(wanted: set[str], folder: Path) -> None:
    """Remove executed pages of rigs that no longer have records, or that are shown by default now."""
    for path in folder.glob("part_*-*"):
        if path.name.partition(".")[0] not in wanted:
            path.unlink()


def check_notebook(path: Path) -> None:
    """Refuse an executed notebook with a figure that would be drawn wrongly, or that failed or never ran."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, cell in enumerate(notebook["cells"]):
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                raise WallError(
                    f"cell {number} of {path.name} failed: {output['ename']}: {output['evalue']}",
                    "mend the post and execute it again with `make site`",
                )
            unknown = mime.unknown_trace_types(output.get("data", {}).get(mime.PLOTLY_MIME, {}))
            if unknown:
                raise WallError(
                    f"cell {number} of {path.name} has a figure with trace type {', '.join(sorted(unknown))}, "
                    "which the site's plotly bundle would silently draw as a scatter",
                    f"use one of: {', '.join(sorted(mime.bundled_trace_types()))}",
                )


def _check_runs(numbers: dict[str, dict[str, Any]], shown: list[provenance.Record]) -> None:
    known = {record.name for record in shown}
    lost = sorted(key for key, entry in numbers.items() if entry.get("run") and entry["run"] not in known)
    if lost:
        raise WallError(
            f"{len(lost)} numbers name a run without a record, the first is {lost[0]} of {numbers[lost[0]]['run']}",
            "bring the record back, or execute the posts again with `make site`",
        )


def _names(root: Path) -> list[str]:
    """The pages that the table of contents names, without suffix, in its order."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    return re.findall(r"'(?:root|file)': '([^']+)'", str(toc))


def _pages(root: Path) -> list[Path]:
    """The files of the table of contents and the posts' pages for other rigs, each of which must be there."""
    pages, names = [], _names(root)
    others = (f"{EXECUTED}{each['page']}" for rows in switch.pages(root, RIGS).values() for each in rows)
    for name in [*names, *(other for other in others if other not in names)]:
        there = [path for path in (root / f"{name}{suffix}" for suffix in (".md", ".ipynb")) if path.is_file()]
        if not there:
            missing = f"the page {name} of _toc.yml is not there"
            if name.startswith(EXECUTED):
                raise WallError(f"{missing}: its post has not been executed", "run `make site` (or `wall site`)")
            raise WallError(missing, "write it, or take it out of _toc.yml")
        pages.append(there[0])
    return pages


def _sphinx(root: Path, out: Path) -> Path:
    """Run Jupyter Book in its own process, which keeps Sphinx's global state and its chatter out of ours."""
    # Jupyter Book adds `_build` to the folder that it is given.
    parent = out.parent if out.name == "_build" else out
    run = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(root)]
    strict = ["-W", "-n", "--keep-going", "-q", "--path-output", str(parent)]
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run([*run, *strict], capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        # Sphinx keeps what it understood of the pages, and would not warn again: the next build must read them anew.
        shutil.rmtree(parent / "_build" / ".doctrees", ignore_errors=True)
        raise WallError(*_explain(done.stdout + done.stderr, root))
    site = parent / "_build" / "html"
    if not (site / "index.html").is_file():
        raise WallError("Jupyter Book said it was done but left no index.html", f"look at {site}")
    return site


def _explain(output: str, root: Path) -> tuple[str, str]:
    """The first warnings of a failed build, or its last lines where there are none."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", output).replace(f"{root}/", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The same complaint comes once for each place that shows it.
    warnings = list(dict.fromkeys(line for line in lines if re.search(r"\b(WARNING|ERROR|CRITICAL):", line)))
    if not warnings:
        return f"Sphinx failed: {' | '.join(lines[-SHOWN_WARNINGS:])}", "mend what it names and build again"
    more = f" (and {len(warnings) - SHOWN_WARNINGS} more)" if len(warnings) > SHOWN_WARNINGS else ""
    return f"the site has {len(warnings)} warnings: {' | '.join(warnings[:SHOWN_WARNINGS])}{more}", "mend what they name"


def _write_if_changed(path: Path, text: str) -> None:
    """An unchanged file keeps its time, and with it every page that was built from it."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
