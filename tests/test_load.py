"""The load: vLLM's own benchmark client, tapped, against a server that streams oddly."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from inference_wall.load import arrival_offsets, count_tokens
from inference_wall.plans import Point
from inference_wall.samples import UNIT_S
from inference_wall.server import free_port

FAKE = Path(__file__).parent / "fake_server.py"
needs_engine = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make site needs none)")


def point(rate=50.0, prompts=12, output=8):
    return Point(index=0, pass_name="measured", arm="default", load="sweep", kind="bench", request_rate=rate,
                 repeat=0, seed=3, num_prompts=prompts, input_len=8,
                 output_len=output)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A word-level tokenizer of 500 words: small, and its prompts have exactly the tokens that were asked for."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    built = Tokenizer(models.WordLevel({f"t{i}": i for i in range(500)}, unk_token="t0"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}))
    return str(folder)


@pytest.fixture
def fake():
    started = []

    def start(behaviour):
        port = free_port()
        process = subprocess.Popen([sys.executable, str(FAKE), "--port", str(port), "--behaviour", behaviour])
        started.append(process)
        url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            try:
                if httpx.get(url + "/health").status_code == 200:
                    return url
            except httpx.HTTPError:
                time.sleep(0.05)
        raise AssertionError("the fake server did not start")

    yield start
    for process in started:
        process.kill()
        process.wait()


@needs_engine
@pytest.mark.parametrize(("behaviour", "outcome", "tokens", "events"), [
    ("ok", "completed", 8, 8),
    ("two_tokens_in_a_chunk", "completed", 8, 4),
    ("empty_events", "completed", 8, 8),
    ("repeats_last_event", "completed", 8, 8),
    ("splits_events", "completed", 8, 8),
    ("ends_early", "failed", 4, 4),
])
def test_every_token_is_counted_once_however_it_is_streamed(fake, tokenizer, behaviour, outcome, tokens, events):
    from inference_wall.load import BenchServe

    zero = time.perf_counter()
    done = []
    bench = BenchServe(fake(behaviour), tokenizer, "m", zero)
    result = bench.run(point(), timeout_s=60, on_done=done.append)
    requests, chunks = result.requests, result.chunks
    assert done == list(range(1, 13))
    assert requests["outcome"].tolist() == [outcome] * 12
    assert requests["output_tokens"].tolist() == [tokens] * 12
    assert chunks.groupby("request")["tokens"].sum().tolist() == [tokens] * 12
    assert chunks.groupby("request").size().tolist() == [events] * 12
    first = chunks.groupby("request")["time"].first()
    assert (first.to_numpy() == requests["first_token"].to_numpy()).all()
    # Sent at or after the intended moment, and on the same clock as the point.
    delay = (requests["sent"] - requests["intended"]) * UNIT_S
    assert delay.min() > -0.002 and delay.max() < 0.5
    assert requests["intended"].is_monotonic_increasing
    assert result.start_s < requests["intended"].min() * UNIT_S < requests["end"].max() * UNIT_S < result.end_s


@needs_engine
def test_our_times_agree_with_those_of_vllm_itself(fake, tokenizer):
    from inference_wall.load import BenchServe

    result = BenchServe(fake("ok"), tokenizer, "m", time.perf_counter()).run(point(), timeout_s=60)
    sent = result.requests.set_index("request")["sent"].astype(float)
    ours = (result.chunks.groupby("request")["time"].first() - sent) * UNIT_S * 1e3
    assert float(np.mean(ours)) == pytest.approx(result.bench["mean_ttft_ms"], abs=1.0)
    assert result.bench["completed"] == 12 and result.bench["total_output_tokens"] == 96


@needs_engine
def test_refused_requests_are_rows_not_exceptions(fake, tokenizer):
    from inference_wall.load import BenchServe

    result = BenchServe(fake("refuses_some"), tokenizer, "m", time.perf_counter()).run(point(), timeout_s=60)
    failed = result.requests[result.requests["outcome"] == "failed"]
    assert len(failed) == 4 and failed["error"].notna().all() and failed["output_tokens"].eq(0).all()


@needs_engine
def test_the_taps_are_taken_away_and_the_import_is_paid_once(fake, tokenizer):
    from vllm.benchmarks import serve
    from vllm.benchmarks.lib import endpoint_request_func as client

    from inference_wall.load import BenchServe

    before = serve.get_request, serve.ASYNC_REQUEST_FUNCS["openai"], client.StreamedResponseHandler.add_chunk
    bench = BenchServe(fake("ok"), tokenizer, "m", time.perf_counter())
    bench.run(point(prompts=2), timeout_s=60)
    started = time.perf_counter()
    bench.run(point(rate=None, prompts=2), timeout_s=60)
    assert time.perf_counter() - started < 2
    assert before == (serve.get_request, serve.ASYNC_REQUEST_FUNCS["openai"], client.StreamedResponseHandler.add_chunk)


@needs_engine
def test_a_point_that_hangs_is_ended(fake, tokenizer):
    from inference_wall.errors import WallError
    from inference_wall.load import BenchServe

    bench = BenchServe(fake("ok"), tokenizer, "m", time.perf_counter())
    with pytest.raises(WallError, match="not done after"):
        bench.run(point(rate=0.5, prompts=20), timeout_s=1.0)


def test_arrivals_are_poisson_end_at_count_over_rate_and_follow_the_seed():
    np.random.seed(5)
    state = np.random.get_state()
    offsets = arrival_offsets(2000, 4.0, 1.0, state)
    assert offsets[-1] == pytest.approx(500.0)
    gaps = np.diff(offsets)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05) and gaps.std() == pytest.approx(0.25, rel=0.1)
    assert (offsets == arrival_offsets(2000, 4.0, 1.0, state)).all()
    assert (np.random.get_state()[1] == state[1]).all()
    assert (arrival_offsets(3, np.inf, 1.0, state) == 0).all()


def event(text, tokens=None):
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    return "data: " + json.dumps({"choices": [{"text": text}], **usage})


@pytest.mark.parametrize(("messages", "expected"), [
    ([], []),
    ([(1.0, event("a", 1)), (2.0, event("b", 2))], [(1.0, 1), (2.0, 1)]),
    ([(1.0, event("a", 1)), (2.0, event("bc", 3))], [(1.0, 1), (2.0, 2)]),
    ([(0.5, event("", 0)), (1.0, event("a", 1))], [(1.0, 1)]),
    ([(1.0, event("a", 1)), (2.0, event("", 1))], [(1.0, 1)]),
    ([(1.0, event("", 1)), (2.0, event("", 2))], [(1.0, 1), (2.0, 1)]),  # tokens without text: special ones, or half a character
    ([(1.0, event("a")), (2.0, event("")), (3.0, event("b"))], [(1.0, 1), (3.0, 1)]),  # a server that does not count
    ([(1.0, ": ping"), (2.0, event("a", 1)), (3.0, "data: [DONE]")], [(2.0, 1)]),
    ([(1.0, 'data: {"choices": [{"te'), (2.0, event("a", 1))], [(2.0, 1)]),
    ([(1.0, event("a", 1)), (2.0, 'data: {"choices": [], "usage": {"completion_tokens": 1}}')], [(1.0, 1)]),
])
def test_counting_tokens_in_raw_messages(messages, expected):
    assert count_tokens(messages) == expected
