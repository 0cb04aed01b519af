"""Load: `vllm bench serve`, imported once and tapped for what its result file leaves out.

What:   `BenchServe` runs one point after another with vLLM's own benchmark code (its arrival process, its random prompts, its
        HTTP client) in this process, and returns one row a request and one row a streamed chunk.
Why:    as a subprocess a point pays 10 to 30 s of imports. And the result file has neither the intended send time of a
        request nor the token count of a chunk, without which latency hides the client's own delay and a chunk of two
        tokens passes for one. Both are tapped here, around the unchanged functions:
        * `get_request` (the arrival process): the same schedule is computed beside it from the same random state;
        * the request function and `StreamedResponseHandler.add_chunk`: each message is noted with its time of arrival and
          read only after the point, so that the client stays as light as it was.
Use:    bench = BenchServe(base_url, model_folder, served_name); result = bench.run(point)   (see `measure`)
Not:    the server's side (`watch`), summaries (`stats`), streams and injected prompts of our own timing (`probe`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from .errors import WallError
from .plans import Point
from .samples import UNIT_S

BACKEND = "openai"
# One message is one server-sent event; with this, each carries the number of tokens streamed so far.
STREAM_OPTIONS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


_FIRST: dict[str, float] = {}  # what the first client of this process took


@dataclass
class LoadResult:
    """What one point gave. Times in the frames are int64 in 10 us since `clock_zero` (`time.perf_counter` seconds)."""

    requests: pd.DataFrame
    chunks: pd.DataFrame
    bench: dict[str, Any]
    start_s: float  # of the whole call ...
    end_s: float
    load_start_s: float  # ... and of the load in it: the moment from which arrivals count, to the last event
    load_end_s: float


@dataclass
class _Tap:
    """One request as seen from outside: vLLM's own output object and the raw messages with their times."""

    output: Any
    expected_tokens: int
    messages: list[tuple[float, str]]


class BenchServe:
    """vLLM's serving benchmark, imported once (10 to 30 s), then run point by point (about 0.1 s of overhead each)."""

    def __init__(self, base_url: str, tokenizer: str, served_name: str, clock_zero: float):
        begin = time.perf_counter()
        try:
            from vllm.benchmarks import serve
            from vllm.benchmarks.lib import endpoint_request_func as client
        except ImportError as problem:
            raise WallError(f"vLLM's benchmark code does not import: {problem}",
                            "install the engine (make book does it), then run `wall doctor`") from problem
        self.base_url, self.tokenizer, self.served_name, self.clock_zero = base_url, tokenizer, served_name, clock_zero
        self._serve, self._client = serve, client
        self._parser = argparse.ArgumentParser()
        serve.add_cli_args(self._parser)
        self._messages: contextvars.ContextVar[list | None] = contextvars.ContextVar("messages", default=None)
        self._load_tokenizer_once()
        # Of the first client of a process: the others find the modules loaded.
        self.import_s = _FIRST.setdefault("import_s", round(time.perf_counter() - begin, 2))

    def _load_tokenizer_once(self) -> None:
        """Every point asks for the same tokenizer: load it the first time only (0.3 to 3 s a point otherwise)."""
        loaded: dict[tuple, Any] = {}
        original = self._serve.get_tokenizer

        def get_tokenizer(*args: Any, **options: Any) -> Any:
            key = (args, tuple(sorted(options.items())))
            if key not in loaded:
                loaded[key] = original(*args, **options)
            return loaded[key]

        self._serve.get_tokenizer = get_tokenizer

    def arguments(self, point: Point) -> argparse.Namespace:
        """Exactly what `vllm bench serve` would parse. Its own first request is switched off: the server is already warm."""
        rate = "inf" if point.request_rate is None else f"{point.request_rate:g}"
        return self._parser.parse_args([
            "--backend", BACKEND, "--base-url", self.base_url, "--endpoint", "/v1/completions",
            "--model", self.served_name, "--tokenizer", self.tokenizer,
            "--dataset-name", "random", "--random-input-len", str(point.input_len), "--random-output-len", str(point.output_len),
            "--random-range-ratio", "0", "--num-prompts", str(point.num_prompts), "--request-rate", rate, "--seed", str(point.seed),
            "--ignore-eos", "--temperature", "0", "--ready-check-timeout-sec", "0", "--num-warmups", "0", "--disable-tqdm",
            *(["--max-concurrency", str(point.max_concurrency)] if point.max_concurrency else []),
            "--save-detailed", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99",
            "--extra-body", json.dumps(STREAM_OPTIONS)])

    def run(self, point: Point, *, timeout_s: float, on_done: Callable[[int], None] = lambda done: None) -> LoadResult:
        """Send the point's requests and wait for all of them.

        `on_done` is called with the number of finished requests. Raises WallError when the point takes longer than
        `timeout_s`. Failed requests are rows with an outcome, not exceptions.
        """
        taps: list[_Tap] = []
        schedule: dict[str, Any] = {}
        arguments = self.arguments(point)
        with self._tapped(taps, schedule, on_done), contextlib.redirect_stdout(io.StringIO()):
            start = time.perf_counter()
            try:
                bench = asyncio.run(asyncio.wait_for(self._serve.main_async(arguments), timeout_s))
            except TimeoutError as problem:
                raise WallError(f"the point at rate {point.rate_label} was not done after {timeout_s:.0f} s",
                                "the server hangs or is far slower than planned; finished points are kept, run again to go on") from problem
            except (ValueError, OSError) as problem:
                raise WallError(f"vllm bench serve refused the point at rate {point.rate_label}: {problem}",
                                "check the rig's input_len and output_len against its max-model-len") from problem
            end = time.perf_counter()
        # A closed loop has no schedule: a request is due when a seat is free.
        intended = None if point.max_concurrency else schedule["zero"] + schedule["offsets"]
        requests, chunks = frames(taps, intended, self.clock_zero)
        requests = requests.assign(asked_prompt_tokens=point.input_len)
        detail = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors", "e2els", "latencies")
        plain = {key: value for key, value in bench.items() if key not in detail and isinstance(value, str | int | float | None)}
        zero = schedule["zero"] - self.clock_zero
        last = requests["end"].max()
        return LoadResult(requests, chunks, plain, start - self.clock_zero, end - self.clock_zero, zero, zero if pd.isna(last) else last * UNIT_S)

    @contextlib.contextmanager
    def _tapped(self, taps: list[_Tap], schedule: dict[str, Any], on_done: Callable[[int], None]):
        """Put the taps in place for one point and take them away again."""
        serve, client, current = self._serve, self._client, self._messages
        request_function, arrivals = serve.ASYNC_REQUEST_FUNCS[BACKEND], serve.get_request
        add_chunk = client.StreamedResponseHandler.add_chunk
        finished = 0

        async def tapped_request(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
            nonlocal finished
            messages: list[tuple[float, str]] = []
            current.set(messages)
            place = len(taps)
            taps.append(_Tap(None, request_func_input.output_len, messages))
            output = await request_function(request_func_input=request_func_input, session=session, pbar=pbar)
            taps[place].output = output
            finished += 1
            on_done(finished)
            return output

        def tapped_add_chunk(handler: Any, chunk: bytes) -> list[str]:
            now = time.perf_counter()
            messages = add_chunk(handler, chunk)
            noted = current.get()
            if noted is not None:
                noted.extend((now, message) for message in messages)
            return messages

        async def tapped_arrivals(input_requests: Any, request_rate: float, burstiness: float = 1.0, *rest: Any, **more: Any):
            wanted = list(input_requests)
            schedule["offsets"] = arrival_offsets(len(wanted), request_rate, burstiness, np.random.get_state())
            schedule["zero"] = time.perf_counter()
            async for item in arrivals(wanted, request_rate, burstiness, *rest, **more):
                yield item

        serve.ASYNC_REQUEST_FUNCS[BACKEND], serve.get_request = tapped_request, tapped_arrivals
        client.StreamedResponseHandler.add_chunk = tapped_add_chunk
        try:
            yield
        finally:
            serve.ASYNC_REQUEST_FUNCS[BACKEND], serve.get_request = request_function, arrivals
            client.StreamedResponseHandler.add_chunk = add_chunk


def arrival_offsets(count: int, request_rate: float, burstiness: float, random_state: tuple) -> np.ndarray:
    """Seconds from the first moment at which each request is meant to leave, shape (count,).

    The arithmetic of `get_request` in `vllm.benchmarks.serve` (the same in 0.18.0, 0.25.1 and 0.32.0): gamma gaps, summed, then
    stretched so that the last request leaves at exactly count / rate. `random_state` is numpy's global state at that moment.
    """
    if np.isinf(request_rate):
        return np.zeros(count)
    random = np.random.RandomState()
    random.set_state(random_state)
    gaps = random.gamma(shape=burstiness, scale=1.0 / (request_rate * burstiness), size=count)
    offsets = np.cumsum(gaps)
    return offsets * (count / request_rate / offsets[-1])


def frames(taps: list[_Tap], intended_s: np.ndarray | None, clock_zero: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Taps to the two frames of the record (see docs/decisions/0001): requests and chunks, times in 10 us.

    `intended_s`: when each request was due, in `perf_counter` seconds; null where it was due the moment it was sent.
    """

    def ticks(seconds: float) -> int:
        return round((seconds - clock_zero) / UNIT_S)

    rows, chunk_rows = [], []
    for number, tap in enumerate(taps):
        output, chunks = tap.output, count_tokens(tap.messages)
        tokens = sum(count for _, count in chunks)
        sent = output.start_time if output is not None else None
        complete = output is not None and output.success and tokens > 0
        early = complete and tokens < tap.expected_tokens
        rows.append({
            "request": number, "role": "load", "intended": ticks(intended_s[number]) if intended_s is not None else ticks(sent) if sent else None,
            "sent": ticks(sent) if sent else None, "asked_output_tokens": tap.expected_tokens,
            "first_token": ticks(chunks[0][0]) if chunks else None, "end": ticks(chunks[-1][0]) if chunks else None,
            "prompt_tokens": output.prompt_len if output is not None else None, "output_tokens": tokens,
            "outcome": "cancelled" if output is None else "completed" if complete and not early else "failed",
            "error": None if output is None else "the stream ended early: "
                     f"{tokens} of {tap.expected_tokens} tokens" if early else (output.error.strip().splitlines() or [""])[-1] or None,
        })
        chunk_rows += [(number, ticks(moment), count) for moment, count in chunks]
    requests = pd.DataFrame(rows).astype({name: "Int64" for name in ("intended", "sent", "first_token", "end", "prompt_tokens")})
    return requests, pd.DataFrame(chunk_rows, columns=["request", "time", "tokens"])


def count_tokens(messages: list[tuple[float, str]]) -> list[tuple[float, int]]:
    """Raw server-sent events with their times -> (time, new tokens) for each that carried at least one token.

    The server says in every event how many tokens it has streamed so far, so an event with two new tokens counts as two, a
    repeated or empty one as none. A server that does not say (no `usage` in the event) gets one token an event that has text.
    """
    counted: list[tuple[float, int]] = []
    so_far = 0
    for moment, message in messages:
        text = message.removeprefix("data:").strip()
        if text == "[DONE]" or message.startswith(":"):
            continue
        try:
            event = json.loads(text)
        except ValueError:
            continue
        choices = event.get("choices")
        if not choices:
            continue
        usage = event.get("usage")
        if usage and usage.get("completion_tokens") is not None:
            new = usage["completion_tokens"] - so_far
        else:
            new = 1 if choices[0].get("text") else 0
        if new > 0:
            so_far += new
            counted.append((moment, new))
    return counted
