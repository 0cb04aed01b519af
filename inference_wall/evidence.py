"""Which rigs have records of a post, in the order in which pages show them.

What:   `sets` finds the newest records of each rig, the best evidence first; `page_of` and `parse_page` name the page of a post for a rig.
Why:    one post may have been measured on several machines. Which of them a reader meets first is a decision, so it stands in one file,
        `experiments/prominence.toml`, and everything that lists rigs (default page, switch, figures, tables) reads it here.
Use:    shown, *others = evidence.sets("part_1").values()
Not:    what a page says of its records (`part_1` ... `part_5`), which record of one rig is the newest (`arms`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable

from . import arms, records, rigs
from .arms import ArmSet

PAGE = re.compile(r"(part_\d+)-(.+)")


def sets(post: str, committed_only: bool = False) -> dict[str, ArmSet]:
    """The newest testable records of a post by rig, the best evidence first; empty where there are none.

    First what is newest and not committed: whoever has just measured wants to see it (this machine's own rig before another that was asked
    for by name). Then GPUs, then processors: those whose arms were all measured before those that lack some, and among equals in the order of
    `in_order`.
    """
    names = {path.parent.name for path in records.record_folders(post, committed_only=committed_only)}
    found = [each for each in (arms.newest(post, name, committed_only) for name in names) if each is not None and each.testable]
    local = {each.rig for each in found if any(run.is_local for run in each)}
    here = rigs.pick_rig("auto").name if len(local) > 1 else None
    order = in_order(each.rig for each in found)

    def place(each: ArmSet) -> tuple[bool, ...]:
        mine = each.rig in local
        return not mine, mine and each.rig != here, _on_a_processor(each), bool(each.missing)

    return {each.rig: each for each in sorted(found, key=lambda each: (*place(each), order.index(each.rig)))}


def in_order(names: Iterable[str]) -> list[str]:
    """Rig names as `experiments/prominence.toml` orders them, then the others by name."""
    path = rigs.root() / "experiments" / "prominence.toml"
    listed = tomllib.loads(path.read_text(encoding="utf-8"))["rigs"] if path.is_file() else []
    return sorted(names, key=lambda name: (listed.index(name) if name in listed else len(listed), name))


def _on_a_processor(found: ArmSet) -> bool:
    return found.first.document["rig"].get("kind") == "cpu"


def page_of(post: str, rig: str, shown: str) -> str:
    """The name of a post's page for a rig: `part_1` where that rig is the one `shown` by default, else `part_1-h200-4b`."""
    return post if rig == shown else f"{post}-{rig}"


def parse_page(name: str) -> tuple[str, str] | None:
    """`part_1-h200-4b`, or a path that ends so, -> ("part_1", "h200-4b"); null for any other page."""
    found = PAGE.fullmatch(name.rpartition("/")[2])
    return (found[1], found[2]) if found else None
