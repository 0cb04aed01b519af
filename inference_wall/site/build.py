"""Build the site: numbers and pages from the records, then Sphinx over prose and executed posts.

What:   `build` writes `build/numbers.json` and `build/pages/`, checks what Sphinx cannot (trace types of figures, runs that
        numbers name), runs Jupyter Book with every warning an error, and copies the raw files of the records.
Why:    a page that is stale, has a blank figure or a number without a run must not come out of a build that says "done".
Use:    build() from the command line (`wall site`), or `python -m inference_wall.site.build`. The site is then in
        `_build/html`; it works from a server and, but for some browsers' security rules, from the disk.
Not:    measuring, and executing posts (`inference_wall.regenerate`): this reads what they left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from inference_wall import records
from inference_wall.errors import WallError
from inference_wall.rigs import root as repository
from inference_wall.site import mime, provenance

NUMBERS = "build/numbers.json"
PROVENANCE = "build/pages/provenance.md"
SHOWN_WARNINGS = 5


def build(
    out: Path | None = None,
    *,
    root: Path | None = None,
    numbers: dict[str, dict[str, Any]] | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Build the book below `root` (the repository) into `out`/html (`root`/_build/html) and return that folder.

    `numbers` replaces what the records say (tests). Raises WallError: a page of the table of contents that is not there, a
    figure that the bundle cannot draw, a number of an unknown run, or the first warnings of Sphinx.
    """
    root = (root or repository()).resolve()
    out = (out or root / "_build").resolve()
    benchmarks = records.benchmarks()
    shown = provenance.write_page(benchmarks, root / PROVENANCE)
    numbers = collect_numbers() if numbers is None else numbers
    _check_runs(numbers, shown)
    _write_if_changed(root / NUMBERS, json.dumps(numbers, indent=1, allow_nan=False, ensure_ascii=False, sort_keys=True) + "\n")
    pages = _pages(root)
    for page in pages:
        if page.suffix == ".ipynb":
            check_notebook(page)
    site = _sphinx(root, out)
    copied = provenance.copy_raw(benchmarks, shown, site)
    say(f"site: {len(pages)} pages, {len(shown)} records, {copied} raw files: {site / 'index.html'}")
    return site


def collect_numbers() -> dict[str, dict[str, Any]]:
    """All named numbers, of our records and of the published figures."""
    from inference_wall import headline

    return headline.numbers()


def check_notebook(path: Path) -> None:
    """Refuse an executed notebook with a figure that would be drawn wrongly, or that failed or never ran."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, cell in enumerate(notebook["cells"]):
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                raise WallError(f"cell {number} of {path.name} failed: {output['ename']}: {output['evalue']}",
                                "mend the post and execute it again with `make site`")  # fmt: skip
            unknown = mime.unknown_trace_types(output.get("data", {}).get(mime.PLOTLY_MIME, {}))
            if unknown:
                raise WallError(f"cell {number} of {path.name} has a figure with trace type {', '.join(sorted(unknown))}, "
                                "which the site's plotly bundle would silently draw as a scatter",
                                f"use one of: {', '.join(sorted(mime.bundled_trace_types()))}")  # fmt: skip


def _check_runs(numbers: dict[str, dict[str, Any]], shown: list[provenance.Record]) -> None:
    known = {record.name for record in shown}
    lost = sorted(key for key, entry in numbers.items() if entry.get("run") and entry["run"] not in known)
    if lost:
        raise WallError(f"{len(lost)} numbers name a run that has no record, the first is {lost[0]} of {numbers[lost[0]]['run']}",
                        "bring the record back, or execute the posts again with `make site`")  # fmt: skip


def _pages(root: Path) -> list[Path]:
    """The files of the table of contents, each of which must be there."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    names = re.findall(r"'(?:root|file)': '([^']+)'", str(toc))
    pages = []
    for name in names:
        there = [path for path in (root / f"{name}{suffix}" for suffix in (".md", ".ipynb")) if path.is_file()]
        if not there:
            executed = name.startswith("build/executed/")
            raise WallError(f"the page {name} of _toc.yml is not there" + (": its post has not been executed" if executed else ""),
                            "run `make site` (or `wall site`)" if executed else "write it, or take it out of _toc.yml")  # fmt: skip
        pages.append(there[0])
    return pages


def _sphinx(root: Path, out: Path) -> Path:
    """Run Jupyter Book in its own process, which keeps Sphinx's global state and its chatter out of ours."""
    # Jupyter Book adds `_build` to the folder that it is given.
    parent = out.parent if out.name == "_build" else out
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(root), "--path-output", str(parent),
               "-W", "-n", "--keep-going", "-q"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
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
    warnings = list(dict.fromkeys(line.strip() for line in text.splitlines() if re.search(r"\b(WARNING|ERROR|CRITICAL):", line)))
    if warnings:
        more = f" (and {len(warnings) - SHOWN_WARNINGS} more)" if len(warnings) > SHOWN_WARNINGS else ""
        return f"the site has {len(warnings)} warnings: {' | '.join(warnings[:SHOWN_WARNINGS])}{more}", "mend the pages named"
    return f"Sphinx failed: {' | '.join(text.strip().splitlines()[-SHOWN_WARNINGS:])}", "run it again with the message in mind"


def _write_if_changed(path: Path, text: str) -> None:
    """An unchanged file keeps its time, and with it every page that was built from it."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        build()
    except WallError as error:
        sys.exit(str(error))
