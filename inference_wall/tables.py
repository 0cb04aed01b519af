"""The sweep as a table: HTML for the page, CSV for the reader.

What:   `sweep_table` gives one row an offered rate, with the sample size beside the percentiles and a dash that says
        why where a value is withheld; `to_csv` gives every row and column of the frame.
Why:    a figure shows the shape, a table the numbers; both say where a number may not be believed.
Use:    display(HTML(sweep_table(records.points_frame(run), caption="The sweep")))
Not:    the look of a table on the page (`site.tables` and wall.css).
"""

from __future__ import annotations

import html
import math
from typing import Any

import pandas as pd

from .chart import by_rate, digits, measured, withheld

# (group, [(header, column, decimals)]); decimals None: as `chart.digits`
GROUPS = (
    ("requests", [("n", "completed", 0), ("failed", "failed", 0)]),
    ("completed, requests/s", [("steady", "steady_req_s", None), ("whole point", "completed_req_s", None)]),
    ("TTFT, ms", [("p50", "ttft_p50_ms", None), ("p90", "ttft_p90_ms", None), ("p99", "ttft_p99_ms", None)]),
    ("ITL, ms", [("p50", "itl_p50_ms", None), ("p99", "itl_p99_ms", None)]),
    ("worst gap, ms", [("p50", "stall_p50_ms", None), ("max", "stall_max_ms", None)]),
    ("E2E, ms", [("p50", "e2e_p50_ms", None), ("p90", "e2e_p90_ms", None), ("p99", "e2e_p99_ms", None)]),
    ("running", [("mean", "running_mean", None), ("max", "running_max", 0)]),
)


def sweep_table(frame: pd.DataFrame, caption: str = "", csv: str = "sweep.csv") -> str:
    """An HTML table (class wall-table) of one rig's sweep, without the cold pass: one row an offered rate.

    Several repeats give their median, with their range in the cell's title. Each number carries itself unrounded in
    `data-value`; an empty cell is a dash whose title is the reason. A column that no row has a value for is left out.
    """
    frame = measured(frame)
    shown = [(group, [(head, column, decimals) for head, column, decimals in columns if column in frame
                      and (frame[column].notna().any() or _is_withheld(frame, column))]) for group, columns in GROUPS]
    shown = [(group, columns) for group, columns in shown if columns]
    curves = {column: by_rate(frame, column).set_index("request_rate")
              for _, columns in shown for _, column, _ in columns}
    groups = "".join(f'<th scope="colgroup" colspan="{len(columns)}">{group}</th>' for group, columns in shown)
    heads = "".join(f'<th scope="col">{head}</th>' for _, columns in shown for head, _, _ in columns)
    rows = []
    for rate, points in frame.groupby("request_rate", sort=True):
        cells = "".join(_cell(points, curves[column], rate, column, decimals)
                        for _, columns in shown for _, column, decimals in columns)
        name = "all at once" if math.isinf(rate) else f"{rate:g}"
        value = "inf" if math.isinf(rate) else f"{rate:g}"
        rows.append(f'<tr><th scope="row" data-value="{value}">{name}</th>{cells}{_validity(points)}</tr>')
    return (
        f'<table class="wall-table" data-csv="{html.escape(csv, quote=True)}">'
        + (f"<caption>{html.escape(caption)}</caption>" if caption else "")
        + f'<thead><tr><td></td>{groups}<td></td></tr><tr><th scope="col">offered, requests/s</th>{heads}'
        f'<th scope="col">valid</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def to_csv(frame: pd.DataFrame) -> str:
    """The frame as CSV: every point, six significant digits, `inf` for a flood, reasons joined by "; ", null empty."""
    flat = frame.assign(reasons=frame["reasons"].map(lambda reasons: "; ".join(reasons)))
    return flat.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def _is_withheld(frame: pd.DataFrame, column: str) -> bool:
    latency, _, statistic = column.removesuffix("_ms").rpartition("_")
    return column.endswith("_ms") and withheld(frame, latency).get(statistic, "").startswith("n =")


def _cell(points: pd.DataFrame, curve: pd.DataFrame, rate: float, column: str, decimals: int | None) -> str:
    if rate not in curve.index:
        latency, _, statistic = column.removesuffix("_ms").rpartition("_")
        reason = withheld(points, latency).get(statistic, "not known") if column.endswith("_ms") else "not known"
        return f'<td title="{html.escape(reason, quote=True)}">–</td>'
    found = curve.loc[rate]
    value, title = float(found["value"]), ""
    if found["high"] > found["low"]:
        title = f' title="{_number(found["low"], decimals)} to {_number(found["high"], decimals)} over the repeats"'
    return f'<td data-value="{value:.6g}"{title}>{_number(value, decimals)}</td>'


def _number(value: float, decimals: int | None) -> str:
    return digits(value) if decimals is None else f"{value:,.{decimals}f}"


def _validity(points: pd.DataFrame) -> str:
    marks: list[Any] = [None if pd.isna(valid) else bool(valid) for valid in points["valid"]]
    reasons = sorted({reason for reasons in points["reasons"] for reason in reasons})
    title = html.escape("; ".join(reasons), quote=True)
    if all(mark is None for mark in marks):
        return f'<td data-value="" title="{title or "not checked"}">–</td>'
    if all(marks):
        return '<td data-value="yes">✓</td>'
    share = "" if len(marks) == 1 else f" {marks.count(False)} of {len(marks)}"
    return f'<td data-value="no: {title}" title="{title}">✗{share} {html.escape(", ".join(reasons))}</td>'


def setup_table(run: Any, numbers: dict[str, dict[str, Any]]) -> str:
    """What ran, as an HTML table: machine, model, engine, limits, and what the server said it does."""
    document = run.document
    start = document["starts"][-1] if document["starts"] else {}
    said = start.get("server", {}).get("said", {})
    host, cards = start.get("host", {}), start.get("gpus") or []
    machine = ", ".join(card["name"] for card in cards) or f"{host.get('cpu', {}).get('model', 'unknown processor')}, {host.get('cores', '?')} cores"
    weights = {"checkpoint": "real weights", "random": "random weights of the exact shape: right bytes, meaningless words"}
    budget = said.get("max_num_batched_tokens")
    rows = [
        ("rig", f"{document['rig']['name']}: {document['rig']['title']}"),
        ("machine", machine),
        ("model", f"{document['model']['name']}, {document['model'].get('dtype', 'dtype of the checkpoint')}, "
                  f"{weights.get(document['model'].get('weights'), 'weights unknown')}"),
        ("engine", f"vLLM {document['engine']['version']}"
         + ("" if document["engine"]["table_exact"] else " (flags and metrics not checked for this version)")),
        ("most requests in a step", f"{_said(numbers['max_num_seqs'])} requests"),
        ("longest request", f"{_said(numbers['max_model_len'])} tokens"),
        ("most tokens in a step", "not said" if budget is None else f"{budget:,} tokens"),
        ("chunked prefill, prefix caching", f"{_on(said.get('chunked_prefill'))}, {_on(said.get('prefix_caching'))}"),
        ("start to first answer", numbers["ready_s"]["reason"] or f"{numbers['ready_s']['value']:.0f} s"),
    ]
    return plain_table(["", "this run"], rows, f"{document['post']}_setup.csv")


def knee_table(found: dict[str, Any]) -> str:
    """The verdict at each offered rate with its reason, as an HTML table."""
    rows = [(f"{rate['request_rate']:g}", rate["verdict"], _met(rate, found["slo"])) for rate in found["rates"]]
    return plain_table(["offered, requests/s", "service level", "because"], rows, "part_1_knee.csv")


def _met(rate: dict[str, Any], slo: dict[str, Any]) -> str:
    """Why a rate got its verdict; one that several repeats met, by the worst of them."""
    if rate["verdict"] != "meets" or rate["repeats"] < 2 or rate["ttft_ms"] is None:
        return rate["reason"]
    share = f", completed at least {rate['completed_ratio']:.0%}" if rate["completed_ratio"] is not None else ""
    return f"p{slo['ttft_percentile']:g} TTFT at most {rate['ttft_ms']:,.0f} ms{share} (the worst of {rate['repeats']} repeats)"


def plain_table(heads: list[str], rows: list[tuple[str, ...]], csv: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    body = ""
    for first, *rest in rows:
        cells = "".join(f'<td class="text">{html.escape(str(cell))}</td>' for cell in rest)
        body += f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>'
    return f'<table class="wall-table" data-csv="{html.escape(csv, quote=True)}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _said(entry: dict[str, Any]) -> str:
    return entry["reason"] if entry["value"] is None else f"{entry['value']:,}"


def _on(value: bool | None) -> str:
    return "not said" if value is None else "on" if value else "off"
