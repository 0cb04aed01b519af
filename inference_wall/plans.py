"""Plans: the arms of a post and the points of an arm, laid out before anything starts.

What:   from the rig's table `[part_N]` and the caller's parameters: `settings` (the two laid over each other), `arms` (server configurations) and
        `points` (every load on one arm, in the order in which it is measured).
Why:    what will be run must be known, checked and printable before a server costs minutes; and a resumed run must come to the same plan.
Use:    chosen = settings(rig, "part_2", values); for arm in arms("part_2", chosen): points("part_2", chosen, values, arm, flags)
Not:    starting anything (`measure`), files and parameters (`rigs`). docs/decisions/0004 has the table of posts, arms and loads.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import WallError
from .percentiles import needed
from .rigs import Rig, parse_rates

# Parameters that every post has; the others are knobs of the post and replace a setting of the rig of the same name.
COMMON = ("rig", "mode", "base_url", "scale", "port")
TRACE_TOKENS = 40  # of each stream under the profiler: room for a settled stretch and the window


@dataclass(frozen=True)
class Arm:
    """One server configuration: what it adds to the rig's flags and what it replaces in the rig's model."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def is_base(self) -> bool:
        """Whether it is the rig itself: such an arm must start."""
        return not self.flags and not self.model


@dataclass(frozen=True)
class Point:
    """One load on one server; docs/decisions/0004 says what the numbers mean for each kind.

    `request_rate` is in requests per second, or null for all requests at once; `max_concurrency` closes the loop. `profile_after`: tokens of each
    stream before the profiler starts (0: as soon as all of them stream).
    """

    index: int
    pass_name: str
    arm: str
    load: str
    kind: str
    repeat: int
    seed: int
    num_prompts: int
    input_len: int
    output_len: int
    request_rate: float | None = None
    max_concurrency: int | None = None
    victims: int = 0
    rounds: int = 0
    injected: int = 0
    injected_len: int = 0
    injected_output_len: int = 0
    profile_after: int = 0

    @property
    def rate_label(self) -> str:
        return "inf" if self.request_rate is None else f"{self.request_rate:g}"

    @property
    def label(self) -> str:
        """What the point is, for a person: `sweep, rate 2`, `closed, 4 at a time`, `heavy`."""
        what = {"bench": f"rate {self.rate_label}" if self.max_concurrency is None else f"{self.max_concurrency} at a time",
                "streams": f"batch {self.num_prompts}", "victims": f"{self.injected} x {self.injected_len} tokens", "quality": "fixed text"}
        return f"{self.load}, {what[self.kind]}"

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(self.input_len + self.output_len, self.injected_len + self.injected_output_len)

    def planned_s(self, ceiling_req_s: float | None = None) -> float:
        """Seconds that the load should take: the arrivals, or the server's ceiling where that is slower."""
        arrivals = self.num_prompts / self.request_rate if self.request_rate else 0.0
        return max(arrivals, self.num_prompts / ceiling_req_s if ceiling_req_s else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The point as it stands in `points.jsonl` (the pass is called `pass` there)."""
        plain = asdict(self)
        plain["point"], plain["pass"] = plain.pop("index"), plain.pop("pass_name")
        return plain | {"rate_label": self.rate_label}


# --- settings -----------------------------------------------------------------------------------------------------


def settings(rig: Rig, post: str, values: dict[str, Any]) -> dict[str, Any]:
    """The rig's settings for the post with the caller's parameters laid over them.

    For part_1 `rates` are fixed offered loads, or null where the rig gives `rate_fractions` of the ceiling that this machine turns out
    to have: a list that straddles the wall of one processor misses that of another.
    """
    merged = {"repeats": 1, "trace": True, **rig.post(post)}
    merged |= {name: value for name, value in values.items() if name not in COMMON and not name.startswith("slo_") and value not in (None, "")}
    if post == "part_1":
        merged["rates"] = parse_rates(merged["rates"]) if merged.get("rates") else None
        merged["rate_fractions"] = None if merged["rates"] else parse_rates(merged["rate_fractions"])
        slo = dict(merged.get("slo", {}))
        for name, parameter in (("ttft_s", "slo_ttft_s"), ("completed_ratio", "slo_completed_ratio")):
            if values.get(parameter) not in (None, ""):
                slo[name] = values[parameter]
        merged["slo"] = slo
    _check_knobs(rig, post, merged)
    if post == "part_5":
        wanted = merged["variants"] if values.get("variants") else [each["name"] for each in merged["variants"] if not each.get("optional")]
        merged["variants"] = _chosen_variants(rig, wanted)
        merged["weights"] = rig.model.get("weights", "checkpoint")
    return merged


def _check_knobs(rig: Rig, post: str, merged: dict[str, Any]) -> None:
    """What no server could run, or what would show nothing: one clear error, before anything starts."""
    seats = max(merged["caps"]) if post == "part_3" else {**rig.engine.get("flags", {}), **merged.get("flags", {})}.get("max-num-seqs")
    for name in ("batches", "concurrency"):
        if seats and any(count > seats for count in merged.get(name, [])):
            raise WallError(f"{name} has {max(merged[name])}, but the server runs at most {seats} requests at once",
                            f"keep each of {name} at or below {seats}" + (" or add a larger cap" if post == "part_3" else ""))
    if post in ("part_3", "part_5") and len(merged["batches"]) < 3:
        raise WallError(f"{len(merged['batches'])} batches bear no line through the step times", "give at least three, such as 1,4,16")
    if post == "part_3" and len(merged["caps"]) < 2:
        raise WallError("one cap alone shows no cliff", "give at least two, such as 1,16")
    if post == "part_4" and min(merged["blocks"]) < 2:
        raise WallError("a cache of one block holds nothing: one block is the engine's own", "give at least 2 blocks")
    if post == "part_2" and seats and merged["victims"] + 1 > seats:
        raise WallError(f"{merged['victims']} victims leave no seat for a long prompt: the server runs at most {seats} requests at once",
                        f"ask for fewer than {seats} victims")


def _chosen_variants(rig: Rig, names: list[str]) -> list[dict[str, Any]]:
    """The named variants of the rig; the first one of the rig stays, since the others are compared with it."""
    known = {variant["name"]: variant for variant in rig.post("part_5")["variants"]}
    for name in names:
        if name not in known:
            raise WallError(f"rig {rig.name} has no variant {name!r}", f"known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys([next(iter(known)), *names])]


# --- arms ---------------------------------------------------------------------------------------------------------


def arms(post: str, chosen: dict[str, Any], base_flags: dict[str, Any]) -> list[Arm]:
    """The arms of a post in the order of measurement. Flags that equal the rig's own are left out: such an arm is the rig itself."""
    found = {"part_1": _one_arm, "part_2": _budget_arms, "part_3": _cap_arms, "part_4": _block_arms, "part_5": _variant_arms}[post](chosen)
    return [Arm(arm.name, {name: value for name, value in arm.flags.items() if base_flags.get(name) != value}, arm.model) for arm in found]


def _one_arm(chosen: dict[str, Any]) -> list[Arm]:
    return [Arm("default")]


def _budget_arms(chosen: dict[str, Any]) -> list[Arm]:
    chunked = [Arm(f"chunked-{budget}", {"max-num-batched-tokens": budget}) for budget in chosen["budgets"]]
    return [*chunked, Arm("unchunked", {"no-enable-chunked-prefill": True, "max-num-batched-tokens": chosen["unchunked_budget"]})]


def _cap_arms(chosen: dict[str, Any]) -> list[Arm]:
    # The largest cap first: it is most likely the rig's own, whose server is up already.
    return [Arm(f"cap-{cap}", {"max-num-seqs": cap}) for cap in sorted(chosen["caps"], reverse=True)]


def _block_arms(chosen: dict[str, Any]) -> list[Arm]:
    # Some engines refuse more seats than the cut cache has blocks: `cut_flags`.
    cut = chosen.get("cut_flags", {})
    sizes = sorted(chosen["blocks"], reverse=True)
    return [Arm("natural"), *(Arm(f"blocks-{blocks}", {"num-gpu-blocks-override": blocks, **cut}) for blocks in sizes)]


def _variant_arms(chosen: dict[str, Any]) -> list[Arm]:
    not_model = ("name", "flags", "optional")
    return [Arm(each["name"], each.get("flags", {}), {name: value for name, value in each.items() if name not in not_model})
            for each in chosen["variants"]]


# --- points -------------------------------------------------------------------------------------------------------


class _Plan:
    """Collects points in order. Seeds depend on what a point is, not on its place; those of different passes never meet."""

    def __init__(self, arm: Arm, scale: float):
        self.arm, self.scale, self.points = arm, scale, []

    def add(self, pass_name: str, load: str, kind: str, *, prompts: int, input_len: int, output_len: int, repeat: int = 0, scaled: bool = True,
            **more: Any) -> None:
        """`prompts` is what the rig asks for, before `scale`; a batch or a number of victims is not scaled."""
        what = more.get("request_rate", math.inf) or math.inf
        closed = more.get("max_concurrency") or more.get("batch") or ""
        more.pop("batch", None)
        count = max(1, round(prompts * self.scale)) if scaled else prompts
        self.points.append(Point(len(self.points), pass_name, self.arm.name, load, kind, repeat, seed(pass_name, repeat, load, f"{what:g}", closed),
                                 count, input_len, output_len, **more))


def seed(*what: Any) -> int:
    """A 31-bit seed that depends on what the point is."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, what)).encode()).digest()[:4], "big") >> 1


def points(post: str, chosen: dict[str, Any], values: dict[str, Any], arm: Arm, ceiling_req_s: float | None = None) -> list[Point]:
    """The points of one arm in order: cold ones, the measured ones with their repeats, then those under the profiler.

    With `rate_fractions` (part_1) two floods come first, one cold, one for calibration; the rest follows once the calibration's
    completed rate is known (`ceiling_req_s`). Without it only those two are returned.
    """
    plan = _Plan(arm, values.get("scale") or 1.0)
    {"part_1": _sweep, "part_2": _freeze, "part_3": _cliff, "part_4": _starvation, "part_5": _quantization}[post](plan, chosen, ceiling_req_s)
    return plan.points


def _sweep(plan: _Plan, chosen: dict[str, Any], ceiling_req_s: float | None) -> None:
    rates, lengths = chosen["rates"], {"input_len": chosen["input_len"], "output_len": chosen["output_len"]}
    cold = chosen.get("cold_prompts", chosen["num_prompts"])
    known: set[float] = set()
    if rates is None:
        plan.add("cold", "sweep", "bench", prompts=cold, **lengths)
        plan.add("calibration", "sweep", "bench", prompts=chosen["calibration_prompts"], **lengths)
        if not ceiling_req_s:
            return
        known = {math.inf}
        rates = [_two_digits(fraction * ceiling_req_s) for fraction in chosen["rate_fractions"]]
    for rate in rates:
        if rate not in known:
            plan.add("cold", "sweep", "bench", prompts=cold, request_rate=_finite(rate), **lengths)
    for repeat in range(chosen["repeats"]):
        # Far below the wall repeats tell nothing new, and a low rate takes the longest.
        for rate in (rates if repeat == 0 else [rate for rate in rates if rate >= chosen.get("repeat_from", 0)]):
            plan.add("measured", "sweep", "bench", prompts=_sweep_prompts(chosen, rate), repeat=repeat, request_rate=_finite(rate), **lengths)
    if chosen["trace"]:
        # Some answers under way, then two more prompts of the same length: what a step does when somebody arrives.
        _victims(plan, "trace", "arrivals", victims=4, rounds=1, injected=2, injected_len=chosen["input_len"], injected_output_len=4,
                 input_len=chosen["input_len"], output_len=TRACE_TOKENS)


def refinement_point(chosen: dict[str, Any], values: dict[str, Any], arm: Arm, index: int, rate: float, repeat: int) -> Point:
    """One more measured point of a sweep, at a rate that follows from the finished ones."""
    plan = _Plan(arm, values.get("scale") or 1.0)
    plan.points = [None] * index
    plan.add("measured", "sweep", "bench", prompts=_sweep_prompts(chosen, rate), repeat=repeat, request_rate=rate, input_len=chosen["input_len"],
             output_len=chosen["output_len"])
    return plan.points[-1]


def _sweep_prompts(chosen: dict[str, Any], rate: float) -> int:
    """`num_prompts`, or what arrives in `point_s` seconds where that is less, but never fewer than the SLO's percentile can bear."""
    if not chosen.get("point_s") or math.isinf(rate):
        return chosen["num_prompts"]
    return min(chosen["num_prompts"], max(needed(chosen["slo"]["ttft_percentile"]), math.ceil(rate * chosen["point_s"])))


def _freeze(plan: _Plan, chosen: dict[str, Any], _: float | None) -> None:
    shape = {"victims": chosen["victims"], "injected_len": chosen["injected_len"], "injected_output_len": chosen["injected_output_len"],
             "input_len": chosen["input_len"], "output_len": chosen["output_len"]}
    rounds = {"light": chosen["rounds"], "heavy": max(1, chosen["rounds"] // 2)}
    _victims(plan, "cold", "light", rounds=1, injected=1, **shape)
    for repeat in range(chosen["repeats"]):
        for load in ("light", "heavy"):
            _victims(plan, "measured", load, repeat=repeat, rounds=max(1, round(rounds[load] * plan.scale)), injected=chosen[load], **shape)
    if chosen["trace"]:
        _victims(plan, "trace", "light", rounds=1, injected=1, **shape)


def _victims(plan: _Plan, pass_name: str, load: str, *, victims: int, repeat: int = 0, **more: Any) -> None:
    plan.add(pass_name, load, "victims", prompts=victims, scaled=False, repeat=repeat, victims=victims, **more)


def _cliff(plan: _Plan, chosen: dict[str, Any], _: float | None) -> None:
    cap, caps = int(plan.arm.name.removeprefix("cap-")), chosen["caps"]
    lengths = {"input_len": chosen["input_len"], "output_len": chosen["output_len"]}

    def prompts(seats: int) -> int:
        return max(chosen["min_prompts"], chosen["prompts_per_seat"] * seats)

    plan.add("cold", "flood", "bench", prompts=max(2, cap // 2), **lengths)
    for repeat in range(chosen["repeats"]):
        plan.add("measured", "flood", "bench", prompts=prompts(cap), repeat=repeat, **lengths)
        if cap == max(caps):
            for seats in chosen["concurrency"]:
                plan.add("measured", "closed", "bench", prompts=prompts(seats), repeat=repeat, max_concurrency=seats, **lengths)
            _steps(plan, chosen, repeat)
    if chosen["trace"] and cap == max(caps):
        for batch in chosen.get("trace_batches", (1, max(chosen["batches"]))):
            plan.add("trace", "steps", "streams", prompts=batch, scaled=False, batch=batch, input_len=chosen["input_len"], output_len=TRACE_TOKENS)


def _steps(plan: _Plan, chosen: dict[str, Any], repeat: int) -> None:
    for batch in chosen["batches"]:
        plan.add("measured", "steps", "streams", prompts=batch, scaled=False, repeat=repeat, batch=batch, input_len=chosen["input_len"],
                 output_len=chosen["steps_output_len"])


def _starvation(plan: _Plan, chosen: dict[str, Any], _: float | None) -> None:
    chosen = {"min_prompts": 1, **chosen}
    loads = [{**load, "num_prompts": chosen.get("num_prompts") or load["num_prompts"]} for load in chosen["workloads"]]
    first = loads[0]
    plan.add("cold", first["name"], "bench", prompts=4, scaled=False, input_len=first["input_len"], output_len=min(32, first["output_len"]))
    for repeat in range(chosen["repeats"]):
        for load in loads:
            # Below so many requests the cut cache would not fill, and a small scale would show nothing.
            count = max(chosen["min_prompts"], round(load["num_prompts"] * plan.scale))
            plan.add("measured", load["name"], "bench", prompts=count, scaled=False, repeat=repeat, input_len=load["input_len"],
                     output_len=load["output_len"])
    if chosen["trace"] and chosen.get("trace_after") and plan.arm.flags:
        # As many streams as seats, watched from shortly before the cache is full: what a step does when somebody is put out.
        plan.add("trace", first["name"], "streams", prompts=chosen["trace_batch"], scaled=False, batch=chosen["trace_batch"],
                 input_len=first["input_len"], output_len=first["output_len"], profile_after=chosen["trace_after"])


def _quantization(plan: _Plan, chosen: dict[str, Any], _: float | None) -> None:
    lengths = {"input_len": chosen["input_len"], "output_len": chosen["output_len"]}
    plan.add("cold", "flood", "bench", prompts=max(chosen["batches"]), scaled=False, **lengths)
    for repeat in range(chosen["repeats"]):
        _steps(plan, chosen, repeat)
        plan.add("measured", "flood", "bench", prompts=chosen["num_prompts"], repeat=repeat, **lengths)
    if plan.arm.model.get("weights", chosen.get("weights", "checkpoint")) == "checkpoint":
        plan.add("measured", "quality", "quality", prompts=1, scaled=False, input_len=1, output_len=1)
    if chosen["trace"]:
        plan.add("trace", "steps", "streams", prompts=1, scaled=False, batch=1, input_len=chosen["input_len"], output_len=TRACE_TOKENS)


def _finite(rate: float) -> float | None:
    return None if math.isinf(rate) else rate


def _two_digits(rate: float) -> float:
    """A rate that a person can say, and that a small error of the calibration does not change."""
    return rate if math.isinf(rate) else float(f"{rate:.2g}")
