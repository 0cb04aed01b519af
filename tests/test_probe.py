"""The probe: every token counted once however it arrives, rounds that wait for calm, and failures that stay rows.

Streams in fixtures/streams were recorded from vLLM 0.32.0 on a CPU: the first line says what was asked, each further line is one read of
the connection, [seconds since sending, bytes as Latin-1].
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from aiohttp import web

from inference_wall import probe as module
from inference_wall.errors import WallError
from inference_wall.probe import Exchange, Probe, events, frames
from inference_wall.samples import UNIT_S, request_stalls
from inference_wall.server import free_port
from inference_wall.stats import point_summary

HERE = Path(__file__).parent
COLUMNS = ["request", "role", "stream", "round", "intended", "sent", "first_token", "end", "asked_prompt_tokens", "asked_output_tokens",
           "prompt_tokens", "output_tokens", "outcome", "error"]


def message(text, tokens=None, end="\n\n", prompt=8):
    usage = None if tokens is None else {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text}], 'usage': usage})}{end}".encode()


DONE = b"data: [DONE]\n\n"


def counted(reads, asked=3):
    """Rows of one answer whose reads came at 1 s, 2 s, ... after the clock's zero."""
    exchange = Exchange("stream", 0, None, 8, asked, sent=0.5, reads=[(float(number), read) for number, read in enumerate(reads, 1)])
    requests, chunks = frames([exchange], 0.0)
    return requests.iloc[0], list(zip((chunks["time"] * UNIT_S).round(5), chunks["tokens"], strict=True))


ONE, TWO, THREE = message("a", 1), message("b", 2), message("c", 3)


@pytest.mark.parametrize(("reads", "expected"), [
    ([ONE, TWO, THREE, DONE], [(1, 1), (2, 1), (3, 1)]),
    # An event split over two reads has arrived with the second.
    ([ONE, TWO[:30], TWO[30:], THREE + DONE], [(1, 1), (3, 1), (4, 1)]),
    ([ONE, TWO[:-1], TWO[-1:] + THREE], [(1, 1), (3, 1), (3, 1)]),
    ([ONE + TWO, THREE], [(1, 1), (1, 1), (2, 1)]),
    ([message("ab", 2), THREE, DONE], [(1, 2), (2, 1)]),
    ([message("", 0), ONE, TWO, THREE], [(2, 1), (3, 1), (4, 1)]),  # a role-only event
    ([ONE, TWO, THREE, THREE, DONE], [(1, 1), (2, 1), (3, 1)]),  # the last one twice
    ([ONE, TWO, message("", 3), message("", 3)], [(1, 1), (2, 1), (3, 1)]),  # a token without text: half of a character
    ([b": ping\n\n", ONE, b": ping\n" + TWO, b"event: x\nid: 7\n" + THREE], [(2, 1), (3, 1), (4, 1)]),
    ([b"data: {\"choices\": [{\"text\": \"a\"}],\ndata: \"usage\": {\"completion_tokens\": 1}}\n\n", TWO, THREE], [(1, 1), (2, 1), (3, 1)]),
    ([ONE[:-2] + b"\r", b"\n", b"\n" + TWO, THREE], [(3, 1), (3, 1), (4, 1)]),  # CR LF cut in two, then an empty line
    ([ONE, TWO, THREE[:-2]], [(1, 1), (2, 1), (3, 1)]),  # cut off before the empty line, yet whole
    ([message("a"), message("b"), message(""), message("c"), DONE], [(1, 1), (2, 1), (4, 1)]),  # no usage: one token an event with text
])
def test_every_token_is_counted_once_with_the_time_of_its_read(reads, expected):
    row, chunks = counted(reads)
    assert chunks == expected
    assert (row["output_tokens"], row["outcome"], row["error"]) == (3, "completed", None)
    assert (row["first_token"] * UNIT_S, row["end"] * UNIT_S) == pytest.approx((expected[0][0], expected[-1][0]))
    assert row["intended"] == row["sent"] == 50000


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_any_line_end_and_any_cut_give_the_same_events(end, size):
    text = "x\u00e9\u4e2d" + "data: {"
    raw = b"".join(message(text, tokens, end) for tokens in (1, 2, 3)) + f"data: [DONE]{end}".encode()
    reads = [(at / 10, raw[at:at + size]) for at in range(0, len(raw), size)]
    found = events(reads)
    assert [json.loads(event[5:])["usage"]["completion_tokens"] for _, event in found[:3]] == [1, 2, 3]
    assert [json.loads(event[5:])["choices"][0]["text"] for _, event in found[:3]] == [text] * 3
    assert found[3][1] == "data: [DONE]" and len(found) == 4
    assert [moment for moment, _ in found] == sorted(moment for moment, _ in found)


def test_a_cut_off_event_is_no_token_and_the_stream_ended_early():
    row, chunks = counted([ONE, TWO[:-6]])
    assert chunks == [(1, 1)]
    assert (row["outcome"], row["error"], row["output_tokens"]) == ("failed", "the stream ended early: 1 of 3 tokens", 1)


def test_what_the_server_complains_of_within_a_stream_is_the_reason():
    row, _ = counted([ONE, b'data: {"error": {"message": "EngineCore\\n died", "code": 500}}\n\n', DONE])
    assert (row["outcome"], row["error"], row["prompt_tokens"]) == ("failed", "the server broke off: EngineCore died", 8)


def test_prompt_tokens_are_the_server_s_count_or_unknown():
    assert counted([ONE, TWO, message("c", 3, prompt=11)])[0]["prompt_tokens"] == 11
    row, _ = counted([message("a"), message("b"), message("c")])
    assert row["outcome"] == "completed" and row[["prompt_tokens"]].isna().all()


def test_the_cheap_count_that_steers_a_point():
    seat = module._Seat()
    seat.note(message("", 0))
    assert seat.tokens == 0  # the server said none: an event alone is no token
    seat.note(message('"completion_tokens": 99, \\"completion_tokens\\": 99', 1))
    assert seat.tokens == 1  # a generated text cannot pass for a count
    seat.note(ONE + THREE)
    seat.end()
    assert (seat.tokens, seat.current, seat.ended) == (3, 0, 1)
    seat.note(message("a") + message("b") + DONE)
    assert (seat.tokens, seat.current) == (5, 2)  # no usage: events


def recorded(name):
    lines = (HERE / "fixtures" / "streams" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    asked = json.loads(lines[0])
    reads = [(moment, text.encode("latin-1")) for moment, text in map(json.loads, lines[1:])]
    return Exchange(asked["role"], 0, None, asked["asked_prompt_tokens"], asked["asked_output_tokens"], sent=0.0, reads=reads)


@pytest.mark.parametrize("name", ["plain_0.32.0_cpu", "victim_during_injection_0.32.0_cpu"])
def test_recorded_streams_of_a_real_server(name):
    exchange = recorded(name)
    requests, chunks = frames([exchange], 0.0)
    row = requests.iloc[0]
    assert (row["outcome"], row["output_tokens"], row["prompt_tokens"], len(chunks)) == ("completed", 64, 32, 64)
    # One read an event; the last one carries the last token, the totals and [DONE].
    assert len(exchange.reads) == 64 and len(events(exchange.reads)) == 66
    assert (chunks["time"] * UNIT_S).to_numpy() == pytest.approx([moment for moment, _ in exchange.reads], abs=UNIT_S)
    seat = module._Seat()
    for _, read in exchange.reads:
        seat.note(read)
    assert seat.tokens == 64


def test_the_recorded_victim_shows_its_freeze():
    frozen, plain = (request_stalls(frames([recorded(name)], 0.0)[1]).iloc[0] for name in
                     ("victim_during_injection_0.32.0_cpu", "plain_0.32.0_cpu"))
    # Read off the fixture: 0.927271 s to 6.698201 s, and 10.83829 s to 16.747786 s, which is longer.
    assert frozen == pytest.approx(16.747786 - 10.83829, abs=2 * UNIT_S)
    assert plain < 0.2


# --- against servers ----------------------------------------------------------------------------------------------


def point(kind="streams", **changes):
    return SimpleNamespace(**{"kind": kind, "seed": 3, "num_prompts": 4, "input_len": 8, "output_len": 24, "victims": 3, "rounds": 2, "injected": 2,
                              "injected_len": 2000, "injected_output_len": 4} | changes)


@pytest.fixture(scope="module")
def fake():
    """Starts fake_server.py with a behaviour, once each."""
    started = {}

    def start(behaviour):
        if behaviour not in started:
            port = free_port()
            process = subprocess.Popen([sys.executable, str(HERE / "fake_server.py"), "--port", str(port), "--behaviour", behaviour])
            started[behaviour] = f"http://127.0.0.1:{port}", process
            for _ in range(200):
                try:
                    httpx.get(started[behaviour][0] + "/health")
                    break
                except httpx.HTTPError:
                    time.sleep(0.05)
        return started[behaviour][0]

    yield start
    for _, process in started.values():
        process.kill()
        process.wait()


class Scripted:
    """A server in a thread that answers each completion as `answer(number, body)` says: an HTTP status, or a list of
    writes, "break", "hang" and pauses in seconds."""

    def __init__(self, answer):
        self.answer, self.bodies, self.peers, self.port = answer, [], set(), free_port()
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        self.thread = threading.Thread(target=self.serve, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(10)
        self.url = f"http://127.0.0.1:{self.port}"

    def serve(self, ready):
        async def start():
            application = web.Application()
            application.add_routes([web.post("/v1/completions", self.completions)])
            self.runner = web.AppRunner(application, shutdown_timeout=0.1)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
            ready.set()

        self.loop.run_until_complete(start())
        self.loop.run_forever()
        self.loop.run_until_complete(self.runner.cleanup())

    async def completions(self, request):
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.peers.add(request.transport.get_extra_info("peername"))
        writes = self.answer(number, body)
        if isinstance(writes, int):
            return web.json_response({"error": {"message": "no room"}}, status=writes)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for write in writes:
            if write == "break":
                request.transport.abort()
                return response
            await asyncio.sleep(60 if write == "hang" else write if isinstance(write, float) else 0.002)
            if isinstance(write, bytes):
                await response.write(write)
        await response.write_eof()
        return response

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


def whole(body):
    return [message("t", so_far, prompt=len(body["prompt"])) for so_far in range(1, body["max_tokens"] + 1)] + [DONE]


class Profile:
    def __init__(self, fails=""):
        self.calls, self.fails = [], fails

    async def call(self, name):
        self.calls.append((name, time.perf_counter()))
        if name == self.fails:
            raise RuntimeError(f"no {name}")

    async def start(self):
        await self.call("start")

    async def stop(self):
        await self.call("stop")


@pytest.mark.parametrize(("behaviour", "outcome", "tokens", "size"), [
    ("ok", "completed", 24, 24), ("two_tokens_in_a_chunk", "completed", 24, 12), ("empty_events", "completed", 24, 24),
    ("repeats_last_event", "completed", 24, 24), ("splits_events", "completed", 24, 24), ("ends_early", "failed", 12, 12),
])
def test_streams(fake, behaviour, outcome, tokens, size):
    zero, done = time.perf_counter(), []
    result = Probe(fake(behaviour), "m", clock_zero=zero).run(point(), timeout_s=30, on_done=done.append)
    requests, chunks = result.requests, result.chunks
    assert list(requests) == COLUMNS and list(chunks) == ["request", "time", "tokens"]
    assert done == [1, 2, 3, 4]
    assert requests["role"].tolist() == ["stream"] * 4 and requests["stream"].tolist() == [0, 1, 2, 3] and requests["round"].isna().all()
    assert requests["outcome"].tolist() == [outcome] * 4
    assert requests["output_tokens"].tolist() == chunks.groupby("request")["tokens"].sum().tolist() == [tokens] * 4
    assert chunks.groupby("request").size().tolist() == [size] * 4
    assert requests["prompt_tokens"].tolist() == requests["asked_prompt_tokens"].tolist() == [8] * 4
    assert (requests["intended"] == requests["sent"]).all()
    # At once: all sent before the first token of any.
    assert requests["sent"].max() < requests["first_token"].min()
    assert 0 < result.start_s <= result.load_start_s == requests["sent"].min() * UNIT_S
    assert result.load_start_s < result.load_end_s == requests["end"].max() * UNIT_S <= result.end_s < time.perf_counter() - zero
    assert result.bench[outcome] == 4 and result.bench["asked_prompt_tokens"] == 32 and result.bench["asked_output_tokens"] == 96


def test_prompts_follow_the_seed_stay_in_the_vocabulary_and_differ():
    with Scripted(lambda number, body: whole(body)) as server:
        for seed in (3, 3, 4):
            Probe(server.url, "m", range(500, 600, 2)).run(point(num_prompts=2, input_len=40, seed=seed), timeout_s=30)
        prompts = [body["prompt"] for body in server.bodies]
    same, again, other = (sorted(prompts[at:at + 2]) for at in (0, 2, 4))
    assert same == again != other and same[0] != same[1]
    assert all(len(prompt) == 40 and set(prompt) <= set(range(500, 600, 2)) for prompt in prompts)
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == ("m", 24, 0, True, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def received(result, stream, after, before):
    """Tokens that a victim received within (after, before] and requests that it ended there."""
    rows = result.requests[(result.requests["role"] == "victim") & (result.requests["stream"] == stream)]
    chunks = result.chunks[result.chunks["request"].isin(rows["request"])]
    return (chunks.loc[(chunks["time"] > after) & (chunks["time"] <= before), "tokens"].sum(),
            ((rows["end"] > after) & (rows["end"] <= before)).sum())


@pytest.mark.parametrize("output_len", [12, 64])
def test_victims_settle_freeze_and_calm_down_between_rounds(fake, output_len):
    zero = time.perf_counter()
    result = Probe(fake("ok"), "m", clock_zero=zero).run(point("victims", output_len=output_len), timeout_s=60)
    requests, rounds = result.requests, result.bench["rounds"]
    assert list(requests) == COLUMNS and requests["request"].tolist() == list(range(len(requests)))
    assert (requests["outcome"] == "completed").all()
    injected, victims = requests[requests["role"] == "injected"], requests[requests["role"] == "victim"]
    assert injected["round"].tolist() == [0, 0, 1, 1] and injected["stream"].isna().all() and victims["round"].isna().all()
    assert injected["prompt_tokens"].tolist() == [2000] * 4 and injected["output_tokens"].tolist() == [4] * 4
    assert set(victims["output_tokens"]) == {output_len} and set(victims["stream"]) == {0, 1, 2}
    assert len(rounds) == 2
    for number, times in enumerate(rounds):
        rows = injected[injected["round"] == number]
        assert times == {"start": rows["sent"].min(), "first_token": rows["first_token"].max(), "end": rows["end"].max(), "calm": times["calm"]}
        assert rows["sent"].max() < rows["first_token"].min()
    for stream in range(3):
        assert received(result, stream, 0, rounds[0]["start"])[0] >= 16
        for at, until in ((0, rounds[1]["start"]), (1, rounds[1]["calm"])):
            tokens, ended = received(result, stream, rounds[at]["end"], until)
            assert tokens >= 23 or ended  # the injected prompt's last token and the victim's next one may have come in one turn of the loop
        own = victims[victims["stream"] == stream]
        assert (own["sent"].to_numpy()[1:] >= own["end"].to_numpy()[:-1]).all()  # one after another
        assert own["sent"].max() <= rounds[1]["calm"]  # none is begun after the last calm stretch
    # The server prefills 2 x 2000 tokens at 20 us each: everybody waits about 80 ms. With 64 tokens a request, both rounds fall into the first.
    if output_len == 64:
        gaps = result.chunks[result.chunks["request"].isin(victims["request"][:3])].groupby("request")["time"].diff() * UNIT_S
        assert (gaps > 0.06).sum() >= 6 and gaps.median() < 0.02
    summary = point_summary(victims, result.chunks[result.chunks["request"].isin(victims["request"])], None, None, 8, output_len)
    assert summary["completed"] == len(victims) and summary["failed"] == 0


def test_victims_keep_their_connections():
    with Scripted(lambda number, body: whole(body)) as server:
        result = Probe(server.url, "m").run(point("victims", output_len=8), timeout_s=30)
    assert len(result.requests) > 8 and len(server.peers) <= 5


def test_failures_are_rows_and_the_rest_goes_on():
    def answer(number, body):
        return {0: 503, 1: [*whole(body)[:5], "break"], 2: whole(body)[:7]}.get(number, whole(body))

    with Scripted(answer) as server:
        result = Probe(server.url, "m").run(point(num_prompts=5), timeout_s=30)
    rows = result.requests.sort_values("output_tokens")
    assert rows["outcome"].tolist() == ["failed"] * 3 + ["completed"] * 2
    assert rows["output_tokens"].tolist() == [0, 5, 7, 24, 24]
    refused, broken, early = rows["error"].tolist()[:3]
    assert refused == "HTTP 503: no room"
    assert "Error" in broken and len(broken) < 400
    assert early == "the stream ended early: 7 of 24 tokens"
    assert rows[["first_token", "end", "prompt_tokens"]].iloc[0].isna().all()
    assert result.bench["failed"] == 3


def test_a_victim_that_fails_tries_again_and_a_server_that_is_gone_ends_the_point(monkeypatch):
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.01)
    with Scripted(lambda number, body: 500 if number in (0, 4) else whole(body)) as server:
        result = Probe(server.url, "m").run(point("victims"), timeout_s=30)
    assert result.bench["failed"] == 2 and len(result.bench["rounds"]) == 2 and "broken_off" not in result.bench
    result = Probe(server.url, "m").run(point("victims"), timeout_s=30)  # nobody listens there any more
    assert len(result.requests) == 9 and (result.requests["outcome"] == "failed").all() and result.requests["end"].isna().all()
    assert result.requests["stream"].value_counts().tolist() == [3, 3, 3] and result.chunks.empty
    assert result.bench["broken_off"] == "no victim was left before round 0" and result.bench["rounds"] == []
    assert sorted(result.bench["stopped_victims"]) == [0, 1, 2]
    assert result.load_start_s == result.load_end_s and "ClientConnectorError" in result.requests["error"][0]


def test_a_victim_that_has_stopped_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.01)
    with Scripted(lambda number, body: 500 if body["max_tokens"] == 24 and body["prompt"][0] in first else whole(body)) as server:
        probe = Probe(server.url, "m")
        first = {json.loads(probe.body([3, 2, 1, serial], 8, 24))["prompt"][0] for serial in range(3)}
        result = probe.run(point("victims", victims=2), timeout_s=30)
    assert result.bench["stopped_victims"] == [1] and len(result.bench["rounds"]) == 2
    assert (result.requests[result.requests["role"] == "injected"]["outcome"] == "completed").all()


def test_a_point_that_hangs_is_ended():
    with Scripted(lambda number, body: [ONE, "hang"]) as server:
        for kind in ("streams", "victims"):
            started, profile = time.perf_counter(), Profile()
            with pytest.raises(WallError, match="not done after 1 s") as problem:
                Probe(server.url, "m").run(point(kind), timeout_s=0.6, profile=profile)
            assert time.perf_counter() - started < 3 and problem.value.remedy and not profile.calls


def test_a_profile_is_stopped_when_the_point_breaks_off_under_it():
    with Scripted(lambda number, body: [*whole(body)[:6], "hang"]) as server:
        profile = Profile()
        with pytest.raises(WallError):
            Probe(server.url, "m").run(point(), timeout_s=0.8, profile=profile)
    assert [name for name, _ in profile.calls] == ["start", "stop"]


def test_the_profile_of_streams_lies_where_all_of_them_decode(fake):
    zero, profile = time.perf_counter(), Profile()
    result = Probe(fake("ok"), "m", clock_zero=zero).run(point(output_len=40), timeout_s=30, profile=profile)
    (_, start), (_, stop) = profile.calls
    time_s = result.chunks["time"] * UNIT_S + zero
    before, within = (result.chunks[chosen].groupby("request").size() for chosen in (time_s < start, (time_s > start) & (time_s < stop)))
    assert before.min() >= 4 and before.max() <= 12
    assert 12 <= within.min() <= 14 and within.max() <= 20
    assert "profile_error" not in result.bench
    assert result.bench["profile_start"][0] == pytest.approx((start - zero) / UNIT_S, abs=50)


def test_the_profile_of_streams_ends_with_them(fake):
    profile = Profile()
    Probe(fake("ok"), "m").run(point(output_len=10), timeout_s=30, profile=profile)
    assert [name for name, _ in profile.calls] == ["start", "stop"]
    profile = Profile()
    with Scripted(lambda number, body: 500) as server:
        result = Probe(server.url, "m").run(point(), timeout_s=30, profile=profile)
    assert not profile.calls and "ended before" in result.bench["profile_error"]


def test_the_profile_of_victims_covers_the_first_injection(fake):
    zero, profile = time.perf_counter(), Profile()
    result = Probe(fake("ok"), "m", clock_zero=zero).run(point("victims", output_len=64, injected_output_len=20), timeout_s=60, profile=profile)
    (_, start), (_, stop) = profile.calls
    times = result.bench["rounds"][0]
    assert start - zero < times["start"] * UNIT_S < start - zero + 0.1
    assert times["first_token"] < (stop - zero) / UNIT_S < times["end"]
    for stream in range(3):
        tokens, _ = received(result, stream, times["first_token"], (stop - zero) / UNIT_S)
        assert 1 <= tokens <= 6


def test_the_profile_of_victims_waits_for_the_last_injected_prompt():
    """A server that shares its steps: victims stream on while a long prompt is read."""
    with Scripted(lambda number, body: [0.3, *whole(body)] if len(body["prompt"]) == 2000 else whole(body)) as server:
        zero, profile = time.perf_counter(), Profile()
        result = Probe(server.url, "m", clock_zero=zero).run(point("victims", rounds=1), timeout_s=60, profile=profile)
    times = result.bench["rounds"][0]
    assert times["first_token"] - times["start"] > 0.3 / UNIT_S
    assert times["first_token"] < (profile.calls[1][1] - zero) / UNIT_S < times["calm"]


@pytest.mark.parametrize("kind", ["streams", "victims"])
@pytest.mark.parametrize("fails", ["start", "stop"])
def test_a_profile_that_fails_does_not_lose_the_point(fake, kind, fails):
    profile = Profile(fails)
    result = Probe(fake("ok"), "m").run(point(kind), timeout_s=60, profile=profile)
    assert (result.requests["outcome"] == "completed").all()
    assert result.bench["profile_error"] == f"{fails}: RuntimeError: no {fails}"
    assert [name for name, _ in profile.calls] == (["start"] if fails == "start" else ["start", "stop"])


def test_what_the_client_says_is_strict_json(fake):
    result = Probe(fake("ok"), "m").run(point("victims", rounds=1), timeout_s=60, profile=Profile())
    assert json.loads(json.dumps(result.bench, allow_nan=False)) == result.bench
    assert not any(isinstance(value, np.generic) for times in result.bench["rounds"] for value in times.values())


def test_an_unknown_kind_is_a_mistake_of_the_caller():
    with pytest.raises(KeyError):
        Probe("http://127.0.0.1:9", "m").run(point("bench"), timeout_s=1)
