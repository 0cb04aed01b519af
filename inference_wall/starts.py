"""What a server start is made of, and what a warm one saves.

What:   `table(runs)` gives one row a server start: seconds until the first answer, and inside it what the server's own log times.
Why:    on a GPU a start costs minutes, as much as the load behind it. Most of a first start is compiling and tuning, whose results can be
        kept. Whether they were is seen from the caches: a start that added nothing to them was warm.
Use:    table(runs)[["state", "ready_s", "warmup_run_s"]]
Not:    starting servers (`server`), minutes over a whole rig (`minutes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pandas as pd

from .engines import engine
from .records import Run

PHASES = ("compile_s", "warmup_run_s", "graph_capture_s")  # of `engines.LOG_FACTS`, in the order of a start
AT_ONCE_S = 1.0  # a wait for imports below it is none
COLUMNS = ("id", "arms", "model", "ready_s", "state", "new_graphs", "new_kernels", "imports", "before_engine_s", *PHASES)


def table(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a server start, by time: `COLUMNS`, seconds and counts; null where neither record nor log says.

    arms: the arms that were measured on it, as "part_1 default". state: "cold" where the caches were empty for vLLM's graphs and for Triton's
    kernels, "warm" where the start added nothing to either, else "partly warm". before_engine_s: imports and reading the configuration,
    that is ready_s without what the engine's own set-up took. imports: "kept" where the server was forked from a process that had made them, "first"
    where it had to wait for that process, else "its own"; null on records that do not say.
    """
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        logs = dict(re.findall(r"==> (\S+) <==\n(.*?)(?=\n==> \S+ <==\n|\Z)", run.log(), flags=re.S))
        for start in run.document["starts"]:
            server = start.get("server", {})
            if server.get("ready_s") is None:
                continue
            row = rows.setdefault(start["id"], _row(start, server, logs.get(start["id"], ""), run))
            row["arms"].append(f"{run.document['post']} {run.arm}")
    return pd.DataFrame([{**row, "arms": ", ".join(row["arms"])} for _, row in sorted(rows.items())], columns=list(COLUMNS))


def _row(start: dict[str, Any], server: dict[str, Any], log: str, run: Run) -> dict[str, Any]:
    said = engine(run.document["engine"]["version"]).parse_log(log) | server.get("said", {})
    caches = server.get("compiled")
    new = {name: caches["after"][name] - caches["before"][name] if caches else None for name in ("graphs", "kernels")}
    inside, kept = said.get("engine_start_s"), server.get("imports_kept")
    imports = None if "imports_kept" not in server else "its own" if kept is None else "kept" if kept["waited_s"] < AT_ONCE_S else "first"
    return {"id": start["id"], "arms": [], "model": run.document["model"]["name"], "ready_s": server["ready_s"], "state": _state(caches, new),
            "new_graphs": new["graphs"], "new_kernels": new["kernels"], "imports": imports,
            "before_engine_s": server["ready_s"] - inside if inside else None,
            **{name: said.get(name) for name in PHASES}}


def _state(caches: dict[str, dict[str, int]] | None, new: dict[str, int | None]) -> str | None:
    if caches is None:
        return None
    if not any(new.values()):
        return "warm"
    return "partly warm" if any(caches["before"].values()) else "cold"
