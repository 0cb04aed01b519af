"""Part 5 in words and tables that depend on the data.

What:   sentences (Markdown) and HTML tables from `part_5.look`.
Why:    prose that is typed must stay true however a measurement comes out: also when a variant is refused, a fit is not possible, fewer
        bits are slower, or no weights are real.
Use:    found = part_5.look(arms); display(Markdown(thesis_sentence(found))); display(HTML(bytes_table(found)))
Not:    named numbers (`part_5`), the analysis (`quantization`), figures (`quantization_figures`).
"""

from __future__ import annotations

import itertools
from typing import Any

from . import quantization, tables, trace
from .chart import digits
from .errors import WallError
from .part_5 import Findings

SMALL_PERCENT = 5.0  # a difference that is called small


def variants_sentence(found: Findings) -> str:
    """Which variants were measured, refused, or are missing, and which have real weights."""
    real = [f"`{row['arm']}`" for row in found.rows.to_dict("records") if row["real"]]
    random = [f"`{row['arm']}`" for row in found.rows.to_dict("records") if not row["real"]]
    parts = []
    if real:
        parts.append(f"Measured with the weights of a real checkpoint: {_listed(real)}.")
    if random:
        parts.append(f"Measured with random weights of a real model's shape: {_listed(random)}. The bytes are right, the words mean nothing.")
    parts += [f"**The engine refused `{name}`: {reason.rstrip('.')}.** It is not testable here." for name, reason in found.arms.refused.items()]
    if found.arms.missing:
        parts.append(f"No record yet of {_listed([f'`{name}`' for name in found.arms.missing])}.")
    if not found.rows.empty and len(found.rows) == 1:
        parts.append("With one variant there is nothing to compare on this rig; the published pair below is all that this page can judge.")
    return " ".join(parts)


def formats_sentence(found: Findings) -> str:
    """How the weights of each quantized variant are stored, and what becomes of the inputs."""
    known = {name: [f"`{row['arm']}`" for row in found.rows.to_dict("records") if name in row["formats"]] for name in ("int8", "int4")}
    parts = []
    if known["int8"]:
        parts.append(f"In {_listed(known['int8'])} the whole numbers run from -128 to 127, with one scale a row. The inputs of each multiplication "
                     "are rounded to 8 bits too, while it runs; so the arithmetic changes as well as the bytes.")
    if known["int4"]:
        parts.append(f"In {_listed(known['int4'])} they take 16 values, with a scale for each group of 128 weights (the format is called AWQ). "
                     "Only the MLPs, the largest matrices of each layer, have them; the rest stays in 16 bits, as published checkpoints of this kind "
                     "leave it. The inputs keep their 16 bits: the kernel turns each weight back on its way to the multiplication.")
    return " ".join(parts)


def width_sentence(found: Findings) -> str:
    """How many bytes the unquantized weight has here, which is not the same on every machine."""
    start = found.role("base")
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(str(start["dtype"])) if start else None
    if width is None:
        return "How many bytes an unquantized weight has on this rig is not in the record."
    text = f"The unquantized weights are `{start['dtype']}` here: **{width} bytes each**."
    if width == 4:
        text += (" On a GPU they would have 2. So a step down to 8 bits saves more on this machine, in proportion, than it would save there, and a "
                 "ratio from this page must not be carried over to a GPU.")
    return text


def bytes_table(found: Findings) -> str:
    """One row a variant: parameters, formats, bytes, room, and the bound that follows."""
    rows = [(row["arm"], f"{row['parameters'] / 1e6:,.1f} M" if row["parameters"] is not None else "not known", _formats(row),
             _unit(row["loaded_gb"], "GB"), _unit(row["streamed_gb"], "GB"), _unit(row["stream_ms"], "ms"),
             "not said" if row["kv_cache_tokens"] is None else f"{row['kv_cache_tokens']:,.0f} tokens") for row in found.rows.to_dict("records")]
    rows += [(name, "refused", "–", "–", "–", "–", "–") for name in found.arms.refused]
    return tables.plain_table(["variant", "parameters", "stored as", "loaded", "streamed in a step", "bound of a step", "room in the cache"], rows,
                               "part_5_bytes.csv")


def _formats(row: dict[str, Any]) -> str:
    largest_first = sorted(row["formats"].items(), key=lambda item: -item[1]["parameters"])
    parts = [f"{entry['parameters'] / 1e6:,.1f} M in {name}" for name, entry in largest_first if entry["parameters"]]
    return ", ".join(parts) or "not known"


def floor_sentence(found: Findings) -> str:
    """What bytes over bandwidth allow for the unquantized variant, or why that is not known."""
    start = found.role("base")
    if start is None:
        return "The unquantized variant was not measured, so no bound in milliseconds can be given."
    if start["bandwidth_gb_s"] is None:
        return "The bandwidth of this machine was not measured, so no bound in milliseconds can be given."
    count = start["bandwidth_threads"]
    threads = f" with {count:.0f} thread{'s' if count != 1 else ''}" if count else ""
    engine = start["engine_threads"]
    fewer = f" (The engine was told to compute with {engine:.0f}.)" if count and engine and engine != count else ""
    text = (f"Just before the first server started, this machine moved memory at {start['bandwidth_gb_s']:.1f} GB/s{threads}, the better of copying "
            "and reading. ")
    if start["stream_ms"] is None:
        return (f"{text}How many bytes a step of `{start['arm']}` streams is not known: {start['bytes_reason']}. So no bound in "
                "milliseconds can be given.")
    return (f"{text}The unquantized variant streams {start['streamed_gb']:.2f} GB a step. So a step of it takes at least "
            f"**{digits(start['stream_ms'])} ms**, however few sequences share it. The table above has the same bound for the others.{fewer}")


def bound_sentence(found: Findings) -> str:
    """The prediction of each rule for each pair, before any measurement."""
    parts = []
    for pair in found.pairs.to_dict("records"):
        known = [f"{quantization.PREDICTORS[name]} say **{pair[name]:.2f}**" for name in quantization.PREDICTORS if pair[name] is not None]
        parts.append(f"For `{pair['arm']}`: {', '.join(known) or 'nothing can be predicted, since its files are not known'}.")
    if not parts:
        return "This rig has no pair of variants with a record, so the rules have nothing to predict here."
    return ("The part of a step that all its sequences share, over that of the unquantized variant, should be the ratio of whatever sets it. "
            + " ".join(parts))


def steps_table(found: Findings) -> str:
    """The line of each variant with its intervals, measured steps of the smallest and the largest batch, and the bandwidth that they imply."""
    rows = [(row["arm"], _ranged(row["fixed_ms"], row["fixed_low"], row["fixed_high"], row["fit_reason"]),
             _ranged(row["slope_ms"], row["slope_low"], row["slope_high"], row["fit_reason"]), _unit(row["one_ms"], "ms"),
             "–" if row["largest_ms"] is None else f"{digits(row['largest_ms'])} ms ({row['largest_batch']:.0f})",
             "–" if row["effective_gb_s"] is None else f"{digits(row['effective_gb_s'])} GB/s, by {SHORT[row['shared_by']]}",
             "–" if row["of_bandwidth_percent"] is None else f"{row['of_bandwidth_percent']:.0f} %")
            for row in found.rows.to_dict("records")]
    return tables.plain_table(["variant", "fixed term, ms", "for each sequence, ms", "step of a batch of 1", "step of the largest batch",
                                "streamed bytes over time", "of the measured bandwidth"], rows, "part_5_steps.csv")


SHORT = {quantization.FIXED: "fixed term", quantization.ONE: "step of 1"}


def line_sentence(found: Findings) -> str:
    """Whether a straight line describes the steps, and what is compared where it does not."""
    rows = [row for row in found.rows.to_dict("records") if row["by_batch"]]
    if not rows:
        return "No step time was measured, so there is no line."
    doubts = [f"`{row['arm']}` ({row['line_doubt']})" for row in rows if row["line_doubt"]]
    if not doubts:
        return ("Each line is firm: by its points neither the fixed term nor what a sequence adds could be 0. So the fixed terms are compared "
                "below.")
    return (f"**There is no line to rely on for {_listed(doubts)}.** Two terms of such a line are not two costs.{_falls(rows)} So this page compares "
            "measured steps instead, for all variants: those of one sequence, which stream the same bytes, and those of the largest batch.")


def _falls(rows: list[dict[str, Any]]) -> str:
    """Where a step of more sequences was clearly shorter than one of fewer."""
    parts = []
    for row in rows:
        for (few, slow), (many, fast) in itertools.pairwise(sorted(row["by_batch"].items())):
            if fast < SHORTER * slow:
                parts.append(f"in `{row['arm']}` {digits(fast)} ms for {many}, {digits(slow)} ms for {few}")
    return f" A step of more sequences was even shorter than one of fewer: {'; '.join(parts)}." if parts else ""


SHORTER = 0.95  # times the other: less is called shorter


def thesis_sentence(found: Findings) -> str:
    """Which rule was nearest for each pair, and whether the thesis of the series held on this rig."""
    parts, pairs = [], found.pairs.to_dict("records")
    for pair in pairs:
        if pair["measured"] is None:
            parts.append(f"`{pair['arm']}`: no ratio, because {pair['reason']}.")
            continue
        by = "fixed terms" if pair["measured_by"] == quantization.FIXED else "steps of one sequence"
        interval = f"about 95 percent: {pair['low']:.2f} to {pair['high']:.2f}" if pair["low"] is not None else "no interval"
        near = f" Nearest, by the factor between them: {' and '.join(pair['nearest'])}." if pair["nearest"] and pair["says"] != "part" else ""
        near += _promised(pair)
        doubt = {"cannot tell": " It cannot tell bytes from parameters: ", "neither": " That is not near: "}.get(pair["says"])
        also = (f" At a batch of {pair['largest_batch']:.0f}: {pair['largest']:.2f}."
                if pair["measured_by"] == quantization.ONE and pair["largest"] and pair["largest_batch"] > 1 else "")
        parts.append(f"`{pair['arm']}`: measured **{pair['measured']:.2f}** by {by} ({interval}).{near}" +
                     (f"{doubt}{pair['reason']}." if doubt and pair["reason"] else "") + also)
    return "\n".join([*(f"- {part}" for part in parts), "", _end(found)])


def _promised(pair: dict[str, Any]) -> str:
    """For one model in two formats whose step got shorter, and by less than its bytes say: how much of the promise came."""
    streamed, measured = pair["streamed"], pair["measured"]
    if pair["parameters"] is None or abs(pair["parameters"] - 1) > 0.01 or streamed is None or not streamed < measured < 1:
        return ""
    return (f" Bytes promise a step that is {100 * (1 - streamed):.0f} percent shorter, and {100 * (1 - measured):.0f} percent came: "
            f"{100 * (1 - measured) / (1 - streamed):.0f} percent of the promise.")


def _end(found: Findings) -> str:
    """The verdict as a sentence."""
    verdict, _ = found.verdict
    pairs, close = found.pairs.to_dict("records"), f"{quantization.CLOSE_PERCENT:.0f} percent"
    if verdict == "not measured here":
        return "**Not decided here:** no pair of variants on this rig can tell bytes from parameters."
    waiting, because = quantization.waits(found.pairs)
    if verdict == "held":
        return (f"**The thesis held here:** in every pair that can tell, bytes are nearest, within {close} or within the interval. And {because}: it "
                "waits for bytes.")
    if verdict == "moved":
        part = [f"`{pair['arm']}`" for pair in pairs if pair["says"] == "part"]
        if part and waiting:
            return f"**The thesis held in part:** fewer bytes did make the step of {_listed(part)} shorter, and not by as much as they promise."
        if not waiting:
            return f"**{'Bytes had part of their effect' if part else 'Bytes came nearest'}, and that is no proof here:** {because}."
        return f"**The thesis held in direction only:** bytes are nearer than parameters, but off by more than {close}."
    names = {kind: [f"`{pair['arm']}`" for pair in pairs if pair["says"] == kind] for kind in ("parameters", "neither")}
    why = [f"for {_listed(names['parameters'])} the number of parameters came nearer than bytes"] if names["parameters"] else []
    why += [f"for {_listed(names['neither'])} no rule comes within a factor of {quantization.NEITHER:g}"] if names["neither"] else []
    proof = f" Nor could bytes have been proven: {because}." if waiting is False else ""
    return f"**The thesis did not hold on this rig:** {'; '.join(why)}.{proof}"


def bandwidth_sentence(found: Findings) -> str:
    """How near the steps come to what bytes over bandwidth allow, and what that says about the machine's limit."""
    rows = found.rows.to_dict("records")
    known = [row for row in rows if row["of_bandwidth_percent"] is not None]
    if not known:
        why = list(dict.fromkeys(row["percent_reason"] for row in rows if row["percent_reason"]))
        return f"Whether the steps are a matter of bytes cannot be said{': ' + '; '.join(why) if why else ''}."
    parts = _listed([f"`{row['arm']}` {row['of_bandwidth_percent']:.0f} percent" for row in known])
    text = f"Streamed bytes over the {known[0]['shared_by']}, as a share of the bandwidth measured before the run: {parts}. "
    start = found.role("base")
    first = start["of_bandwidth_percent"] if start else None
    shares = [row["of_bandwidth_percent"] for row in known]
    fewer = [row["of_bandwidth_percent"] for row in known if row["role"] != "base"]
    if any(share > 100 for share in shares):
        text += ("More than 100 percent means that part of the weights stayed in a cache of the processor between two steps, or that the time is "
                 "off. ")
    if first is None or not fewer:
        return text + "So the share of the unquantized variant cannot be compared with another."
    already = "" if first >= quantization.WAITS_PERCENT else "Already the unquantized step does not wait for memory alone. "
    if all(share < ALIKE * first for share in fewer):
        return (f"{text}{already}With fewer bits the share falls. So with fewer bits the step waits for something else than bytes: for arithmetic, "
                "for the software between operators, or for a kernel that moves its bytes more slowly. A format may also add work, such as rounding "
                "the inputs.")
    if all(ALIKE * first <= share <= first / ALIKE for share in fewer):
        if all(share >= NEAR_PERCENT for share in shares):
            return text + "It stays about the same in every format, which is what one expects of a step that waits for its bytes."
        if max(shares) < quantization.WAITS_PERCENT:
            return text + "It stays about the same, far below the bandwidth: these steps do not wait for memory alone."
        return text + "It stays about the same, short of the bandwidth: bytes are part of what these steps wait for, perhaps not all."
    return f"{text}{already}The share is not the same in all formats, and there is no one rule in it."


ALIKE, NEAR_PERCENT = 0.8, 70.0  # shares within this factor of the unquantized one's are called about the same; from this share on, near


def same_sentence(found: Findings) -> str:
    """One model, two formats: what fewer bits bought at a batch of one, at large batches, and in the flood."""
    pair, row, start = found.pair("same"), found.role("same"), found.role("base")
    if pair is None or row is None or start is None:
        return "**One model in two formats was not measured on this rig.**"
    parts = []
    if pair["one"] is not None:
        parts.append(f"a step of one sequence takes {pair['one']:.2f} times as long ({digits(row['one_ms'])} against {digits(start['one_ms'])} ms)")
    if pair["slope"] is not None:
        parts.append(f"each further sequence costs {pair['slope']:.2f} times as much")
    elif pair["largest"] is not None and pair["largest_batch"] > 1:
        parts.append(f"a step of {pair['largest_batch']:.0f} sequences takes {pair['largest']:.2f} times as long")
    if pair["flood"] is not None:
        parts.append(f"the flood gives {pair['flood']:.2f} times the tokens a second")
    if not parts:
        return f"Of `{row['arm']}` against `{start['arm']}`, the same model in fewer bits, nothing could be compared."
    return f"`{row['arm']}` against `{start['arm']}`, the same model in fewer bits: {'; '.join(parts)}."


def bigger_sentence(found: Findings) -> str:
    """A bigger model in fewer bits against a smaller one without: the exchange that the series proposes."""
    pair, row, start = found.pair("bigger"), found.role("bigger"), found.role("base")
    if pair is None or row is None or start is None:
        return "**A bigger model in fewer bits was not measured on this rig.**"
    sizes = [f"{pair[name]:.2f} times the {quantization.PREDICTORS[name]}" for name in ("parameters", "streamed") if pair[name]]
    sizes = sizes or ([f"{pair['loaded']:.2f} times the loaded bytes"] if pair["loaded"] else [])
    text = f"`{row['arm']}` has {_listed(sizes)} of `{start['arm']}`." if sizes else f"`{row['arm']}` is bigger than `{start['arm']}`."
    if pair["flood"] is None:
        return text + " Their floods cannot be compared: one was not measured or is not valid."
    text += f" In the flood it gives **{100 * pair['flood']:.0f} percent** of the tokens a second."
    if pair["parameters"] and pair["streamed"]:
        text += f" Streamed bytes alone would let one expect {100 / pair['streamed']:.0f} percent, parameters {100 / pair['parameters']:.0f}."
    return text


def relative_sentence(found: Findings) -> str:
    """Which lines of this rig the last figure can draw."""
    rows = found.rows.to_dict("records")
    start, others = found.role("base"), [row for row in rows if row["role"] != "base"]
    if start is None or not others:
        return "This rig has no pair of variants to draw beside the published one."
    doubts = [f"`{row['arm']}` ({row['line_doubt']})" for row in (start, *others) if row["line_doubt"]]
    if not doubts:
        return "This rig's lines come from the fits above."
    if start["line_doubt"] or len(doubts) == len(others):
        return f"This rig has no line in the figure, since none can be relied on for {_listed(doubts)}. Its stars are drawn where floods are valid."
    return f"No line is drawn for {_listed(doubts)}."


def room_sentence(found: Findings) -> str:
    """What the variants leave of the memory for requests."""
    known = [row for row in found.rows.to_dict("records") if row["kv_cache_tokens"] is not None]
    if len(known) < 2:
        return "Whether fewer bits left more room for requests cannot be said: fewer than two servers stated the size of their cache."
    parts = _listed([f"`{row['arm']}` {row['kv_cache_tokens']:,.0f} tokens" for row in known])
    if max(row["kv_cache_tokens"] for row in known) <= 1.01 * min(row["kv_cache_tokens"] for row in known):
        return f"The caches are equal ({parts}), so room decides nothing between these variants."
    by_hand = found.arms.first.document["identity"].get("environment", {}).get("VLLM_CPU_KVCACHE_SPACE")
    room = (f"The rig sets the memory of the cache by hand ({by_hand} GiB), so fewer bits leave no more of it here; a model's own shape decides how "
            "much of it a token takes." if by_hand else
            "Whatever the weights leave of the memory goes to the cache, and a model's own shape decides how much of it a token takes.")
    return f"The caches differ: {parts}. {room}"


def quality_intro(found: Findings) -> str:
    """How the words were checked, or that random weights have none."""
    asked = found.quality.dropna(subset="text_tokens")
    if asked.empty:
        return ("Speed is half of the bargain. The other half cannot be seen on this rig: random weights have no words to lose. Where a rig has "
                "real weights, each server is shown the same plain text and asked how likely it finds it.")
    text, beginnings = int(asked["text_tokens"].max()), int(asked["continuations"].max())
    return (f"Speed is half of the bargain. Each server with real weights was shown the same plain text of {text:,} tokens and asked how likely it "
            "finds each of them. {term}`Perplexity <perplexity>` sums that up: the number of equally good guesses among which the model is torn, on "
            f"average. Less is better. Then it continued {beginnings} short beginnings, always with the likeliest token. Two variants that part at "
            "one token go on from different texts, so only the tokens before the first difference are compared.")


def quality_limits(found: Findings) -> str:
    """What such a check can show; empty where there was none."""
    if found.quality.dropna(subset="text_tokens").empty:
        return ""
    return ("Both questions went through the server and its kernels, not through another program that reads the same folder. Read the result for "
            "what it is: a small check can show damage, and cannot show that there is none. Greedy continuations also part for reasons that are no "
            "loss: where two tokens are almost equally likely, the last bit decides.")


def limits_sentence(found: Findings) -> str:
    """What a page of these records cannot show."""
    real = {bool(row["real"]) for row in found.rows.to_dict("records")}
    text = ("Bytes and arithmetic were not varied apart from each other. The interval of a ratio is approximate. Kernels of other formats, cards "
            "and versions of the engine have their own limits.")
    if True in real:
        text += (" The embedded model was rounded plainly, without calibration; methods that look at data lose less. And \"quality\" here is one "
                 "text and a few sentences: for a decision, ask your own questions.")
    if False in real:
        text += " Weights that are random stand for bytes and not for words."
    return text


def quality_table(found: Findings) -> str:
    """Perplexity and agreement of each variant, or why there is none."""
    rows = []
    for row in found.quality.to_dict("records"):
        identical = "–" if row["identical"] is None else f"{row['identical']:.0f} of {row['continuations']:.0f}"
        agreed = "–" if row["agreed_percent"] is None else f"{row['agreed_percent']:.0f} %"
        rows.append((row["arm"], "checkpoint" if row["real"] else "random", _plain(row["perplexity"], ".2f"), _plain(row["perplexity_ratio"], ".3f"),
                     identical, agreed, row["reason"] or ""))
    heads = ["variant", "weights", "perplexity", "over unquantized", "identical continuations", "tokens before the first difference", "remark"]
    return tables.plain_table(heads, rows, "part_5_quality.csv")


def quality_sentence(found: Findings) -> str:
    """What the words cost, or that this rig cannot say."""
    asked = [row for row in found.quality.to_dict("records") if row["perplexity_ratio"] is not None]
    parts = []
    for row in asked:
        change = 100 * (row["perplexity_ratio"] - 1)
        size = "a small change" if abs(change) <= SMALL_PERCENT else "a change to notice"
        parts.append(f"In `{row['arm']}` the {{term}}`perplexity` of the fixed text is {change:+.1f} percent off the unquantized one's, {size}; "
                     f"{row['identical']:.0f} of {row['continuations']:.0f} continuations are the same in every token.")
    absent = [f"`{row['arm']}`" for row in found.quality.to_dict("records") if not row["real"]]
    if absent:
        parts.append(f"**No quality check for {_listed(absent)}:** the weights are random. What fewer bits do to such a model's words was not "
                     "measured here, and cannot be.")
    if not asked:
        parts.insert(0, "**No pair of real weights could be compared in words on this rig.**")
    return " ".join(parts)


def trace_words(found: Findings) -> str:
    """The traces of all variants in words, one paragraph each."""
    paragraphs = []
    for arm, path in quantization.traced(found.arms).items():
        try:
            paragraphs.append(f"`{arm}`: " + (trace.words(path) if path is not None else "no trace was recorded."))
        except WallError as problem:
            paragraphs.append(f"`{arm}`: the trace cannot be read ({problem.message}).")
    return "\n\n".join(paragraphs) or "No variant was measured, so there is no trace."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


def _unit(value: float | None, unit: str) -> str:
    return "not known" if value is None else f"{digits(value)} {unit}"


def _plain(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _ranged(value: float | None, low: float | None, high: float | None, reason: str | None) -> str:
    if value is None:
        return f"no fit: {reason}"
    return digits(value) + (f" ({digits(low) if low >= 0 else '< 0'} to {digits(high)})" if low is not None else "")
