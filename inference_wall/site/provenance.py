"""The provenance page: each record behind the book, and its raw files.

What:   `write_page` makes `build/pages/provenance.md` from the record folders: rig, versions, flags, what the server
        said, validity with reasons, links to raw files. `copy_raw` puts those files into the built site under
        `records/`.
Why:    a number links to its run here, so that a reader can check where it came from, down to each streamed chunk.
Use:    called by `inference_wall.site.build`.
Not:    judging a record (`stats`), and drafts that are still being measured.
"""

from __future__ import annotations

import html
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_wall.records import SEAL, seal_problem
from inference_wall.site.numbers import PUBLISHED_ANCHOR, SOURCES, anchor

UNFINISHED = (".partial", ".writing")
RAW = "records"
# From build/pages/provenance.html to the root of the site.
TO_ROOT = "../../"


@dataclass(frozen=True)
class Record:
    """One record folder: where it lies below benchmarks/, what run.json says, and what is wrong with it."""

    folder: Path
    place: str
    document: dict[str, Any]
    problem: str | None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_local(self) -> bool:
        return self.place.startswith("local/")


def find(benchmarks: Path) -> list[Record]:
    """Every finished record folder, committed ones first, in the order of their place."""
    found = []
    for path in sorted(benchmarks.rglob("run.json")):
        folder = path.parent
        if any(part.endswith(UNFINISHED) for part in folder.relative_to(benchmarks).parts):
            continue
        try:
            document, problem = json.loads(path.read_text(encoding="utf-8")), seal_problem(folder)
        except ValueError as error:
            document, problem = {}, f"run.json is damaged: {error}"
        found.append(Record(folder, folder.relative_to(benchmarks).as_posix(), document, problem))
    return sorted(found, key=lambda record: (record.is_local, record.place))


def write_page(benchmarks: Path, page: Path, committed_only: bool = False) -> list[Record]:
    """Write the page, only when its text changes, and return the records on it."""
    records = [record for record in find(benchmarks) if not (committed_only and record.is_local)]
    published = sorted(path for path in (benchmarks / "published").rglob("*") if path.is_file())
    parts = [
        "# Provenance",
        "Every number in this book comes out of one of the records below. A record is one folder: what ran, on what, "
        "with which versions and flags; one line for each point of load; one row for each request and each streamed "
        "chunk; the samples of the server's own counters; the server's log. It is sealed with the checksum of each of "
        "its files, and the files are here to be downloaded.",
    ]
    if not records:
        parts.append("There is no measured record yet: what the pages show was published by the author of the series.")
    parts += [_section(record) for record in records]
    if published:
        parts.append(_published(benchmarks / "published", published))
    text = "\n\n".join(parts) + "\n"
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    return records


def copy_raw(benchmarks: Path, records: list[Record], site: Path) -> int:
    """Copy the raw files of the records and the published figures into the site; returns how many files lie there."""
    wanted = {path for record in records for path in record.folder.iterdir() if path.is_file()}
    wanted |= {path for path in (benchmarks / "published").rglob("*") if path.is_file()}
    target = site / RAW
    copies = {target / path.relative_to(benchmarks): path for path in wanted}
    for old in [path for path in target.rglob("*") if path.is_file() and path not in copies]:
        old.unlink()
    for copy, path in copies.items():
        known = copy.stat() if copy.exists() else None
        if known is None or (known.st_size, known.st_mtime_ns) != (path.stat().st_size, path.stat().st_mtime_ns):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    return len(copies)


# --- one record ---------------------------------------------------------------------------------------------------


def _section(record: Record) -> str:
    document = record.document
    rig, engine, validity = (document.get(name) or {} for name in ("rig", "engine", "validity"))
    start = (document.get("starts") or [{}])[0]
    server = start.get("server") or {}
    badge = "measured, kept on this machine" if record.is_local else "measured"
    head = f"{document.get('post', '?')} on {rig.get('name', '?')}, {document.get('arm', '?')}, {_moment(document.get('started'))}"
    facts = [
        ("Rig", _join(rig.get("title"), rig.get("note"))),
        ("Model", _model(document.get("model") or {})),
        ("Engine", _join(engine.get("name"), engine.get("version"), sep=" ")),
        ("Flags", _flags(document.get("flags") or {})),
        ("Measured", _join(*(_moment(document.get(end)) for end in ("started", "finished")), sep=" to ")),
        ("Validity", _validity(validity, record.problem)),
    ]
    more = [
        ("Machine", _machine(start)),
        ("Command line", _code(" ".join(map(str, server.get("argv") or [])))),
        ("The server said", _pairs(server.get("said") or {})),
        ("Parameters", _pairs(document.get("parameters") or {})),
        ("Checks of each point", _text(_checks(record.folder))),
        ("Percentile rule", _text(document.get("percentile_rule"))),
        ("Run id", _code(document.get("run_id"))),
    ]
    return "\n".join(
        [
            f"({anchor(record.name)})=",
            f"## {_plain(head)}",
            "",
            f'<p><span class="wall-badge measured">{badge}</span> <code>{html.escape(record.name)}</code></p>',
            _table(facts, "What ran"),
            _files(record.folder, record.place, "Raw files"),
            f"<details><summary>Machine, command line, and what the server said</summary>{_table(more, 'More')}</details>",
        ]
    )


def _checks(folder: Path) -> str | None:
    """The names of the checks that every point went through; which of them a point failed stands under Validity."""
    try:
        first = json.loads((folder / "points.jsonl").read_text(encoding="utf-8").splitlines()[0])
        return ", ".join(name.replace("_", " ") for name in first["validity"]["checks"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _table(rows: list[tuple[str, str]], name: str) -> str:
    body = "".join(f'<tr><th scope="row">{head}</th><td>{value}</td></tr>' for head, value in rows if value)
    return (
        f'<div class="wall-table-frame" tabindex="0" role="region" aria-label="{html.escape(name, quote=True)}">'
        f'<table class="wall-table wall-facts"><tbody>{body}</tbody></table></div>'
    )


def _machine(start: dict) -> str:
    host = start.get("host") or {}
    gpus = [gpu for gpu in start.get("gpus") or [] if isinstance(gpu, dict)]
    parts = [", ".join(_text(gpu.get("name")) for gpu in gpus if gpu.get("name")), _pairs(host)]
    bandwidth = start.get("bandwidth") or {}
    if bandwidth:
        parts.append(f"copy bandwidth: {_pairs(bandwidth) if isinstance(bandwidth, dict) else _text(bandwidth)}")
    return "<br>".join(part for part in parts if part)


def _model(model: dict) -> str:
    name, weights = model.get("name") or model.get("hub"), model.get("weights")
    return _join(name, f"{weights} weights" if weights else None, model.get("dtype"))


def _flags(flags: dict) -> str:
    return " ".join(_code(f"--{name}" if value is True else f"--{name} {value}") for name, value in flags.items())


def _validity(validity: dict, problem: str | None) -> str:
    if problem:
        return f"not usable: {_text(problem)}"
    points, invalid = validity.get("points"), validity.get("invalid") or {}
    if points is None:
        return ""
    if not invalid:
        return f"all {points} points passed every check"
    listed = "".join(f"<li>point {_text(point)}: {_text('; '.join(why))}</li>" for point, why in invalid.items())
    return (
        f"{points - len(invalid)} of {points} points passed every check; the others are shown and marked:"
        f"<details><summary>{len(invalid)} with reasons</summary><ul>{listed}</ul></details>"
    )


def _files(folder: Path, place: str, title: str) -> str:
    try:
        sums = json.loads((folder / SEAL).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError):
        sums = {}
    items = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        address = html.escape(f"{TO_ROOT}{RAW}/{place}/{path.name}", quote=True)
        told = f' title="sha256 {sums[path.name]}"' if path.name in sums else ""
        items.append(f'<a href="{address}"{told}>{html.escape(path.name)}</a> ({_size(path)})')
    return f"<p>{title}: {', '.join(items)}</p>"


# --- the published figures ----------------------------------------------------------------------------------------


def _published(folder: Path, files: list[Path]) -> str:
    groups: dict[str, list[str]] = {}
    for path in files:
        place = path.relative_to(folder).as_posix()
        address = html.escape(f"{TO_ROOT}{RAW}/published/{place}", quote=True)
        groups.setdefault(path.parent.relative_to(folder).as_posix(), []).append(
            f'<a href="{address}">{html.escape(path.name)}</a> ({_size(path)})'
        )
    rows = [(html.escape(name if name != "." else "all parts"), ", ".join(links)) for name, links in groups.items()]
    return "\n".join(
        [
            f"({PUBLISHED_ANCHOR})=",
            "## Published figures",
            "",
            f'<p><span class="wall-badge published">{SOURCES["published"]}</span></p>',
            "",
            "Transcribed from the MIT-licensed repository `mapathak-commits/inference-wall`. In each file the column "
            "`source` names the file of that repository in which a figure stands. We have the summaries, not the raw "
            "series: none of our checks could be made on them.",
            "",
            _table(rows, "Published files"),
        ]
    )


# --- text ---------------------------------------------------------------------------------------------------------


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size} B" if size < 1000 else f"{size / 1e3:.0f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return html.escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _plain(text: str) -> str:
    """For a Markdown heading: an underscore in a name is not emphasis."""
    return text.replace("_", "\\_").replace("*", "\\*")


def _code(value: Any) -> str:
    return f"<code>{_text(value)}</code>" if value else ""


def _join(*values: Any, sep: str = ". ") -> str:
    return sep.join(_text(value).removesuffix(".") if sep == ". " else _text(value) for value in values if value)


def _moment(stamp: str | None) -> str:
    """2026-11-29T18:11:34+00:00 as a person reads it; records are in UTC."""
    return stamp.replace("T", " ").replace("+00:00", " UTC") if stamp else ""


def _pairs(values: dict) -> str:
    """A dictionary in words, inner ones in brackets. What is unknown is left out: run.json has it, with the reason."""
    parts = []
    for name, value in values.items():
        if value is None or value in ("", {}, []):
            continue
        if isinstance(value, dict):
            shown = f"({_pairs(value)})"
        elif isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
            shown = ", ".join(_text(item) for item in value)
        else:
            shown = _text(value)
        parts.append(f"{_text(str(name).replace('_', ' '))} {shown}")
    return "; ".join(parts)
