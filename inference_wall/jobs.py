"""Jobs: a checked request. What is measured, on which server, under which identity, and what of it is still missing.

What:   `prepare` turns a post, a rig and parameters into one `Job` an arm, after checking all that can be checked without a server.
        `missing_points` says what a job still has to measure, from its finished points alone.
Why:    every problem should be one clear error before anything starts, and an interrupted run must go on exactly as it would have.
Use:    jobs = prepare("part_2", "cpu", {"scale": 0.5}); missing_points(jobs[0], finished=[])
Not:    servers and load (`measure`), what a plan consists of (`plans`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import plans, records, rigs, stats
from .engines import Engine, installed
from .errors import WallError
from .hardware import machine
from .quantized import header
from .server import require_free_port

REFINEMENT_STEP = 1.5  # how far beyond a sweep without a knee the next rate lies
FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SOURCES = ("embedded", "shape", "path", "hub")  # where a model can come from: one of them in each model table


@dataclass(eq=False)
class Job:
    """One arm of one post. `model` is the rig's table with the arm's changes, `folder` where the weights are (or a hub's name)."""

    protocol: rigs.Protocol
    rig: rigs.Rig
    arm: plans.Arm
    values: dict[str, Any]
    settings: dict[str, Any]
    engine: Engine
    model: dict[str, Any]
    folder: str
    flags: dict[str, Any]
    environment: dict[str, str]
    identity: dict[str, Any]
    set_id: str
    set_arms: list[str]

    @property
    def server_key(self) -> str:
        """Jobs with the same key can share a server."""
        return rigs.digest([self.folder, self.model["served_name"], self.flags, self.environment, self.values.get("base_url") or None])

    @property
    def name(self) -> str:
        return f"{self.protocol.name} {self.arm.name}"

    def plan(self, ceiling_req_s: float | None = None) -> list[plans.Point]:
        return plans.points(self.protocol.name, self.settings, self.values, self.arm, ceiling_req_s)


def prepare(post: str, rig_name: str, parameters: dict[str, Any]) -> list[Job]:
    """One job an arm, in order. Every problem is a WallError, before anything starts."""
    protocol = rigs.load_protocol(post)
    values = rigs.check_parameters(protocol, parameters)
    rig = rigs.pick_rig(rig_name)
    attached = bool(values.get("base_url"))
    if not attached:
        rigs.require_hardware(rig)
    settings = plans.settings(rig, post, values)
    found = installed()
    if found is None:
        raise WallError("no vLLM is installed in this environment",
                        "run `make engine`, or install requirements.txt (GPU) or requirements-cpu.txt (CPU)")
    base_flags = {**({"dtype": rig.model["dtype"]} if "dtype" in rig.model else {}), **rig.engine.get("flags", {}), **settings.get("flags", {})}
    arms = plans.arms(post, settings, base_flags)
    names = [arm.name for arm in arms]
    if attached:
        # Somebody else's server has the flags that it has: of the arms only the rig's own can be meant.
        arms = [arm for arm in arms if arm.is_base]
        if not arms:
            raise WallError(f"none of the arms {', '.join(names)} is the rig's own server, which is what --base-url stands for",
                            f"name a setting that rig {rig.name} has itself, or leave --base-url out")
    if values.get("port") and not attached:
        require_free_port(values["port"])
    common = {"post": post, "rig": rig.name, "settings": strict(settings), "scale": values.get("scale"), "model": rig.model, "flags": base_flags,
              "environment": rig.engine.get("environment", {}), "engine": found.version, "base_url": values.get("base_url") or None,
              "code": records.code_version(), "machine": machine()}
    set_id = rigs.digest(common)
    return [_job(protocol, rig, arm, values, settings, found, base_flags, common, set_id, names) for arm in arms]


def _job(protocol: rigs.Protocol, rig: rigs.Rig, arm: plans.Arm, values: dict[str, Any], settings: dict[str, Any], engine: Engine,
         base_flags: dict[str, Any], common: dict[str, Any], set_id: str, names: list[str]) -> Job:
    model = {**rig.model, **arm.model}
    own = next((arm.model[source] for source in SOURCES if source in arm.model), None)
    if own is not None:  # the arm's own model, not the rig's
        model = {name: value for name, value in model.items() if name in arm.model or name not in (*SOURCES, "name")}
        model.setdefault("name", own)
    if "shape" in model:  # there are no weights to load, whatever the rig says: so the words mean nothing, and their quality is not measured
        model["weights"], settings = "random", settings | {"weights": "random"}
    flags = {**base_flags, **({"load-format": "dummy"} if model.get("weights") == "random" and "embedded" not in model else {}), **arm.flags}
    if any(flag.startswith("no-") and flag.removeprefix("no-") in flags for flag in flags):
        raise WallError(f"arm {arm.name} sets a flag both on and off: {', '.join(flags)}", f"mend experiments/rigs/{rig.name}.toml")
    engine.check_flags(flags)
    folder = model_folder(rig, model)
    identity = {**common, "arm": arm.name, "flags": flags, "model": model, "model_config": config_digest(folder)}
    job = Job(protocol, rig, arm, values, settings, engine, model, folder, flags, rig.engine.get("environment", {}), identity, set_id, names)
    _check_lengths(job)
    return job


def _check_lengths(job: Job) -> None:
    """A prompt longer than the context is an error before the start, not 400 answers after it."""
    limit = job.flags.get("max-model-len")
    for point in job.plan(ceiling_req_s=1.0):
        if limit and point.longest > limit:
            raise WallError(f"{job.name}, load {point.load}: a request has {point.longest} tokens, but the server's max-model-len is {limit}",
                            f"shorten it (parameters or experiments/rigs/{job.rig.name}.toml) or raise max-model-len")


def model_folder(rig: rigs.Rig, model: dict[str, Any]) -> str:
    """Folder or hub name of a model. The embedded ones and the shapes are made on first use."""
    if "embedded" in model:
        from .weights import ensure

        return str(ensure(model["embedded"]))
    if "shape" in model:
        from .shapes import ensure

        return str(ensure(model["shape"]))
    if "path" in model:
        path = (rigs.root() / model["path"]).expanduser()
        if not (path / "config.json").is_file():
            raise WallError(f"no model at {path}", f"put it there, or change the path in experiments/rigs/{rig.name}.toml")
        return str(path)
    return model["hub"]


def config_digest(model: str) -> str | None:
    """Digest of the model's config.json; null for a model that vLLM fetches from a hub by itself."""
    path = Path(model) / "config.json"
    return rigs.digest(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def weight_bytes(model: str, dtype: str | None) -> int | None:
    """Bytes of the weights as the server holds them: floating-point tensors in the rig's dtype, others as stored.

    Read from the headers of the model's safetensors files; null for a model that vLLM fetches from a hub by itself.
    """
    total = 0
    for path in Path(model).glob("*.safetensors") if Path(model).is_dir() else []:
        for tensor in header(path).values():
            start, end = tensor["data_offsets"]
            floating = tensor["dtype"] in ("F32", "F16", "BF16") and dtype in FLOAT_BYTES
            total += math.prod(tensor["shape"]) * FLOAT_BYTES[dtype] if floating else end - start
    return total or None


# --- what is missing ----------------------------------------------------------------------------------------------


def missing_points(job: Job, finished: list[dict[str, Any]]) -> list[plans.Point]:
    """What is still to be measured, as far as it is known: the plan, then the refinements of the knee, one rate at a time.

    Everything here follows from the finished points alone, so a resumed run goes on exactly as the interrupted one would have.
    """
    plan = job.plan(ceiling(finished))
    done = {point["point"] for point in finished}
    missing = [point for point in plan if point.index not in done]
    if any(point.pass_name != "trace" for point in missing) or not job.settings.get("refinements"):
        return missing
    return [*_refining_points(job, finished, plan), *missing]


def _refining_points(job: Job, finished: list[dict[str, Any]], plan: list[plans.Point]) -> list[plans.Point]:
    """The next measured point inside the knee's bracket, or none: after the plan's measured points, before those under the profiler."""
    refined = {point["request_rate"] for point in finished if point["point"] >= len(plan)}
    last = [point for point in finished if point["point"] >= len(plan)][-1:]
    if last and last[0]["repeat"] + 1 < job.settings["repeats"]:
        rate, repeat = last[0]["request_rate"], last[0]["repeat"] + 1
    elif len(refined) < job.settings["refinements"]:
        rate, repeat = refinement(records.frame_of_points(finished, job.rig.name), job.settings["slo"]), 0
    else:
        rate = None
    # A rate that was measured already would tell nothing new: its prompts would be the same.
    if rate is None or (repeat == 0 and rate in {point["request_rate"] for point in finished if point["pass"] == "measured"}):
        return []
    return [plans.refinement_point(job.settings, job.values, job.arm, max(len(plan), *(point["point"] + 1 for point in finished)), rate, repeat)]


def refinement(frame: Any, slo: dict[str, Any]) -> float | None:
    """The rate that tells most about the knee: inside its bracket, or below or above a sweep that does not hold one; null for none."""
    found = stats.knee(frame, slo)
    low, high = found["bracket"]
    if found["status"] == "fails at the lowest rate":
        return float(f"{high / REFINEMENT_STEP:.2g}")
    if found["status"] == "no knee in range":
        return float(f"{low * REFINEMENT_STEP:.2g}")
    return stats.next_rate(frame, slo)


def ceiling(finished: list[dict[str, Any]]) -> float | None:
    """Requests per second that the calibration flood completed; null before it, or where the rig has fixed rates."""
    return next((point["summary"]["completed_req_s"] for point in finished if point["pass"] == "calibration"), None)


def strict(value: Any) -> Any:
    """JSON has no infinity: the rate of a flood is written "inf"."""
    if isinstance(value, dict):
        return {name: strict(each) for name, each in value.items()}
    if isinstance(value, list):
        return [strict(each) for each in value]
    return "inf" if value == float("inf") else value
