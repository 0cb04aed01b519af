"""The bound of the freeze: what a prompt token costs on one server, and the stall that follows from it on the others.

What:   `expectation` reads the cost of a prompt token where it has nothing to do with the stalls that it is to predict; `prefill_cost` draws a
        line through all stalls; `ratios` holds what was measured against what was expected.
Why:    where a prompt fits one step, its own wait is the victims' stall. A stall that is "predicted" from that wait agrees with itself.
Use:    expected, why = expectation(cases); expected.stall_ms(cases["unchunked", "light"]); ratios(cases, expected); floor(cases)
Not:    windows and gaps (`freeze`), the table of it (`freeze_tables`), the sentences (`freeze_words`).

The rule. A step lasts as long as an ordinary step and as its prompt tokens take: stall(k) = calm median + k x cost. The cost is read from the
long prompts' own wait on the server with the smallest step budget, where it is spread over the most steps:
cost = (time until a round's prompts were read - steps x calm median) / prompt tokens of the round. A stall in a step with as many prompt tokens
as that server's is no test of it, on whatever server or load.

The rule leaves out what a step that reads costs however little it reads. Where that is most of the smallest step, it is taken for the price of
tokens, and the rule expects far too much of large steps. `floor` says so, from the line through all stalls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import freeze
from .freeze import Case, Cases

FLOOR = 0.5  # share of the smallest step's stall that does not depend on tokens, from which it is called a floor
ABOVE = 2.0  # ... and how many ordinary steps it must last at least, else it is one
CLOSE = 0.2  # a stall is close to what was expected when it differs by no more than this share


@dataclass(frozen=True)
class Expectation:
    """The cost of a prompt token, as `source` shows it; times in milliseconds."""

    source: Case
    round_tokens: int  # prompt tokens of one injection
    steps: int  # in which these were read, from the budget and the running victims
    calm_ms: float  # an ordinary step of the source
    ms_per_token: float

    @property
    def tok_s(self) -> float:
        return 1e3 / self.ms_per_token

    def stall_ms(self, case: Case) -> float | None:
        """The expected stall: an ordinary step and the prompt tokens of the fullest step; null where these are not known."""
        return self.step_ms(case.step_tokens) if case.step_tokens else None

    def step_ms(self, tokens: int) -> float:
        return self.calm_ms + self.ms_per_token * tokens

    def tests(self, case: Case) -> bool:
        """Whether the stalls of `case` are a test: its fullest step is of another size than those from which the cost was read."""
        return bool(case.step_tokens) and case.step_tokens != self.source.step_tokens


def expectation(cases: Cases) -> tuple[Expectation | None, str]:
    """(expectation, "") or (None, reason). The source is the smallest usable budget at the light load; without one, the arm without chunking
    at that load, then the same at the heavy load."""
    why = "no arm has a valid load in which the long prompts were read"
    for load in freeze.LOADS:
        off = cases.get(("unchunked", load))
        for case in [*freeze.chunked(cases, load), *([off] if off and off.usable else [])]:
            tokens, size, calm = case.populations["prompt_tokens"], case.step_tokens, case.populations["calm"]["p50_ms"]
            if not (case.reading_ms and tokens and size and calm):
                continue
            steps = math.ceil(case.injected * tokens / size)
            cost = (case.reading_ms - steps * calm) / (case.injected * tokens)
            if cost > 0:
                return Expectation(case, case.injected * tokens, steps, calm, cost), ""
            why = "the long prompts were read in no more time than that many ordinary steps take: a prompt token has no visible cost here"
    return None, why


def ratios(cases: Cases, expected: Expectation | None) -> list[tuple[Case, float]]:
    """(case, measured over expected) of every usable case that is a test: the typical worst stall of a round over the expected one."""
    if expected is None:
        return []
    return [(case, case.typical_worst_ms / expected.stall_ms(case)) for case in cases.values()
            if case.usable and case.typical_worst_ms is not None and expected.tests(case)]


def prefill_cost(cases: Iterable[Case] | Cases) -> dict[str, Any]:
    """Least squares of a round's typical worst stall on the prompt tokens of the fullest step: stall = fixed + tokens x cost.

    {"fixed_ms", "ms_per_token", "n" (arms and loads in it), "tok_s", "reason"}; null where fewer than three different sizes were measured or
    the cost does not come out positive.
    """
    cases = [case for case in (cases.values() if isinstance(cases, dict) else cases) if case.usable]
    known = [(case.step_tokens, case.typical_worst_ms) for case in cases if case.step_tokens and case.typical_worst_ms is not None]
    empty = {"fixed_ms": None, "ms_per_token": None, "tok_s": None, "n": len(known)}
    sizes = len({tokens for tokens, _ in known})
    if sizes < 3:
        return empty | {"reason": f"a line needs 3 different sizes of a step, and {sizes} {'was' if sizes == 1 else 'were'} measured"}
    slope, fixed = np.polyfit(*np.array(known, float).T, 1)
    if slope <= 0:
        return empty | {"reason": "the stall does not grow with the tokens of a step here"}
    return {"fixed_ms": float(fixed), "ms_per_token": float(slope), "tok_s": float(1e3 / slope), "n": len(known), "reason": ""}


def floor(cases: Cases) -> dict[str, Any] | None:
    """{"fixed_ms", "ms_per_token", "tokens", "share"}: what a step that reads costs however little it reads, by the line of `prefill_cost`, and its
    share of the stall at the smallest measured step (`tokens`). Null where there is no line, or where the fixed part is not most of that stall or
    not clearly more than an ordinary step."""
    line = prefill_cost(cases)
    known = [case for case in cases.values() if case.usable and case.step_tokens and case.populations["calm"]["p50_ms"]]
    if line["ms_per_token"] is None or not known:
        return None
    smallest = min(known, key=lambda case: case.step_tokens)
    whole = line["fixed_ms"] + smallest.step_tokens * line["ms_per_token"]
    if line["fixed_ms"] < FLOOR * whole or line["fixed_ms"] < ABOVE * smallest.populations["calm"]["p50_ms"]:
        return None
    return {"fixed_ms": line["fixed_ms"], "ms_per_token": line["ms_per_token"], "tokens": smallest.step_tokens, "share": line["fixed_ms"] / whole}
