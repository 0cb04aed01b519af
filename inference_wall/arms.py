"""The records of one post that belong together: one record an arm, all asked for at once.

What:   an arm is one server configuration. `newest` finds the set of records that a page shows, `ArmSet` hands them out; `accounting`
        adds up minutes in server starts and in load over any number of records.
Why:    an arm that the engine refuses, or a run that was interrupted, must not hold back the other arms; and arms measured with
        different code or parameters must not stand beside one another on a page as if they had been compared.
Use:    arms = newest("part_2", "cpu"); arms["unchunked"].frame("chunks", 3); arms.frame()
Not:    what an arm is made of (`plans`), writing records (`records`). See docs/decisions/0004.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from . import records
from .errors import WallError
from .records import Run


@dataclass(frozen=True)
class ArmSet:
    """Records of one post on one rig by arm, in the order of the plan. `names` are all arms that belong to the set."""

    post: str
    rig: str
    names: list[str]
    runs: dict[str, Run]

    def __getitem__(self, arm: str) -> Run:
        if arm not in self.runs:
            raise WallError(f"{self.post} on rig {self.rig} has no record of arm {arm}", f"measure it: wall run {self.post} --rig {self.rig}")
        return self.runs[arm]

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs.values())

    @property
    def testable(self) -> dict[str, Run]:
        return {name: run for name, run in self.runs.items() if run.not_testable is None}

    @property
    def refused(self) -> dict[str, str]:
        """Arms that the engine refused, each with its reason."""
        return {name: run.not_testable["reason"] for name, run in self.runs.items() if run.not_testable is not None}

    @property
    def missing(self) -> list[str]:
        """Arms that were asked for and have no record yet."""
        return [name for name in self.names if name not in self.runs]

    @property
    def first(self) -> Run:
        """The first testable arm; it stands for the set where one record is enough (machine, engine, rig)."""
        for run in self.testable.values():
            return run
        raise WallError(f"no arm of {self.post} could be tested on rig {self.rig}: {'; '.join(self.refused.values())}",
                        "choose another rig, or mend what the reasons name")

    def frame(self) -> pd.DataFrame:
        """One row a point of every testable arm: the columns of `records.points_frame`."""
        frames = [records.points_frame(run) for run in self.testable.values()]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def newest(post: str, rig: str, committed_only: bool = False) -> ArmSet | None:
    """The newest complete set of a post on a rig, else the newest begun one, else null. Damaged records are passed over."""
    # Equal parameters on two machines are two sets: what was measured here never completes what somebody committed.
    sets: dict[tuple[str, bool], dict[str, Run]] = {}
    for folder in reversed(records.record_folders(post, rig, committed_only)):
        if records.seal_problem(folder) is None:
            run = records.open_run(folder)
            sets.setdefault((run.set_id, run.is_local), {}).setdefault(run.arm, run)  # newest first, so an older record of the same arm is left out
    found = [_arm_set(post, rig, runs) for runs in sets.values()]
    return next((arms for arms in found if not arms.missing), found[0] if found else None)


def of_runs(runs: Iterable[Run]) -> ArmSet:
    """Records that were just measured, as a set. They share a post and a rig."""
    by_arm = {run.arm: run for run in runs}
    some = next(iter(by_arm.values()))
    return _arm_set(some.document["post"], some.document["rig"]["name"], by_arm)


def _arm_set(post: str, rig: str, runs: dict[str, Run]) -> ArmSet:
    names = next(iter(runs.values())).document.get("set_arms") or list(runs)
    return ArmSet(post, rig, names, {name: runs[name] for name in names if name in runs})


def accounting(runs: Iterable[Run]) -> dict[str, Any]:
    """Server starts and where the minutes went, over records that may share starts.

    Returns {"starts", "start_s", "load_s", "points", "attached"}: starts of our own servers (each counted once by its id) and the seconds
    until they had finished a first generation or had refused; seconds of all points, cold and trace passes included; records on somebody
    else's server.
    """
    starts: dict[str, float] = {}
    load, points, attached = 0.0, 0, 0
    for run in runs:
        for start in run.document["starts"]:
            server = start.get("server", {})
            ready = server.get("ready_s") or server.get("refused_after_s")
            if ready is None:
                attached += 1
            else:
                starts[start.get("id") or f"{run.name}/{start['server_start']}"] = ready
        load += sum(point["end_s"] - point["start_s"] for point in run.points)
        points += len(run.points)
    return {"starts": len(starts), "start_s": sum(starts.values()), "load_s": load, "points": points, "attached": attached}
