"""Probe: our own client for what `vllm bench serve` cannot express.

What:   `Probe` runs two kinds of load (docs/decisions/0004) and returns the same rows as `load`: `streams`, a known number of
        equal requests at once while nothing else arrives; and `victims`, streams that loop short requests while long prompts are
        injected among them, round after round.
Why:    a sweep says how latency grows with the rate, but not what one long prompt does to those who are already reading. For that
        the client has to decide by what its streams have received: inject once all of them stream, wait until they stream again.
Use:    probe = Probe(base_url, served_name, clock_zero=zero); result = probe.run(point, timeout_s=60)   (see `measure`)
Not:    open and closed loops (`load`), what the freeze means (`freeze`), starting the profiler's server side (the caller's `profile`).

The client stays light: a read is noted with its time and scanned for one number; events are parsed after the point.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pandas as pd

from .errors import WallError
from .load import STREAM_OPTIONS, LoadResult, count_tokens
from .samples import UNIT_S

SETTLED_TOKENS = 16  # what every victim must have received before the first injection
CALM_TOKENS = 24  # ... and again after each round, unless it ended a request
RETRY_PAUSE_S = 0.2  # of a victim whose request failed
FAILURES_IN_A_ROW = 3  # after which a victim stops
PROFILE_AFTER_TOKENS = 4  # of each stream: the first and three more, so that no prefill is left in the profile
PROFILE_STREAM_TOKENS = 12  # of the slowest stream, under the profiler
PROFILE_VICTIM_GAPS = 2  # of each victim, after the last injected prompt's first token
PROFILE_CALL_S = 300.0  # how long the profiler may take to start, or to stop and write its trace
PROFILE_ABANDON_S = 20.0  # ... and to stop after a point that broke off

_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')  # in text the quotes would be escaped, so that no generated word can look like it
_EVENT = re.compile(rb"(?:^|[\r\n])data: ?\{")


@dataclass
class Exchange:
    """One request: what was asked, when it left, and every read of the answer with its time (`time.perf_counter` seconds)."""

    role: str
    stream: int | None
    round: int | None
    asked_prompt_tokens: int
    asked_output_tokens: int
    body: bytes = b""
    sent: float | None = None
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


@dataclass
class _Seat:
    """Cheap running counts of one stream, victim or injected prompt. They steer the point; the record counts again, exactly."""

    before: int = 0  # tokens of requests that have ended
    said: int | None = None  # tokens of the request under way, as the server says
    events: int = 0  # events of the request under way: stands in where the server does not say
    ended: int = 0  # requests
    over: bool = False  # sends nothing more

    @property
    def current(self) -> int:
        return self.events if self.said is None else self.said

    @property
    def tokens(self) -> int:
        return self.before + self.current

    def note(self, data: bytes) -> None:
        found = _USAGE.findall(data)
        if found:
            self.said = max(self.said or 0, int(found[-1]))
        self.events += len(_EVENT.findall(data))

    def end(self) -> None:
        self.before, self.said, self.events, self.ended = self.tokens, None, 0, self.ended + 1


class Probe:
    """Client of one server. Prompts are token ids drawn from `vocabulary` by the point's seed; `clock_zero` as in `load`."""

    def __init__(self, base_url: str, served_name: str, vocabulary: range = range(1000, 40000), clock_zero: float = 0.0):
        self.base_url, self.served_name, self.vocabulary, self.clock_zero = base_url.rstrip("/"), served_name, vocabulary, clock_zero

    def run(self, point: Any, *, timeout_s: float, on_done: Callable[[int], None] = lambda done: None,
            profile: Any = None) -> LoadResult:
        """Run one point of kind `streams` or `victims` (a `plans.Point`) to its end; nothing in it is cancelled.

        `on_done` is called with the number of ended requests. Failed requests are rows with an outcome, not exceptions. `profile` is
        null or has coroutines `start()` and `stop()`, called around the stretch worth profiling; what they raise is noted in
        `bench["profile_error"]` and costs nothing else. Raises WallError when the point takes longer than `timeout_s` seconds.
        """
        script = {"streams": _Course.streams, "victims": _Course.victims}[point.kind]
        course = _Course(self, point, on_done, profile)
        start = time.perf_counter()
        try:
            asyncio.run(asyncio.wait_for(course.play(script), timeout_s))
        except TimeoutError as problem:
            raise WallError(f"the point of kind {point.kind} was not done after {timeout_s:.0f} s",
                            "the server hangs or is far slower than planned; finished points are kept, run again to go on") from problem
        end = time.perf_counter()
        requests, chunks = frames(course.exchanges, self.clock_zero)
        bench = course.said | {
            "requests": len(requests), **{outcome: int((requests["outcome"] == outcome).sum()) for outcome in ("completed", "failed")},
            "asked_prompt_tokens": int(requests["asked_prompt_tokens"].sum()),
            "asked_output_tokens": int(requests["asked_output_tokens"].sum()), "output_tokens": int(requests["output_tokens"].sum())}
        if point.kind == "victims":
            bench["rounds"] = [_round_times(requests[requests["round"] == number], calm and self.ticks(calm))
                               for number, calm in enumerate(course.calm)]
        first, last = requests["sent"].min() * UNIT_S, requests["end"].max()
        return LoadResult(requests, chunks, bench, start - self.clock_zero, end - self.clock_zero, first,
                          first if pd.isna(last) else last * UNIT_S)

    def ticks(self, seconds: float) -> int:
        """A `time.perf_counter` reading in the record's unit."""
        return round((seconds - self.clock_zero) / UNIT_S)

    def body(self, seed: list[int], input_len: int, output_len: int) -> bytes:
        """A request, ready to be sent. `seed` names the prompt: the same numbers, the same token ids, whatever the timing was."""
        drawn = np.random.default_rng(seed).integers(len(self.vocabulary), size=input_len)
        prompt = (self.vocabulary.start + self.vocabulary.step * drawn).tolist()
        return json.dumps({"model": self.served_name, "prompt": prompt, "max_tokens": output_len, "temperature": 0.0, "ignore_eos": True,
                           "stream": True, **STREAM_OPTIONS}).encode()


class _Course:
    """One point under way: its requests so far, and what it waits for."""

    def __init__(self, probe: Probe, point: Any, on_done: Callable[[int], None], profile: Any):
        self.probe, self.point, self.on_done, self.profile = probe, point, on_done, profile
        self.exchanges: list[Exchange] = []
        self.said: dict[str, Any] = {}
        self.calm: list[float | None] = []  # when the calm stretch after each round was over
        self.ended, self.finish, self.profiling = 0, False, False
        self.moved = asyncio.Event()

    async def play(self, script: Callable) -> None:
        # No limit on connections and no time limit but the point's own. An unused connection is dropped before servers close it (after 5 s).
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=headers) as self.session:
            try:
                await script(self)
            finally:
                await self.profile_stop(PROFILE_ABANDON_S)  # does nothing unless the point broke off under the profiler

    async def streams(self) -> None:
        """All at once; the profile, where one is wanted, lies where every stream decodes."""
        point = self.point
        seats = [_Seat() for _ in range(point.num_prompts)]
        waiting = [self.prepared("stream", number, None, [point.seed, 0, number], point.input_len, point.output_len)
                   for number in range(point.num_prompts)]
        watching = [self.profile_streams(seats)] if self.profile else []
        await asyncio.gather(*(self.once(exchange, seat) for exchange, seat in zip(waiting, seats, strict=True)), *watching)

    async def victims(self) -> None:
        """Victims loop; once they are settled the rounds follow, each with a calm stretch after it; then the victims run out."""
        seats = [_Seat() for _ in range(self.point.victims)]
        loops = [asyncio.create_task(self.victim(number, seat)) for number, seat in enumerate(seats)]
        try:
            await self.until(lambda: all(seat.over or seat.tokens >= SETTLED_TOKENS for seat in seats))
            self.said["settled"] = self.probe.ticks(time.perf_counter())
            for number in range(self.point.rounds):
                if all(seat.over for seat in seats):
                    self.said["broken_off"] = f"no victim was left before round {number}"
                    break
                await self.round(number, seats)
            self.finish = True
            await asyncio.gather(*loops)
        finally:
            for loop in loops:
                loop.cancel()  # without effect on those that have ended

    async def round(self, number: int, seats: list[_Seat]) -> None:
        point = self.point
        waiting = [self.prepared("injected", None, number, [point.seed, 1, number, place], point.injected_len, point.injected_output_len)
                   for place in range(point.injected)]
        injected = [_Seat() for _ in waiting]
        profiled = number == 0 and self.profile is not None
        if profiled:
            await self.profile_start()
        self.calm.append(None)
        watching = [self.profile_victims(injected, seats)] if profiled else []
        await asyncio.gather(*(self.once(exchange, seat) for exchange, seat in zip(waiting, injected, strict=True)),
                             self.calm_stretch(injected, seats), *watching)

    async def calm_stretch(self, injected: list[_Seat], seats: list[_Seat]) -> None:
        await self.until(lambda: all(seat.over for seat in injected))
        marks = [(seat.tokens + CALM_TOKENS, seat.ended) for seat in seats]
        await self.until(lambda: all(seat.over or seat.tokens >= tokens or seat.ended > ended
                                     for seat, (tokens, ended) in zip(seats, marks, strict=True)))
        self.calm[-1] = time.perf_counter()

    async def victim(self, number: int, seat: _Seat) -> None:
        point, failures, serial = self.point, 0, 0
        while not self.finish and failures < FAILURES_IN_A_ROW:
            exchange = self.prepared("victim", number, None, [point.seed, 2, number, serial], point.input_len, point.output_len)
            complete = await self.send(exchange, seat)
            failures, serial = 0 if complete else failures + 1, serial + 1
            if failures and not self.finish:
                await asyncio.sleep(RETRY_PAUSE_S)
        if failures == FAILURES_IN_A_ROW:
            self.said.setdefault("stopped_victims", []).append(number)
        self.leave(seat)

    async def once(self, exchange: Exchange, seat: _Seat) -> None:
        await self.send(exchange, seat)
        self.leave(seat)

    def leave(self, seat: _Seat) -> None:
        seat.over = True
        self.moved.set()

    def prepared(self, role: str, stream: int | None, number: int | None, seed: list[int], input_len: int, output_len: int) -> Exchange:
        return Exchange(role, stream, number, input_len, output_len, self.probe.body(seed, input_len, output_len))

    async def send(self, exchange: Exchange, seat: _Seat) -> bool:
        """Send one request and note its answer to the end. True when, by the cheap count, all tokens came."""
        self.exchanges.append(exchange)
        reads, moved, now = exchange.reads, self.moved, time.perf_counter
        exchange.sent = now()
        try:
            async with self.session.post(f"{self.probe.base_url}/v1/completions", data=exchange.body) as response:
                if response.status == 200:
                    async for data in response.content.iter_any():
                        reads.append((now(), data))
                        seat.note(data)
                        moved.set()
                else:
                    exchange.error = f"HTTP {response.status}: {_complaint(await response.text(errors='replace'))}"
        except (aiohttp.ClientError, OSError) as problem:
            exchange.error = f"{type(problem).__name__}: {_one_line(str(problem))}"
        # A count split over two reads was not seen above; the last one decides whether the answer is whole.
        last = _USAGE.findall(b"".join(data for _, data in reads[-8:]))
        seat.said = max(seat.said or 0, int(last[-1])) if last else seat.said
        complete = exchange.error is None and seat.current >= exchange.asked_output_tokens
        exchange.body = b""
        seat.end()
        self.ended += 1
        self.on_done(self.ended)
        moved.set()
        return complete

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds; asked again after every read and every end of a request."""
        while not holds():
            self.moved.clear()
            await self.moved.wait()

    async def profile_streams(self, seats: list[_Seat]) -> None:
        """From when all streams stream; with `profile_after` from when the first has come so far, since others may have been put out."""
        after = getattr(self.point, "profile_after", 0)
        if after:
            await self.until(lambda: any(seat.over or seat.tokens >= after for seat in seats))
        else:
            await self.until(lambda: all(seat.over or seat.tokens >= PROFILE_AFTER_TOKENS for seat in seats))
        if all(seat.over for seat in seats):
            self.said["profile_error"] = "every stream had ended before the profile could start"
            return
        await self.profile_start()
        await self.until_further(seats, PROFILE_STREAM_TOKENS, any if after else all)
        await self.profile_stop()

    async def profile_victims(self, injected: list[_Seat], seats: list[_Seat]) -> None:
        await self.until(lambda: all(seat.over or seat.tokens for seat in injected))
        await self.until_further(seats, PROFILE_VICTIM_GAPS)
        await self.profile_stop()

    async def until_further(self, seats: list[_Seat], tokens: int, enough: Callable[..., bool] = all) -> None:
        """Wait until all (or any) of the seats that are still taken have received so many more tokens."""
        marks = [seat.tokens + tokens for seat in seats]
        await self.until(lambda: all(seat.over for seat in seats) or enough(
            seat.tokens >= mark or (seat.over and enough is all) for seat, mark in zip(seats, marks, strict=True)))

    async def profile_start(self) -> None:
        self.profiling = await self.profile_call("start")

    async def profile_stop(self, limit_s: float = PROFILE_CALL_S) -> None:
        if self.profiling:
            self.profiling = False
            await self.profile_call("stop", limit_s)

    async def profile_call(self, name: str, limit_s: float = PROFILE_CALL_S) -> bool:
        """Start or stop the profile, with its time in the record. A profile that fails must not lose the point: the failure is noted."""
        called = time.perf_counter()
        try:
            await asyncio.wait_for(getattr(self.profile, name)(), limit_s)
        except Exception as problem:  # whatever the profiler's side raises
            self.said.setdefault("profile_error", f"{name}: {type(problem).__name__}: {_one_line(str(problem))}")
            return False
        self.said[f"profile_{name}"] = [self.probe.ticks(called), self.probe.ticks(time.perf_counter())]
        return True


def frames(exchanges: list[Exchange], clock_zero: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Exchanges to the two frames of the record (docs/decisions/0004): requests and chunks, times in 10 us since `clock_zero`.

    Outcomes by the rules of `load.frames`: an answer with fewer tokens than asked for, an HTTP error and a broken connection are
    failures with a reason; what had arrived by then is kept.
    """

    def ticks(seconds: float | None) -> int | None:
        return None if seconds is None else round((seconds - clock_zero) / UNIT_S)

    rows, chunk_rows = [], []
    for number, exchange in enumerate(exchanges):
        messages = events(exchange.reads)
        chunks = count_tokens(messages)
        tokens = sum(count for _, count in chunks)
        prompt_tokens, complaint = _said_last(messages)
        error = exchange.error or complaint
        if error is None and tokens < exchange.asked_output_tokens:
            error = f"the stream ended early: {tokens} of {exchange.asked_output_tokens} tokens"
        rows.append({
            "request": number, "role": exchange.role, "stream": exchange.stream, "round": exchange.round,
            "intended": ticks(exchange.sent), "sent": ticks(exchange.sent),
            "first_token": ticks(chunks[0][0]) if chunks else None, "end": ticks(chunks[-1][0]) if chunks else None,
            "asked_prompt_tokens": exchange.asked_prompt_tokens, "asked_output_tokens": exchange.asked_output_tokens,
            "prompt_tokens": prompt_tokens, "output_tokens": tokens, "outcome": "failed" if error else "completed", "error": error,
        })
        chunk_rows += [(number, ticks(moment), count) for moment, count in chunks]
    requests = pd.DataFrame(rows).astype({name: "Int64" for name in ("intended", "sent", "first_token", "end", "prompt_tokens")}
                                         | {"stream": "Int16", "round": "Int16"})
    return requests, pd.DataFrame(chunk_rows, columns=["request", "time", "tokens"]).astype("int64")


def events(reads: list[tuple[float, bytes]]) -> list[tuple[float, str]]:
    """Raw reads of one answer -> its server-sent events: (time of the read that completed it, "data: ..." on one line).

    By the rules of the format (WHATWG HTML, 9.2.6): lines end with LF, CR LF or CR; an empty line ends an event; lines that start with
    a colon are comments; several data lines are one event. An event may be spread over reads, a read may hold several. What stands
    behind the last empty line is passed on too: a server that is cut off there has still sent it, and half an event does not parse.
    """
    found: list[tuple[float, str]] = []
    data: list[bytes] = []
    rest, moment, after_cr = b"", 0.0, False

    def line_ended(line: bytes) -> None:
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            found.append((moment, "data: " + b"\n".join(data).decode("utf-8", "replace")))
            data.clear()

    for moment, read in reads:  # noqa: B007 - `line_ended` uses it
        if after_cr and read.startswith(b"\n"):  # the second half of a CR LF whose first half ended the line
            read = read[1:]
        after_cr = False
        if not read:
            continue
        after_cr = read.endswith(b"\r")
        *lines, rest = (rest + read).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            line_ended(line)
    line_ended(rest)
    line_ended(b"")
    return found


def _said_last(messages: list[tuple[float, str]]) -> tuple[int | None, str | None]:
    """The number of prompt tokens by the server's last count, and what it complained of within the stream; null each where it did not."""
    prompt_tokens = complaint = None
    for _, message in reversed(messages):
        try:
            event = json.loads(message.removeprefix("data:"))
        except ValueError:
            continue
        if not isinstance(event, dict):
            continue
        if complaint is None and event.get("error"):
            complaint = f"the server broke off: {_complaint(message.removeprefix('data:'))}"
        prompt_tokens = (event.get("usage") or {}).get("prompt_tokens")
        if prompt_tokens is not None:
            break
    return prompt_tokens, complaint


def _complaint(body: str) -> str:
    """What a server says in an error: the message of {"error": {"message": ...}}, or the text as it is."""
    try:
        said = json.loads(body)["error"]
        return _one_line(str(said["message"] if isinstance(said, dict) else said))
    except (ValueError, KeyError, TypeError):
        return _one_line(body)


def _round_times(injected: pd.DataFrame, calm: int | None) -> dict[str, int | None]:
    """Ticks of one round: its first sending, the last first token, the last end, and the end of the calm stretch after it."""
    times = {"start": injected["sent"].min(), "first_token": injected["first_token"].max(), "end": injected["end"].max()}
    return {name: None if pd.isna(value) else int(value) for name, value in times.items()} | {"calm": calm}


def _one_line(text: str) -> str:
    """White space folded, and no longer than a table bears."""
    return " ".join(text.split())[:300]
