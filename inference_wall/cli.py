"""`wall`: the command line. Thin on purpose: it checks, calls one function, prints, and sets the exit status.

Use:    wall --help; wall run all; wall site; wall doctor; wall runs; wall keep RUN; wall bundle ...
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
        except ModuleNotFoundError as problem:
            if (problem.name or "").startswith("inference_wall"):
                raise
            click.echo(f"error: this environment has no {problem.name}\nremedy: `make site` sets it up; where nothing can be installed, measure with "
                       "`wall run --records-only` and make the pages elsewhere", err=True)
            sys.exit(1)
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
    wall bundle --box hopper ...       pack all of this for a GPU machine without network
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
@click.option("--records-only", is_flag=True, help="Measure and execute no notebook: needs the engine, but none of the packages that make pages.")
def run(posts: tuple[str, ...], rig: str, base_url: str, port: str, scale: str, pairs: tuple[str, ...], again: bool, only_plan: bool,
        records_only: bool) -> None:
    """Measure POST (part_1 to part_5, or all that the rig has settings for) live and execute its notebook.

    Posts that can use the same server share its start, so `all` is cheaper than one post after the other.

    Everything is checked before anything starts. An interrupted run goes on where it stopped when the same command is given
    again: only the point in flight is measured anew.
    """
    from . import jobs, planned

    common = {name: value for name, value in {"rig": rig, "base_url": base_url, "port": port, "scale": scale}.items() if value != ""}
    names = _posts_of(rig) if posts == ("all",) else list(posts)
    parameters = {name: {**common, **_known(name, _pairs(pairs), alone=len(names) == 1)} for name in names}
    prepared = {name: jobs.prepare(name, rig, parameters[name]) for name in names}
    if only_plan:
        click.echo(planned.describe(prepared))
        return
    since, failed = planned.again_since(parameters) if again else None, []
    chosen = prepared[names[0]][0].rig.name
    if records_only:
        _records(prepared, parameters, since)
    for place, name in enumerate([] if records_only else names):
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
        click.echo(planned.summary(names, chosen))


def _posts_of(rig: str) -> list[str]:
    """The posts that the rig has settings for; one line says which others are left out."""
    from . import rigs

    found = rigs.pick_rig(rig)
    lacking = [name for name in rigs.protocol_names() if name not in found.posts]
    if lacking:
        click.echo(f"rig {found.name} has no settings for {', '.join(lacking)}: left out", err=True)
    if not found.posts:
        raise WallError(f"rig {found.name} has settings for no post", f"add a table such as [part_1] to experiments/rigs/{found.name}.toml")
    return [name for name in rigs.protocol_names() if name in found.posts]


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


def _measured(name: str, prepared: list[Any], since: str | None) -> list[str]:
    """The records of all arms of a post where it is measured already, which is said; else none."""
    from . import records

    rig = prepared[0].rig.name
    finished = [records.find(name, rig, records.run_id(job.identity), since) for job in prepared]
    if None in finished:
        return []
    click.echo(f"{name} on rig {rig} is already measured: {', '.join(run.name for run in finished)} (--again measures it anew)")
    return [run.name for run in finished]


def _records(prepared: dict[str, list[Any]], given: dict[str, dict[str, str]], since: str | None) -> None:
    """Measure the posts in one process, and say how to carry off what there is then, also when some of it failed."""
    from . import post, records
    from .progress import Progress

    rig = next(iter(prepared.values()))[0].rig.name
    posts = {name: {each: value for each, value in given[name].items() if each != "rig"} | {"mode": "live"} for name in prepared
             if not _measured(name, prepared[name], since)}
    try:
        if posts:
            with Progress() as show:
                post.measure(posts, rig, show, since=since)
    finally:
        there = [name for name in prepared if (records.benchmarks() / "local" / name / rig).is_dir()]
        if there:
            click.echo(_transport(there, rig))


def _transport(names: list[str], rig: str) -> str:
    """How the records of these posts get from a machine that only measures to one that makes pages."""
    from . import records

    folders = " ".join(f"local/{name}/{rig}" for name in names)
    return (f"pack the records:    tar --exclude='*.partial' -cf records.tar -C {records.benchmarks()} {folders}\n"
            f"take them over:      tar -xf records.tar -C benchmarks, in the repository that makes the pages\n"
            f"and to publish them: wall keep benchmarks/local/*/{rig}/*")


def _run_one(name: str, prepared: list[Any], batch: dict[str, Any]) -> None:
    from . import regenerate
    from .progress import Progress

    rig, values = prepared[0].rig.name, prepared[0].values
    runs = _measured(name, prepared, batch["since"])
    if runs and regenerate.is_current(name, runs):
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
@click.option("--rig", default="auto", show_default=True, help="Whose records come first; auto: what was just measured here, else the best evidence.")
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
@click.argument("folders", nargs=-1, required=True, metavar="RECORD...", type=click.Path(path_type=Path))
def keep(folders: tuple[Path, ...]) -> None:
    """Move each local RECORD (a folder) to the committed ones, so that it can be published."""
    from . import records

    refused = 0
    for folder in folders:
        try:
            click.echo(records.keep(folder.resolve()))
        except WallError as problem:
            if len(folders) == 1:
                raise
            click.echo(str(problem), err=True)
            refused += 1
    if refused:
        raise WallError(f"{refused} of {len(folders)} records were not kept", "the messages above say why; the others are kept")


@main.command()
@click.argument("folders", nargs=-1, required=True, metavar="RECORD...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def check(folders: tuple[Path, ...], as_json: bool) -> None:
    """Explain the validity of each RECORD: what was checked, what failed, what to do.

    Status 0: every point is valid. 3: some are not. 1: a record cannot be used.
    """
    from . import check as checking

    found = [checking.look(folder.resolve()) for folder in folders]
    click.echo(json.dumps([checking.as_json(each) for each in found], indent=1, allow_nan=False) if as_json else
               "\n\n".join(checking.describe(each) for each in found))
    if not all(each.valid for each in found):
        sys.exit(checking.INVALID_STATUS)


@main.command()
@click.argument("folders", nargs=-1, required=True, metavar="RECORD...", type=click.Path(path_type=Path))
def judge(folders: tuple[Path, ...]) -> None:
    """Apply the checks of today to each local RECORD's raw rows. Measures nothing; the record says what changed."""
    from . import judge as judging

    for folder in folders:
        changed = judging.judge(folder.resolve())
        click.echo(f"{folder.name}: {len(changed)} verdicts changed" + "".join(f"\n  point {point}: {old} -> {new}"
                                                                              for point, (old, new) in changed.items()))


@main.command()
@click.option("--box", "box_name", required=True, help="A file name in experiments/boxes without .toml: what is there, what comes along.")
@click.option("--rig", "rig_names", required=True, multiple=True, help="A rig that will be measured there; several times for several.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the parts.")
@click.option("--part-bytes", default=63_600_000, show_default=True, help="Largest size of one part.")
@click.option("--cache", default=None, type=click.Path(path_type=Path), help="Folder that keeps the downloaded wheels. Default: in the user's cache.")
@click.option("--warm", default=None, type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="The folder `cache` of the box, brought here: its compiled kernels come along.")
def bundle(box_name: str, rig_names: tuple[str, ...], out: Path, part_bytes: int, cache: Path | None, warm: Path | None) -> None:
    """Pack engine, harness and rigs for a GPU machine without network that has Python and torch.

    What has not changed since the last call with the same --out is not packed again.
    """
    from . import bundle as bundles

    with bundles.on_terminal() as show:
        lines = bundles.bundle(box_name, rig_names, out.resolve(), part_bytes=part_bytes, cache=cache, warm=warm, show=show)
    click.echo("\n".join([*lines, f"copy {out} to the box; there:", *(f"  {command}" for command in bundles.commands(out.resolve(), rig_names))]))


if __name__ == "__main__":
    main()
