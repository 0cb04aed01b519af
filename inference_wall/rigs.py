"""Rigs and protocols: what to run, on what, checked before anything starts.

What:   reads `experiments/rigs/*.toml` (machine, model, engine flags, limits of a sweep) and
        `experiments/*/protocol.toml` (a post's question and parameters), checks every parameter, and picks the rig for `auto`.
Why:    a misspelt parameter or an impossible rate must fail in a second, not after a server start of four minutes.
Use:    protocol = load_protocol("part_1"); values = check_parameters(protocol, {"rates": "1,2,inf"}); rig = pick_rig(values["rig"])
Not:    what is measured in which order (`plans`), starting anything (`server`, `measure`), the machine's own facts (`hardware`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import WallError

KINDS = ("cpu", "cuda", "published")
MODES = ("recorded", "live")
GIB = 2**30


def root() -> Path:
    """The repository: `$WALL_ROOT`, or the nearest folder upwards of here or of this file that holds `experiments/rigs`."""
    named = os.environ.get("WALL_ROOT")
    places = [Path(named)] if named else [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parent.parent]
    for place in places:
        if (place / "experiments" / "rigs").is_dir():
            return place.resolve()
    raise WallError(
        "no experiments/rigs folder found" + (f" below WALL_ROOT={named}" if named else " here or above"),
        "run this inside a clone of the repository, or set WALL_ROOT to it",
    )


@dataclass(frozen=True)
class Rig:
    """One machine profile. `model`, `engine` and `posts` are the tables of the TOML file, as written."""

    name: str
    title: str
    kind: str
    note: str = ""
    match: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    posts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """What torch calls the device: `cuda` or `cpu`."""
        return "cuda" if self.kind == "cuda" else "cpu"

    def post(self, name: str) -> dict[str, Any]:
        """The rig's settings for one post, or an error that names the posts it has."""
        if name not in self.posts:
            raise WallError(f"rig {self.name} has no settings for {name}",
                            f"add a [{name}] table to experiments/rigs/{self.name}.toml (it has: {', '.join(self.posts) or 'none'})")
        return self.posts[name]


@dataclass(frozen=True)
class Protocol:
    """One post: its notebook and its parameters, as written in TOML."""

    name: str
    title: str
    notebook: str
    question: str
    parameters: dict[str, dict[str, Any]]
    folder: Path


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as problem:
        raise WallError(f"{path.name} is not valid TOML: {problem}", f"mend {path}") from problem


def _unknown(what: str, name: str, known: list[str]) -> WallError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return WallError(f"unknown {what} {name!r}", f"{hint}known: {', '.join(known)}")


def rig_names() -> list[str]:
    return sorted(path.stem for path in (root() / "experiments" / "rigs").glob("*.toml"))


def load_rig(name: str) -> Rig:
    """Read one rig; an unknown name, a missing key or a wrong kind is one error."""
    if name not in rig_names():
        raise _unknown("rig", name, [*rig_names(), "auto"])
    path = root() / "experiments" / "rigs" / f"{name}.toml"
    data = _read_toml(path)
    for key in ("name", "title", "kind"):
        if key not in data:
            raise WallError(f"rig {name} has no {key!r}", f"add it to {path}")
    if data["kind"] not in KINDS:
        raise _unknown("kind of rig", str(data["kind"]), list(KINDS))
    if "shape" in data.get("model", {}):
        data["model"]["weights"] = "random"  # there are no others, so `auto` never picks such a rig
    fields = {key: data[key] for key in ("name", "title", "kind", "note", "match", "model", "engine") if key in data}
    return Rig(**fields, posts={key: value for key, value in data.items() if key.startswith("part_")})


def pick_rig(name: str = "auto") -> Rig:
    """The named rig, or for `auto` the one that fits this machine: a known GPU, any other GPU, the embedded CPU rig.

    A rig that needs a GPU on a machine without a fitting one is an error here, before anything starts.
    """
    if name != "auto":
        rig = load_rig(name)
        if rig.kind == "published":
            raise WallError(f"rig {name} holds published figures and cannot be run", "choose a rig with an engine, or auto")
        return rig
    from .hardware import gpus

    cards = gpus()
    rigs = [load_rig(each) for each in rig_names()]
    # A rig that names the card comes before one that takes any card.
    # Random weights are for those who ask for them by name.
    candidates = [rig for rig in rigs if rig.kind == "cuda" and rig.model.get("weights") != "random"]
    for rig in sorted(candidates, key=lambda rig: (not rig.match.get("gpu_name"), rig.name)):
        if any(_fits(rig, card) for card in cards):
            return rig
    return next(rig for rig in rigs if rig.kind == "cpu")


def _fits(rig: Rig, card: dict[str, Any]) -> bool:
    return (rig.match.get("gpu_name", "") in (card.get("name") or "")
            and (card.get("memory_total_gib") or 0) >= rig.match.get("min_gpu_memory_gib", 0))


def require_hardware(rig: Rig) -> None:
    """Raise when the rig needs a GPU that this machine does not have."""
    if rig.kind != "cuda":
        return
    from .hardware import gpus

    cards = gpus()
    if not any(_fits(rig, card) for card in cards):
        need = f"{rig.match.get('gpu_name') or 'an NVIDIA GPU'} with at least {rig.match.get('min_gpu_memory_gib', 0)} GiB"
        have = ", ".join(f"{card['name']} ({card['memory_total_gib']:.0f} GiB)" for card in cards) or "no NVIDIA GPU"
        raise WallError(f"rig {rig.name} needs {need}; this machine has {have}", "use --rig auto, or --rig cpu for the embedded model")


def protocol_names() -> list[str]:
    """The posts that measure something, in order. (The primer, a page without a server of its own, is not among them.)"""
    return sorted(_read_toml(path)["name"] for path in (root() / "experiments").glob("part_*/protocol.toml"))


def load_protocol(name: str) -> Protocol:
    for path in (root() / "experiments").glob("*/protocol.toml"):
        data = _read_toml(path)
        if data.get("name") == name:
            return Protocol(name=name, title=data["title"], notebook=data["notebook"], question=data.get("question", ""),
                            parameters=data.get("parameters", {}), folder=path.parent)
    raise _unknown("post", name, protocol_names())


# --- parameters -------------------------------------------------------------------------------------------------


def check_parameters(protocol: Protocol, given: dict[str, Any]) -> dict[str, Any]:
    """Every parameter of the post with its checked value: the given one, else the default.

    Raises WallError for an unknown name (with the nearest known one) and for a value outside its type.
    """
    for name in given:
        if name not in protocol.parameters:
            raise _unknown(f"parameter of {protocol.name}", name, sorted(protocol.parameters))
    return {name: _check(name, spec, given.get(name, spec.get("default"))) for name, spec in protocol.parameters.items()}


def _check(name: str, spec: dict[str, Any], value: Any) -> Any:
    kind = spec["type"]
    if value is None or value == "":
        return ""
    try:
        checked = _CHECKS[kind](value)
    except (ValueError, TypeError) as problem:
        raise WallError(f"parameter {name}={value!r}: {problem}", spec.get("help", "see `wall run --help`")) from problem
    return checked


def _number(value: Any) -> float:
    number = float(value)
    if math.isnan(number):
        raise ValueError("not a number")
    return number


def _between(low: float, high: float, what: str, *, above: bool = False):
    def check(value: Any) -> float:
        number = _number(value)
        if number > high or number < low or (above and number == low):
            raise ValueError(f"must be {what}")
        return number

    return check


def _count(value: Any) -> int:
    number = _number(value)
    if math.isinf(number) or number != int(number) or not 1 <= number <= 1_000_000:
        raise ValueError("must be a whole number from 1 to 1,000,000")
    return int(number)


def parse_rates(value: Any) -> list[float]:
    """`"1,2,inf"`, `[1, 2, "inf"]` or `2` -> ascending request rates per second; infinite means all at once.

    A rate that is zero, negative, not a number, or given twice is a ValueError.
    """
    rates = [_number(part) for part in _parts(value)]
    if not rates:
        raise ValueError("no rate given")
    if any(rate <= 0 for rate in rates):
        raise ValueError("a request rate must be above 0 (inf = all requests at once)")
    if len(set(rates)) != len(rates):
        raise ValueError("a rate is given twice")
    return sorted(rates)


def _counts(value: Any) -> list[int]:
    """`"1, 4,16"`, `[1, 4]` or `4` -> whole numbers in the order given, each once."""
    counts = [_count(part) for part in _parts(value)]
    if not counts:
        raise ValueError("no number given")
    if len(set(counts)) != len(counts):
        raise ValueError("a number is given twice")
    return counts


def _names(value: Any) -> list[str]:
    names = [str(part) for part in _parts(value)]
    if not names:
        raise ValueError("no name given")
    return names


def _parts(value: Any) -> list[Any]:
    """A list as notebooks and command lines write it: separated by commas or spaces, or a real list, or a single value."""
    return value.replace(",", " ").split() if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else [value]


def _choice(*allowed: str):
    def check(value: Any) -> str:
        if str(value) not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return str(value)

    return check


def _url(value: Any) -> str:
    parts = urlsplit(str(value))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must look like http://127.0.0.1:8000")
    return str(value).rstrip("/")


def _rig_name(value: Any) -> str:
    if str(value) not in (*rig_names(), "auto"):
        raise _unknown("rig", str(value), [*rig_names(), "auto"])
    return str(value)


_CHECKS = {
    "rig": _rig_name,
    "mode": _choice(*MODES),
    "url": _url,
    "rates": parse_rates,
    "count": _count,
    "counts": _counts,
    "names": _names,
    "fraction": _between(0, 1, "above 0 and at most 1", above=True),
    "ratio": _between(0, 1, "from 0 to 1"),
    "seconds": _between(0, 86_400, "above 0 and at most 86,400 seconds", above=True),
    "text": str,
    "port": lambda value: int(_between(1024, 65_535, "a port from 1024 to 65535")(value)),
}


def digest(value: Any) -> str:
    """Hex sha256 of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False, default=str).encode()).hexdigest()
