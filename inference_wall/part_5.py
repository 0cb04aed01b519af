"""What Part 5, quantization, says of its records.

What:   `look` reads a set once into tables and fits; `numbers` and `published` name the numbers of the post; `published_frame` has the author's
        two variants with the columns of `quantization.variants`.
Why:    a page and its named numbers must come from the same look at the records, and must survive a refused arm or a missing point.
Use:    found = look(arms); numbers(arms)["headline"]; published()["awq_fixed_ratio"]
Not:    the analysis (`quantization`), figures (`quantization_figures`), sentences and tables (`quantization_words`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pandas as pd

from . import cliff, headline, quantization
from . import published as author
from .arms import ArmSet
from .cliff import StepFit
from .published_numbers import weight_counts

GIB = quantization.GIB
AWQ_MODEL = "QuantTrio/Qwen3.5-9B-AWQ"
PARTS_CSV, RATIOS_CSV, STEPS_CSV = "a10g/part_5/quantization.csv", "a10g/part_5/quantization_ratios.csv", "a10g/part_1/decode_step.csv"
# Where the 9B's text part differs from that of the 4B (config.json of Qwen/Qwen3.5-9B, text_config). The checkpoint is not said to quantize
# more than the large matrices of each layer's second half (MLP): 4 bits, and for each group of 128 a 16-bit scale and a 4-bit zero point.
SHAPE_9B = {"hidden": 4096, "intermediate": 12288, "tied_embeddings": False}
AWQ_BITS, AWQ_GROUP, AWQ_EXTRA_BITS = 4, 128, 16 + 4


@dataclass(frozen=True)
class Findings:
    """One set of records, looked at once; see `quantization` for the columns. The roles are rows as dicts, or null."""

    arms: ArmSet
    rows: pd.DataFrame
    pairs: pd.DataFrame
    fits: dict[str, StepFit]
    steps: pd.DataFrame
    quality: pd.DataFrame

    @property
    def rig(self) -> str:
        return self.arms.rig

    def role(self, name: str) -> dict[str, Any] | None:
        """The variant with the role `base`, `same` or `bigger`."""
        return quantization.by_role(self.rows, name)

    def pair(self, role: str) -> dict[str, Any] | None:
        """The comparison of that role's variant with the base one."""
        return quantization.by_role(self.pairs, role)

    @property
    def verdict(self) -> tuple[str, str]:
        return quantization.verdict(self.pairs)


def look(arms: ArmSet) -> Findings:
    """Tables, fits and words of a set. Never raises for a missing or refused arm; what is not there is null or an empty table."""
    rows = quantization.variants(arms)
    return Findings(arms, rows, quantization.comparisons(rows), quantization.fits(arms), cliff.steps_frame(arms), quantization.quality(arms))


# --- named numbers ----------------------------------------------------------------------------------------------------

ROLES = ("base", "same", "bigger")
ABSENT = {"base": "the unquantized variant was not measured", "same": "no variant of the same model with fewer bits was measured",
          "bigger": "no bigger model with fewer bits was measured"}
ROW_UNITS = {"loaded_gb": "GB", "streamed_gb": "GB", "bits": "bits", "kv_cache_tokens": "tokens", "full_requests": "requests", "fixed_ms": "ms",
             "slope_ms": "ms", "stream_ms": "ms", "bandwidth_gb_s": "GB/s", "bandwidth_threads": "threads", "effective_gb_s": "GB/s",
             "of_bandwidth_percent": "%", "one_ms": "ms", "largest_ms": "ms", "largest_batch": "sequences", "shared_ms": "ms",
             "flood_tok_s": "tok/s", "flood_req_s": "req/s", "flood_running": "requests", "crossover": "sequences"}
PAIR_UNITS = {"streamed": "x", "loaded": "x", "parameters": "x", "measured": "x", "low": "x", "high": "x", "slope": "x", "one": "x",
              "largest": "x", "flood": "x"}


def numbers(arms: ArmSet) -> dict[str, dict[str, Any]]:
    """All named numbers of a set of Part 5, by role (`base_`, `same_`, `bigger_`) and by arm (`arm_<name>_`). Times in ms, bytes in 10^9.

    `<role>_ratio_<what>`: over the base variant; `streamed`, `loaded`, `parameters` are predictions, `measured` is the ratio of fixed terms (of steps
    of one sequence where a line cannot be relied on: `by` says which).
    """
    found = look(arms)
    book = headline.Book(arms.first if arms.testable else next(iter(arms.runs.values())))
    headline.setup(book)
    stands_for_all = book.run
    for role in ROLES:
        row = found.role(role)
        book.run = arms[row["arm"]] if row else stands_for_all  # each number names the record that it is from
        _variant(book, f"{role}_", row, ABSENT[role])
        if role != "base":
            _pair(book, f"{role}_ratio_", found.pair(role), ABSENT[role])
            _words(book, f"{role}_", found, role)
    for row in found.rows.to_dict("records"):
        book.run = arms[row["arm"]]
        _variant(book, f"arm_{row['arm']}_", row, "")
    book.run = stands_for_all
    _load(book, found)
    first = found.quality[found.quality["arm"] == arms.names[0]].to_dict("records")
    book.put("base_perplexity", first[0]["perplexity"] if first else None, "", n=first[0]["text_tokens"] if first else None,
             reason=(first[0]["reason"] if first else None) or ABSENT["base"])
    book.put("variants", len(arms.names), "variants")
    book.put("variants_measured", len(arms.testable), "variants")
    book.put("variants_refused", len(arms.refused), "variants")
    _shape(book, found)
    return book.entries


def _variant(book: headline.Book, prefix: str, row: dict[str, Any] | None, absent: str) -> None:
    for name in ("arm", "model", "dtype", "kernel", "method"):
        book.put(prefix + name, row[name] if row else None, reason=absent if not row else "the server's log did not say")
    book.put(prefix + "parameters_m", row["parameters"] / 1e6 if row and row["parameters"] else None, "million",
             reason=absent if not row else "the record does not know the model's files")
    for name, unit in ROW_UNITS.items():
        book.put(prefix + name, row[name] if row else None, unit, reason=absent if not row else _missing(row, name))


def _missing(row: dict[str, Any], name: str) -> str:
    """Why a number of a variant is null."""
    doubt = row["line_doubt"] if name in ("fixed_ms", "slope_ms", "crossover") else None
    share = row["percent_reason"] if name in ("stream_ms", "effective_gb_s", "of_bandwidth_percent") else None
    unseen = row["bytes_reason"] if name in ("streamed_gb", "loaded_gb", "bits") else None
    return doubt or share or unseen or "not recorded"


def _pair(book: headline.Book, prefix: str, pair: dict[str, Any] | None, absent: str) -> None:
    why = absent if not pair else pair["reason"] or "one of its two numbers was not measured"
    for name, unit in PAIR_UNITS.items():
        doubt = pair["line_doubt"] if pair and name == "slope" else None
        book.put(prefix + name, pair[name] if pair else None, unit, reason=doubt or why)
    book.put(prefix + "by", pair["measured_by"] if pair else None, reason=why)
    book.put(prefix + "flood_percent", 100 * pair["flood"] if pair and pair["flood"] else None, "%",
             reason=absent if not pair else "one of the two floods was not measured or is not valid")
    book.put(prefix + "nearest", " and ".join(pair["nearest"]) if pair and pair["nearest"] else None, reason=why)


def _words(book: headline.Book, prefix: str, found: Findings, role: str) -> None:
    row, said = found.role(role), None
    if row:
        said = found.quality[found.quality["arm"] == row["arm"]].iloc[0].to_dict()
    why = (said or {}).get("reason") or (ABSENT[role] if not row else "the unquantized variant was not asked")
    for name, unit in (("perplexity", ""), ("perplexity_ratio", "x"), ("identical", "continuations"), ("agreed_percent", "%")):
        book.put(prefix + name, said[name] if said else None, unit, n=said["text_tokens"] if said and "perplexity" in name else None, reason=why)
    change = said["perplexity_ratio"] if said else None
    book.put(prefix + "perplexity_change_percent", 100 * (change - 1) if change else None, "%", reason=why)


def _load(book: headline.Book, found: Findings) -> None:
    """What was done to each variant: lengths and counts of the loads."""
    frame = found.arms.frame()
    book.put("points", len(frame), "points")  # of all arms: `headline.setup` counts those of one
    book.put("invalid_points", int((~frame["valid"].astype(bool)).sum()) if len(frame) else 0, "points")
    for load in ("steps", "flood"):
        rows = frame[(frame["load"] == load) & (frame["pass"] == "measured")] if len(frame) else frame
        for name, unit in (("input_len", "tokens"), ("output_len", "tokens"), ("num_prompts", "requests")):
            book.put(f"{load}_{name}", int(rows[name].max()) if len(rows) else None, unit, reason=f"no {load} load was measured")
    batches = sorted(set(found.steps["batch"]))
    book.put("batches", cliff.listed(batches) if batches else None, reason="no step time was measured")
    said = found.quality.dropna(subset="text_tokens")
    book.put("quality_text_tokens", int(said["text_tokens"].max()) if len(said) else None, "tokens", reason="no variant was asked")
    book.put("quality_continuations", int(said["continuations"].max()) if len(said) else None, "continuations", reason="no variant was asked")
    book.put("quality_continuation_tokens", int(said["continuation_tokens"].max()) if len(said) else None, "tokens", reason="no variant was asked")


def _shape(book: headline.Book, found: Findings) -> None:
    """The four numbers that every post must give. The headline: the flood of the bigger, quantized model over that of the smaller one; where a rig
    has no such pair, the step of one sequence of the same model in fewer bits."""
    bigger, same = found.pair("bigger"), found.pair("same")
    text = _headline(bigger, "the small model") if bigger else _same_headline(same) if same else None
    book.put("headline", text, reason="one of the two numbers was not measured or is not valid" if bigger or same else ABSENT["bigger"])
    book.put("headline_published", _headline(published_pairs().iloc[0].to_dict(), "the 4B"))
    verdict, because = found.verdict
    book.put("shape", verdict)
    book.put("shape_because", because)


def _headline(pair: dict[str, Any], small: str) -> str | None:
    """What the bigger model in fewer bits keeps of the smaller one's rate, and how much bigger it is; null without two valid floods."""
    if pair["flood"] is None:
        return None
    size = next((f" at {pair[name]:.3g} x the {quantization.PREDICTORS[name]}" for name in ("parameters", "loaded") if pair[name]), "")
    return f"{100 * pair['flood']:.0f} % of {small}'s tokens/s{size}"


def _same_headline(pair: dict[str, Any]) -> str | None:
    """What fewer bits did to a step of the same model; null without its step time."""
    if pair["one"] is None:
        return None
    return f"a step takes {pair['one']:.2f} x as long" + (f" at {pair['streamed']:.2f} x the bytes" if pair["streamed"] else "") + " (same model)"


# --- the author's figures ---------------------------------------------------------------------------------------------


@cache
def _streamed_bytes() -> dict[str, dict[str, float]]:
    """Weights of the two text models from their shapes: streamed, loaded (text part), and the parameters."""
    small = author.model_shape()
    counts, width = weight_counts(small), small["bytes_per_weight"]
    found = {author.MODEL: {"streamed": width * (counts["body"] + counts["head"]), "text": width * (counts["body"] + counts["head"])}}
    shape = small | SHAPE_9B
    counts = weight_counts(shape)
    quantized = shape["layers"] * 3 * shape["hidden"] * shape["intermediate"]
    body = quantized * (AWQ_BITS + AWQ_EXTRA_BITS / AWQ_GROUP) / 8 + width * (counts["body"] - quantized)
    # The table that is looked up and the output head are two tables here: both are loaded, one is streamed.
    return found | {AWQ_MODEL: {"streamed": body + width * counts["head"], "text": body + 2 * width * counts["head"]}}


def published_frame() -> pd.DataFrame:
    """The author's two variants on the A10G, one row each, with the columns of `quantization.variants`. Intervals were not published."""
    parts = author.table(PARTS_CSV)
    ratio = float(author.table(RATIOS_CSV).set_index("metric").loc["parameter_ratio_9b_over_4b", "value"])
    bandwidth = float(author.rig_facts()["hardware"]["copy_bandwidth_measured"]["value"])
    rows = []
    for model, arm, role in ((author.MODEL, "4B, 16 bits", "base"), (AWQ_MODEL, "9B, 4 bits", "bigger")):
        printed = parts[(parts["model"] == model) & parts["decode_fixed_ms"].notna()].iloc[0]
        fixed, slope = float(printed["decode_fixed_ms"]), float(printed["decode_per_seq_us"]) / 1e3
        streamed = _streamed_bytes()[model]["streamed"] / 1e9
        rows.append({
            "arm": arm, "role": role, "model": model, "dtype": "float16", "real": True, "kernel": None if role == "base" else "awq_marlin",
            "loaded_gb": float(printed["weights_gib"]) * GIB / 1e9, "streamed_gb": streamed, "parameters": 1.0 if role == "base" else ratio,
            "kv_cache_tokens": float(printed["kv_tokens_reported"]), "full_requests": float(printed["max_concurrency_x"]), "fixed_ms": fixed,
            "shared_ms": fixed, "shared_by": quantization.FIXED, "slope_ms": slope, "crossover": fixed / slope,
            "bandwidth_gb_s": bandwidth, "stream_ms": streamed / bandwidth * 1e3,
            "effective_gb_s": streamed / fixed * 1e3, "of_bandwidth_percent": 100 * streamed / fixed * 1e3 / bandwidth,
            "flood_tok_s": float(printed["ceiling_output_tok_s"]), "flood_req_s": float(printed["ceiling_req_s"]), "flood_valid": True,
            "flood_kind": "whole point", "formats": {}, "batches": []})
    frame = pd.DataFrame(rows, columns=quantization.COLUMNS).astype(object)
    return frame.where(frame.notna(), None)


def published_pairs() -> pd.DataFrame:
    """The author's comparison, in the columns of `quantization.comparisons`. `parameters` is the ratio as stated."""
    return quantization.comparisons(published_frame())


def published() -> dict[str, dict[str, Any]]:
    """The author's numbers that this post names, keys without prefix; each says where it was printed or how it was computed here."""
    entries: dict[str, dict[str, Any]] = {}

    def put(name: str, value: Any, unit: str, where: str) -> None:
        entries[name] = author.entry(value, unit, where)

    def derive(name: str, value: Any, unit: str, how: str) -> None:
        put(name, value, unit, f"computed here: {how}")

    parts, ratios = author.table(PARTS_CSV), author.table(RATIOS_CSV).set_index("metric")
    both = published_frame().set_index("role")
    shape = "weights of all layers and output head, from the shape"
    for prefix, model, role in (("fp16_", author.MODEL, "base"), ("awq_", AWQ_MODEL, "bigger")):
        printed = parts[(parts["model"] == model) & parts["decode_fixed_ms"].notna()].iloc[0]
        for name, column, unit in (("loaded_gib", "weights_gib", "GiB"), ("pool_gib", "kv_pool_gib", "GiB"),
                                   ("kv_tokens", "kv_tokens_reported", "tokens"),
                                   ("full_requests", "max_concurrency_x", "requests"), ("fixed_ms", "decode_fixed_ms", "ms"),
                                   ("slope_us", "decode_per_seq_us", "us"), ("flood_req_s", "ceiling_req_s", "req/s"),
                                   ("flood_tok_s", "ceiling_output_tok_s", "tok/s")):
            put(prefix + name, float(printed[column]), unit, printed["source"])
        row = both.loc[role]
        assumed = shape + ("" if role == "base" else "; only the MLP in 4 bits, which is our assumption")
        derive(prefix + "streamed_gb", row["streamed_gb"], "GB", assumed)
        derive(prefix + "text_gib", _streamed_bytes()[model]["text"] / GIB, "GiB", assumed + "; and the table that is looked up")
        derive(prefix + "stream_ms", row["stream_ms"], "ms", "streamed bytes over measured copy bandwidth")
        derive(prefix + "of_bandwidth_percent", row["of_bandwidth_percent"], "%", "streamed bytes over the fixed term, over measured copy bandwidth")
    put("awq_model", AWQ_MODEL, "", parts[parts["model"] == AWQ_MODEL].iloc[0]["source"])
    for name, metric, unit in (("awq_parameter_ratio", "parameter_ratio_9b_over_4b", "x"), ("awq_stated_share", "seed_stated_ratio", "fraction"),
                               ("awq_share_by_bytes", "byte_ratio_prediction", "fraction"),
                               ("awq_share_by_parameters", "parameter_ratio_prediction", "fraction")):
        put(name, float(ratios.loc[metric, "value"]), unit, ratios.loc[metric, "source"])
    pair = published_pairs().iloc[0]
    derive("awq_loaded_ratio", pair["loaded"], "x", "loaded GiB, 9B over 4B")
    derive("awq_streamed_ratio", pair["streamed"], "x", "streamed bytes from the shapes, 9B over 4B")
    derive("awq_fixed_ratio", pair["measured"], "x", "published fixed terms, 9B over 4B")
    derive("awq_slope_ratio", pair["slope"], "x", "published terms for each sequence, 9B over 4B")
    derive("awq_flood_percent", 100 * pair["flood"], "%", "tokens per second of the floods, 9B over 4B")
    derive("awq_nearest", " and ".join(pair["nearest"]), "", "the prediction nearest to the ratio of the fixed terms")
    derive("awq_lost_percent", 100 * (1 - pair["flood"]), "%", "one less the ratio of the floods")
    return entries


def published_steps() -> pd.DataFrame:
    """The author's step times of the unquantized 4B: batch, step_ms, tok_s (batch over step). Those of the 9B were not published."""
    rows = author.table(STEPS_CSV)
    rows = rows[(rows["record_type"] == "step_point") & (rows["model"] == author.MODEL) & (rows["metric"] == "step_ms")]
    frame = pd.DataFrame({"batch": rows["batch"].astype(int), "step_ms": rows["value"].astype(float)})
    return frame.assign(tok_s=1e3 * frame["batch"] / frame["step_ms"]).reset_index(drop=True)

