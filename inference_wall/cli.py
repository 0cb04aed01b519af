"""`wall`: the command line. Thin on purpose: it checks, calls one function, prints, and sets the exit status.

Use:    wall --help; wall run part_1; wall site; wall doctor; wall runs; wall keep RUN
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
    wall run part_1                    measure Part 1 here (an NVIDIA GPU if there is one, else the CPU)
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
    """Measure POST (part_1, or all) live and execute its notebook.

    Everything is checked before anything starts. An interrupted run goes on where it stopped when the same command is given
    again: only the point in flight is measured anew.
    """
    from . import measure, rigs

    parameters = {"rig": rig, "base_url": base_url, "port": port, "scale": scale, **_pairs(pairs)}
    parameters = {name: value for name, value in parameters.items() if value != ""}
    names = rigs.protocol_names() if posts == ("all",) else list(posts)
    jobs = {name: measure.prepare(name, rig, parameters) for name in names}
    if only_plan:
        for name, job in jobs.items():
            _print_plan(name, job)
        return
    for name, job in jobs.items():
        _run_one(name, job, parameters, again)


def _run_one(name: str, job: Any, parameters: dict[str, Any], again: bool) -> None:
    from . import records, regenerate
    from .progress import Progress

    finished = None if again else records.find(name, job.rig.name, records.run_id(job.identity))
    mode = "recorded" if finished else "live"
    if finished:
        click.echo(f"{name} on rig {job.rig.name} is already measured: {finished.name} (--again measures it anew)")
        if regenerate.is_current(name, finished.name):
            return
    with Progress() as show:
        path = regenerate.execute(name, {**job.values, "rig": job.rig.name, "mode": mode}, show)
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


def _print_plan(name: str, job: Any) -> None:
    from . import rigs

    points = rigs.plan(job.rig, name, job.values, job.arm["name"])
    starts = 0 if job.values.get("base_url") else 1
    click.echo(f"{name} on rig {job.rig.name} ({job.rig.title}), vLLM {job.engine.version}, {starts} server start")
    if job.settings["rates"] is None:
        fractions = ", ".join(f"{fraction:g}" for fraction in job.settings["rate_fractions"])
        click.echo(f"  two floods find this machine's ceiling; then {job.settings['repeats']} x the rates {fractions} x ceiling, "
                   f"{job.settings['num_prompts']} prompts each, cold pass first")
    else:
        click.echo(f"  at least {sum(point.planned_s() for point in points) / 60:.1f} minutes of arrivals")
    for point in points:
        click.echo(f"  {point.index:3d}  {point.pass_name:<11}  rate {point.rate_label:>5}  {point.num_prompts:5d} prompts of "
                   f"{point.input_len} in / {point.output_len} out  repeat {point.repeat}")


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
