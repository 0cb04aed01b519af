"""`wall`: the command line. Thin on purpose: it checks, calls one function, prints, and sets the exit status.

Use:    wall --help; wall run all; wall site; wall doctor; wall runs; wall keep RUN
Not:    any measuring or rendering of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from . import __version__
from .errors import WallError


class _Commands(click.Group):
    """Turns a WallError into its two lines and its exit status, and an interrupt into 130, for every command."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except WallError as problem:
            click.echo(str(problem), err=True)
            sys.exit(problem.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped. Finished points are kept; the same command goes on where it stopped.", err=True)
            sys.exit(130)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="wall")
def main() -> None:
    """The Inference Wall: measure how a vLLM server breaks, and turn the record into a page.

    \b
    wall doctor                        is this machine fit?
    wall run all --plan                what measuring every post here would take
    wall run all                       measure every post here (on an NVIDIA GPU if there is one, else the CPU)
    wall run part_1                    measure one of them
    wall site                          render every page from the records, without an engine
    wall runs                          list the records
    """


@main.command()
@click.argument("posts", nargs=-1, required=True, metavar="POST...")
@click.option("--rig", default="auto", show_default=True, help="A file name in experiments/rigs without .toml, or auto.")
@click.option("--base-url", default="", help="Use a vLLM server that already runs, e.g. http://127.0.0.1:8000.")
@click.option("--port", default="", help="Port of the server that this run starts. Default: any free one.")
@click.option("--scale", default="", help="Multiply every prompt count by this (above 0, at most 1), for a quick pass.")
@click.option("-p", "--parameter", "pairs", multiple=True, metavar="NAME=VALUE", help="Any other parameter of the post, e.g. -p rates=1,2,inf.")
@click.option("--again", is_flag=True, help="Measure anew although a finished record with the same parameters exists.")
@click.option("--plan", "only_plan", is_flag=True, help="Print server starts, points and expected minutes, and start nothing.")
def run(posts: tuple[str, ...], rig: str, base_url: str, port: str, scale: str, pairs: tuple[str, ...], again: bool, only_plan: bool) -> None:
    """Measure POST (part_1 to part_5, or all) live and execute its notebook.

    Posts that can use the same server share its start, so `all` is cheaper than one post after the other.

    Everything is checked before anything starts. An interrupted run goes on where it stopped when the same command is given
    again: only the point in flight is measured anew.
    """
    from . import jobs, planned, rigs

    common = {name: value for name, value in {"rig": rig, "base_url": base_url, "port": port, "scale": scale}.items() if value != ""}
    names = rigs.protocol_names() if posts == ("all",) else list(posts)
    parameters = {name: {**common, **_known(name, _pairs(pairs), alone=len(names) == 1)} for name in names}
    prepared = {name: jobs.prepare(name, rig, parameters[name]) for name in names}
    if only_plan:
        click.echo(planned.describe(prepared))
        return
    since, failed = planned.again_since(parameters) if again else None, []
    for place, name in enumerate(names):
        try:
            _run_one(name, prepared[name], {"also": {each: parameters[each] for each in names[place + 1:]}, "since": since})
        except WallError as problem:
            if len(names) == 1:
                raise
            click.echo(str(problem), err=True)
            failed.append(name)
    if failed:
        raise WallError(f"{len(failed)} of {len(names)} posts failed: {', '.join(failed)}",
                        "the messages above say why; run the same command again: finished points are kept")
    planned.again_done()
    if len(names) > 1:
        click.echo(planned.summary(names, prepared[names[0]][0].rig.name))


def _known(post: str, given: dict[str, str], *, alone: bool) -> dict[str, str]:
    """The given parameters that this post has. In a batch a knob of one post is none of another's; what none has is an error elsewhere."""
    from . import rigs

    if alone:
        return given
    everywhere = {name for each in rigs.protocol_names() for name in rigs.load_protocol(each).parameters}
    for name in given:
        if name not in everywhere:
            rigs.check_parameters(rigs.load_protocol(post), {name: given[name]})
    return {name: value for name, value in given.items() if name in rigs.load_protocol(post).parameters}


def _run_one(name: str, prepared: list[Any], batch: dict[str, Any]) -> None:
    from . import records, regenerate
    from .progress import Progress

    rig, values = prepared[0].rig.name, prepared[0].values
    finished = [records.find(name, rig, records.run_id(job.identity), batch["since"]) for job in prepared]
    runs = [run.name for run in finished if run is not None]
    if len(runs) == len(prepared):
        click.echo(f"{name} on rig {rig} is already measured: {', '.join(runs)} (--again measures it anew)")
        if regenerate.is_current(name, runs):
            return
    with Progress() as show:
        path = regenerate.execute(name, {**values, "rig": rig, "mode": "live"}, show, batch=batch)
    click.echo(f"executed notebook: {path}")


def _pairs(pairs: tuple[str, ...]) -> dict[str, str]:
    """`("rates=1,2",)` -> {"rates": "1,2"}; a pair without "=" is an error."""
    split = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise WallError(f"-p {pair!r} is not NAME=VALUE", "write it like -p rates=1,2,inf")
        split[name.strip()] = value.strip()
    return split


@main.command()
@click.option("--rig", default="auto", show_default=True, help="Whose records the posts show; auto prefers this machine's.")
@click.option("--committed", is_flag=True, help="Leave out records in benchmarks/local.")
@click.option("--again", is_flag=True, help="Execute every notebook anew, also those that are up to date.")
def site(rig: str, committed: bool, again: bool) -> None:
    """Render the site from the records: no engine, no GPU, no network. Prints where it is."""
    from .site.build import build

    click.echo(build(rig=rig, committed_only=committed, again=again))


@main.command()
@click.option("--rig", default=None, help="Check for this rig. Default: the one that auto picks.")
@click.option("--port", default=None, type=int, help="Also check that this port is free.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON document.")
def doctor(rig: str | None, port: int | None, as_json: bool) -> None:
    """Is this machine fit? Prints each finding with its remedy; the exit status is 1 when one of them is a failure."""
    from . import doctor as examination

    findings = examination.examine(rig=rig, port=port)
    click.echo(examination.as_json(findings) if as_json else examination.as_text(findings))
    if any(finding.level == "fail" for finding in findings):
        sys.exit(1)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as one JSON document.")
def runs(as_json: bool) -> None:
    """List every record: finished, damaged and unfinished."""
    from . import records

    rows = records.inventory()
    if as_json:
        click.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    for row in rows:
        click.echo(f"{row['post']:8} {row['rig']:10} {row['run']:45} {row['state']}")
    if not rows:
        click.echo("no records yet: wall run part_1")


@main.command()
@click.argument("record", type=click.Path(path_type=Path))
def keep(record: Path) -> None:
    """Move the local RECORD (a folder) to the committed ones, so that it can be published."""
    from . import records

    click.echo(records.keep(record.resolve()))


if __name__ == "__main__":
    main()
