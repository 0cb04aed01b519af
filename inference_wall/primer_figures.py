"""The primer's two figures: the bytes of a step as bars, and a row of real steps as a picture.

What:   `bytes_bars` draws `bytes_per_step.frame`. `step_picture` draws about twenty steps of a measured point: who got a token in
        which step, and who was still waiting for the prompt to be read. `sources` finds records to draw.
Why:    a step is a picture before it is a number, and it should be a picture of something that happened.
Use:    for name, source in sources("auto").items(): step_picture(*source.frames())
Not:    steps as the engine itself records them (a trace does that); what the client sees is when tokens arrive. All waiting
        before a first token is one bar here, in the queue or in a prompt's step: a client cannot tell them apart.

Tokens of one step are sent together and arrive together. So arrivals belong to one step when they lie within half a median gap of
its first one, and no request gets two chunks in one step.
"""

from __future__ import annotations

import math
import os
import string
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from . import arms, chart, records
from .chart import BAND, BLUE, GREEN, OCHRE, ORANGE, PURPLE, digits, set_words
from .percentiles import percentile, summarise
from .post import COMMITTED_VARIABLE
from .records import Run
from .rigs import pick_rig
from .samples import UNIT_S

POSTS = ("part_1", "part_3")  # whose records can be drawn
STEPS = 20  # in a picture: enough to see a rhythm, few enough to see each mark on a phone
ROWS = 12  # requests in a picture
PARTS = (("weights_gb", "weights, once for all", BLUE), ("state_gb", "recurrent state, each its own", PURPLE),
         ("cache_gb", "KV cache, each its own", GREEN))  # fmt: skip
MOST_CANDIDATES = 1_000  # windows that are compared: a long point need not be searched step by step
MS = UNIT_S * 1e3  # one unit of a record's time, in milliseconds


def bytes_bars(rows: pd.DataFrame) -> go.Figure:
    """Stacked bars of `bytes_per_step.frame` (one model, one context): GB moved in one step against the batch."""
    figure = go.Figure()
    names = [f"{batch:,}" for batch in rows["batch"]]
    for column, name, paint in PARTS:
        if not rows[column].any():
            continue  # a model without linear-attention layers has no state
        figure.add_bar(x=names, y=[float(f"{value:.6g}") for value in rows[column]], name=name, marker_color=paint,
                       customdata=[[f"{100 * value:.1f} %"] for value in rows[column] / rows["total_gb"]],
                       hovertemplate=f"{name}<br>%{{y:,.4~r}} GB, %{{customdata[0]}} of the step<br>%{{x}} requests<extra></extra>")
    figure.add_scatter(x=names, y=[float(f"{value:.6g}") for value in rows["total_gb"]], mode="text", name="together", showlegend=False,
                       text=[f"{digits(value)} GB" for value in rows["total_gb"]], textposition="top center", hoverinfo="skip", cliponaxis=False)
    figure.layout.template = None  # the site lays its own over the figure
    figure.update_layout(barmode="stack", bargap=0.35, height=400, hovermode="closest", legend={**chart.LEGEND, "traceorder": "normal"},
                         margin={"t": 24, "r": 12, "b": 100, "l": 56}, meta={"columns": ["share of the step"]})
    figure.update_xaxes(type="category", title={"text": "requests in the step", "standoff": 8}, automargin=True)
    figure.update_yaxes(title={"text": "GB moved in one step", "standoff": 6}, automargin=True, rangemode="tozero",
                        range=[0, 1.12 * float(rows["total_gb"].max())])
    first = rows.iloc[0]
    words = [f"Bytes that one step of {first['model']} moves when each request has {first['context']:,} tokens behind it"]
    words += [f"{row.batch:,} {'request' if row.batch == 1 else 'requests'}: {digits(row.total_gb)} GB, of which weights "
              f"{digits(row.weights_gb)}, recurrent state {digits(row.state_gb)}, KV cache {digits(row.cache_gb)}" for row in rows.itertuples()]
    return set_words(figure, words, "bytes_per_step.csv")


# --- steps out of arrivals ----------------------------------------------------------------------------------------


def engine_steps(chunks: pd.DataFrame) -> pd.DataFrame:
    """The chunks of one point (columns request, time, tokens) in order of time, with `step`, counted from 0.

    The rule is in the module's header. Where no request has two chunks there is no gap, and all that arrived counts as one step
    a distinct time.
    """
    ordered = chunks[chunks["tokens"] > 0].sort_values(["time", "request"], kind="stable", ignore_index=True)
    gaps = ordered.groupby("request")["time"].diff().dropna()
    together = percentile(gaps, 50) / 2 if len(gaps) else 0.0
    step, begun, seen, numbers = -1, None, set(), []
    for time, request in zip(ordered["time"], ordered["request"], strict=True):
        if begun is None or time - begun > together or request in seen:
            step, begun, seen = step + 1, time, set()
        seen.add(request)
        numbers.append(step)
    return ordered.assign(step=pd.Series(numbers, dtype="int64"))


@dataclass(frozen=True)
class Window:
    """A stretch of steps. Times are in record units; `durations_ms` only where somebody was answered throughout."""

    tokens: pd.DataFrame  # rows of `engine_steps` in the window, of every request
    zero: float  # where the picture begins
    starts: list[float]  # when each step began, as far as a client can tell: at the end of the one before
    ends: list[float]  # when its last token arrived
    sent: dict[int, float]  # of each request with a token
    newcomers: dict[int, int]  # request -> step of its first token, if it lies in the window
    durations_ms: dict[int, float]  # step -> from the step before to this one
    mixed: list[int]  # steps that brought a first token while others were being answered


def window(requests: pd.DataFrame, chunks: pd.DataFrame, steps: int = STEPS) -> Window:
    """The most telling `steps` steps of a point: prompts read while others are answered, several rows, nobody's pause.

    ValueError where no token arrived. Frames as in docs/decisions/0004.
    """
    every = engine_steps(chunks)
    if every.empty:
        raise ValueError("no token arrived: there is no step to draw")
    count = int(every["step"].max()) + 1
    begins = every.groupby("step")["time"].min().tolist()
    ends = every.groupby("step")["time"].max().tolist()
    rows = every.groupby("step")["request"].agg(set).tolist()
    first = every.groupby("request")["step"].min()
    # A step follows the one before when some request has a token in both; else the server may have had nothing to do.
    follows = [False] + [bool(rows[step] & rows[step - 1]) for step in range(1, count)]
    mixed = {step for step in first.tolist() if follows[step]}

    def score(at: int) -> tuple[float, float]:
        inside = range(at, min(at + steps, count))
        people = set().union(*(rows[step] for step in inside))
        prompts = sum(1 for step in inside if step in mixed and step - at >= 2 and at + steps - step > 2)
        pauses = sum(1 for step in inside if step > at and not follows[step])
        crowd = sum(len(rows[step]) for step in inside) / len(inside)
        return min(prompts, 3) - 2 * pauses - max(0, len(people) - ROWS) / 4 + min(crowd, 5) / 5, -at

    candidates = max(1, count - steps + 1)
    at = max(range(0, candidates, math.ceil(candidates / MOST_CANDIDATES)), key=score)
    inside = range(at, min(at + steps, count))
    tokens = every[every["step"].between(inside[0], inside[-1])]
    due = requests.set_index("request")["sent"]
    sent = {int(request): float(due[request]) for request in tokens["request"].unique() if request in due.index and pd.notna(due[request])}
    newcomers = {int(request): int(step) for request, step in first.items() if step in inside}
    # Before the first step lies the one before it, or, at a point's beginning, the sending of the requests.
    zero = ends[at - 1] if at and follows[at] else min([sent[request] for request in newcomers if request in sent], default=begins[at])
    starts = [zero, *(ends[step - 1] if follows[step] else begins[step] for step in inside[1:])]
    durations = {step: (begins[step] - begins[step - 1]) * MS for step in inside if follows[step]}
    return Window(tokens, zero, starts, [ends[step] for step in inside], sent, newcomers, durations,
                  sorted(mixed & set(inside)))  # fmt: skip


def step_picture(requests: pd.DataFrame, chunks: pd.DataFrame, steps: int = STEPS, what: str = "one point") -> go.Figure:
    """About `steps` steps of one point: a row a request, a mark a token, a bar from sending to the first token.

    Shaded stripes are steps. At most `ROWS` requests, those first whose prompt is read in the picture; `what` names the point
    in the text alternative.
    """
    seen = window(requests, chunks, steps)
    base = int(seen.tokens["step"].min())
    everybody = [int(request) for request in seen.tokens["request"].unique()]
    kept = sorted(everybody, key=lambda request: (request not in seen.newcomers, seen.sent.get(request, 0.0), request))[:ROWS]
    kept = sorted(kept, key=lambda request: (seen.sent.get(request, 0.0), request))
    names = {request: string.ascii_uppercase[place] for place, request in enumerate(kept)}

    def at(time: float) -> float:
        return round((time - seen.zero) * MS, 3)

    figure = go.Figure()
    waited = [request for request in kept if request in seen.newcomers and request in seen.sent]
    if waited:
        first = {request: seen.tokens.loc[seen.tokens["request"] == request, "time"].min() for request in waited}
        begin = [max(at(seen.sent[request]), 0.0) for request in waited]
        figure.add_bar(
            orientation="h", name="sent, no token yet", marker_color=OCHRE, marker_line_width=0, width=0.36, opacity=0.75,
            y=[names[request] for request in waited], base=begin, x=[round(at(first[request]) - start, 3) for request, start in
                                                                    zip(waited, begin, strict=True)],
            customdata=[[request, "TTFT", digits((first[request] - seen.sent[request]) * MS)] for request in waited],
            hovertemplate="request %{y}: first token %{customdata[2]} ms after it was sent<extra></extra>")  # fmt: skip
    is_first = seen.tokens["request"].map(seen.newcomers) == seen.tokens["step"]
    for rows, name, symbol, paint in ((seen.tokens[~is_first], "a token", "square", BLUE),
                                      (seen.tokens[is_first], "first token", "diamond", ORANGE)):  # fmt: skip
        rows = rows[rows["request"].isin(names)]
        if len(rows):
            figure.add_scatter(
                x=[at(time) for time in rows["time"]], y=[names[request] for request in rows["request"]], mode="markers", name=name,
                marker={"symbol": symbol, "size": 7 if symbol == "square" else 11, "color": paint},
                customdata=[[int(row.request), int(row.step) - base + 1, int(row.tokens)] for row in rows.itertuples()],
                hovertemplate=f"request %{{y}}, {name}<br>step %{{customdata[1]}} of the picture, at %{{x:,.4~r}} ms<br>"
                "tokens in it: %{customdata[2]}<extra></extra>")  # fmt: skip
    for number, (start, end) in enumerate(zip(seen.starts, seen.ends, strict=True)):
        if number % 2 == 0:
            figure.add_shape(type="rect", xref="x", yref="y domain", x0=at(start), x1=at(end), y0=0, y1=1, fillcolor=BAND, line_width=0,
                             layer="below")
    figure.layout.template = None  # the site lays its own over the figure
    figure.update_layout(height=170 + 30 * max(len(kept), 3), barmode="overlay", hovermode="closest", legend=chart.LEGEND,
                         margin={"t": 16, "r": 12, "b": 96, "l": 40}, meta={"columns": ["request", "step", "tokens or ms"]})
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=[names[request] for request in kept], autorange="reversed",
                        title={"text": "request", "standoff": 6}, automargin=True)
    figure.update_xaxes(title={"text": "milliseconds", "standoff": 8}, automargin=True, rangemode="tozero", zeroline=False)
    words = [f"Steps of {what} as its client saw them: {len(seen.starts)} steps over {digits(at(seen.ends[-1]))} ms",
             f"{len(everybody)} requests got tokens in them" + (f", {len(kept)} are drawn" if len(kept) < len(everybody) else "")]
    for request in kept:
        mine = seen.tokens[seen.tokens["request"] == request]
        span = f"steps {mine['step'].min() - base + 1} to {mine['step'].max() - base + 1}"
        words.append(f"{names[request]}: {len(mine)} chunks in {span}"
                     + (", the first of them its first token" if request in seen.newcomers else ""))
    return set_words(figure, words, "steps.csv")


def step_sentence(requests: pd.DataFrame, chunks: pd.DataFrame, steps: int = STEPS) -> str:
    """What the picture shows, in words that follow the data (Markdown)."""
    seen = window(requests, chunks, steps)
    sizes = seen.tokens.groupby("step")["request"].nunique()
    crowd = f"{sizes.min()} to {sizes.max()} requests" if sizes.min() < sizes.max() else f"{sizes.max()} request{'s' * int(sizes.max() > 1)}"
    text = f"{len(seen.starts)} steps, each with a token for {crowd}. "
    plain = [value for step, value in seen.durations_ms.items() if step not in seen.mixed]
    with_prompt = [seen.durations_ms[step] for step in seen.mixed if step in seen.durations_ms]
    usual = summarise([value / 1e3 for value in plain])["p50_ms"]
    if usual is None:
        return text + "Too few of them follow one another to say how long a step usually takes."
    text += f"From one step to the next it usually takes {digits(usual)} ms (median of {len(plain)} steps without a new prompt). "
    if not with_prompt:
        return text + "No prompt was read here while somebody else was being answered."
    longer = [value for value in with_prompt if value > max(plain)]
    if len(with_prompt) == 1:
        text += f"One step brought a first token while others were being answered: a prompt was read in it. It took {digits(with_prompt[0])} ms, "
        return text + ("longer than any step without. **Everybody in it waited for the newcomer's prompt.**" if longer else
                       "no longer than the longest step without: a prompt as short as this hides among the steps.")
    text += (f"{len(with_prompt)} steps brought a first token while others were being answered: a prompt was read in each. They took "
             f"{digits(min(with_prompt))} to {digits(max(with_prompt))} ms, ")
    if not longer:
        return text + "no longer than the longest step without: prompts as short as these hide among the steps."
    which = "each" if len(longer) == len(with_prompt) else f"{len(longer)} of them"
    return text + f"{which} longer than any step without. **Everybody in such a step waited for the newcomer's prompt.**"


# --- records to draw ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One point of a record, to be drawn."""

    run: Run
    point: dict[str, Any]

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Its requests and chunks."""
        return self.run.frame("requests", self.point["point"]), self.run.frame("chunks", self.point["point"])

    @property
    def what(self) -> str:
        """The point in a few words, for captions."""
        rig, said = self.run.document["rig"]["name"], self.point
        if said.get("kind") == "streams":
            load = _requests(said["num_prompts"])
        else:
            load = f"{said['rate_label']} requests a second"
        return f"{load}, prompts of {said['input_len']} tokens, rig {rig}"

    def caption(self) -> str:
        """Where the picture comes from (Markdown, on an executed page)."""
        return f"{self.what[0].upper()}{self.what[1:]}. Record `{self.run.name}`, see the [provenance page](../pages/provenance.md)."


NOTHING_TO_DRAW = ("**There is no record to draw yet.** This picture is made from one of Part 1 or Part 3: `wall run part_1` measures one, "
                   "and `wall site` renders this page again.")


def shown(source: Source) -> list[Any]:
    """A source as the contents of a dial's option: the picture, what it shows, where it comes from."""
    requests, chunks = source.frames()
    return [step_picture(requests, chunks, what=source.what), step_sentence(requests, chunks), source.caption()]


def sources(rig: str = "auto") -> dict[str, Source]:
    """What there is to draw, by name for a dial: visitors who come and go (Part 1), then equal requests at once (Part 3).

    `rig`: a rig's name, or `auto` for this machine's, else the first that has any record. Empty when there is none.
    """
    for name in _rigs(rig):
        found = {**_visitors(name), **_streams(name)}
        if found:
            return found
    return {}


def newest_run(rig: str = "auto") -> Run | None:
    """The record whose machine the page's bounds are for: of Part 1, else of Part 3; null when there is none."""
    for name in _rigs(rig):
        for post in POSTS:
            if runs := _runs(post, name):
                return runs[0]
    return None


def _committed_only() -> bool:
    return bool(os.environ.get(COMMITTED_VARIABLE))


def _rigs(rig: str) -> list[str]:
    if rig != "auto":
        return [rig]
    here = pick_rig("auto").name
    known = {path.parent.name for post in POSTS for path in records.record_folders(post, committed_only=_committed_only())}
    return [here, *sorted(known - {here})]


def _runs(post: str, rig: str) -> list[Run]:
    """The records of the newest set that were not refused."""
    found = arms.newest(post, rig, _committed_only())
    return list(found.testable.values()) if found else []


def _visitors(rig: str) -> dict[str, Source]:
    """The valid point of the newest Part 1 whose running batch is nearest to four: more would hide who is who."""
    sweep = [Source(run, point) for run in _runs("part_1", rig) for point in run.points
             if point["pass"] == "measured" and point["request_rate"] is not None]
    sweep = [source for source in sweep if source.point["validity"]["valid"]] or sweep
    if not sweep:
        return {}
    return {"visitors who come and go": min(sweep, key=lambda source: abs((source.point["summary"].get("running_mean") or 0.0) - 4))}


def _streams(rig: str) -> dict[str, Source]:
    """From the newest Part 3, equal requests at once: the smallest batch, and the largest that a picture can hold."""
    found = {point["num_prompts"]: Source(run, point) for run in _runs("part_3", rig) for point in run.points
             if point.get("kind") == "streams" and point["pass"] == "measured"}
    fitting = sorted(batch for batch in found if batch <= ROWS) or sorted(found)[:1]
    return {_requests(batch): found[batch] for batch in sorted({fitting[0], fitting[-1]})} if fitting else {}


def _requests(count: int) -> str:
    return "one request alone" if count == 1 else f"{count} equal requests at once"
