"""The quality client against a small server that answers as vLLM does: sums by hand, and what happens when it does not."""

import asyncio
import json
import math
import threading
import time

import pytest
from aiohttp import web

from inference_wall import quality
from inference_wall.errors import WallError


class Tokenizer:
    """One token a word; the id is the word's length."""

    def encode(self, text, add_special_tokens=False):
        return type("Encoding", (), {"ids": [len(word) for word in text.split()]})


@pytest.fixture
def server():
    """Answers like /v1/completions of vLLM 0.32. `behave` is changed by a test; `asked` collects the bodies."""
    state = {"asked": [], "behave": {}}

    async def complete(request):
        body = await request.json()
        state["asked"].append(body)
        behave = state["behave"]
        if behave.get("status"):
            return web.json_response({"error": {"message": "kernel wants 16 bits"}}, status=behave["status"])
        await asyncio.sleep(behave.get("sleep", 0))
        prompt = body["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            logprobs = [None] + [{str(token): {"logprob": -0.5, "rank": 1, "decoded_token": "x"}} for token in prompt[1:]]
            choice = {"index": 0, "text": "x", "token_ids": [7], "prompt_logprobs": logprobs if not behave.get("silent") else None}
            return web.json_response({"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"] - behave.get("short", 0)
        for number in range(0, count, 2):
            ids = [prompt[0] + number, prompt[0] + number + 1][: count - number]
            choice = {"index": 0, "text": "ab", "token_ids": ids}
            if behave.get("no_ids"):
                choice = {"index": 0, "text": "word words "}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response

    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start():
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        state["runner"] = web.AppRunner(app)
        await state["runner"].setup()
        site = web.TCPSite(state["runner"], "127.0.0.1", 0)
        await site.start()
        state["url"] = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        started.set()

    def serve():
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(10)
    yield state
    asyncio.run_coroutine_threadsafe(state["runner"].cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture
def client(server, monkeypatch):
    monkeypatch.setattr(quality, "text", lambda: "a bb ccc " * 10)  # 30 tokens
    monkeypatch.setattr(quality, "WINDOW", 16)
    monkeypatch.setattr(quality.windows, "__defaults__", (16,))
    client = quality.Quality(server["url"], "model", "nowhere", time.perf_counter())
    monkeypatch.setattr(client, "_tokenizer", lambda: Tokenizer())
    return client


def test_windows_are_even_and_lose_nothing():
    tokens = list(range(1030))
    found = quality.windows(tokens, 512)
    assert [len(window) for window in found] == [343, 344, 343] and [token for window in found for token in window] == tokens
    assert quality.windows([1, 2], 512) == [[1, 2]] and quality.windows([], 512) == []


def test_perplexity_by_hand(client, server):
    done = []
    result = client.run(None, timeout_s=20, on_done=done.append)
    bench = result.bench
    assert bench["text_tokens"] == 28, "30 tokens in two windows, of which the first of each is not scored"
    assert bench["nll_nats"] == pytest.approx(14) and bench["perplexity"] == pytest.approx(math.exp(0.5)) and bench["reason"] is None
    assert done == list(range(1, 11))
    scored = [body for body in server["asked"] if not body.get("stream")]
    assert [body["prompt_logprobs"] for body in scored] == [0, 0] and all(body["max_tokens"] == 1 for body in scored)
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in server["asked"])


def test_continuations_are_the_returned_tokens(client):
    bench = client.run(None, timeout_s=20).bench
    first = len(quality.BEGINNINGS[0].split()[0])
    assert len(bench["continuations"]) == 8 and bench["continuations"][0] == [first + number for number in range(32)]
    assert bench["continuation_tokens"] == 256
    json.dumps(bench, allow_nan=False)


def test_rows_have_the_shape_of_the_record(client):
    result = client.run(None, timeout_s=20)
    requests, chunks = result.requests, result.chunks
    assert list(requests.columns) == list(quality.COLUMNS) and len(requests) == 10
    assert (requests["role"] == "load").all() and requests["stream"].isna().all() and (requests["outcome"] == "completed").all()
    assert (requests["intended"] == requests["sent"]).all() and (requests["end"] >= requests["first_token"]).all()
    assert requests["output_tokens"].tolist() == [1, 1] + [32] * 8 and requests["prompt_tokens"].tolist() == requests["asked_prompt_tokens"].tolist()
    assert chunks["tokens"].sum() == 2 + 256 and chunks.groupby("request").size().tolist() == [1, 1] + [16] * 8
    assert requests["sent"].is_monotonic_increasing and (requests["sent"].iloc[1:].to_numpy() >= requests["end"].iloc[:-1].to_numpy()).all()
    assert 0 <= result.start_s <= result.load_start_s <= result.load_end_s <= result.end_s


def test_a_server_that_fails_gives_rows_and_a_reason(client, server):
    server["behave"]["status"] = 500
    result = client.run(None, timeout_s=20)
    assert (result.requests["outcome"] == "failed").all() and "kernel wants 16 bits" in result.requests["error"].iloc[0]
    assert result.bench["perplexity"] is None and "HTTP 500" in result.bench["reason"] and result.bench["continuation_tokens"] == 0
    assert result.chunks.empty and result.load_end_s >= result.load_start_s


def test_a_server_without_probabilities_gives_no_perplexity(client, server):
    server["behave"]["silent"] = True
    bench = client.run(None, timeout_s=20).bench
    assert bench["perplexity"] is None and "no probabilities" in bench["reason"] and bench["continuation_tokens"] == 256


def test_a_short_answer_is_a_failed_request(client, server):
    server["behave"]["short"] = 4
    result = client.run(None, timeout_s=20)
    assert result.requests["outcome"].tolist() == ["completed"] * 2 + ["failed"] * 8
    assert "28 of 32 tokens" in result.requests["error"].iloc[-1] and result.bench["continuations"] == [[]] * 8


def test_without_token_ids_the_text_is_encoded_again(client, server, monkeypatch):
    server["behave"]["no_ids"] = True
    monkeypatch.setattr(quality, "CONTINUATION", 16)
    bench = client.run(None, timeout_s=20).bench
    assert bench["continuations"][0] == [] or bench["continuations"][0][:2] == [4, 5]


def test_a_hanging_server_is_an_error_with_a_remedy(client, server):
    server["behave"]["sleep"] = 5
    with pytest.raises(WallError, match="not done after"):
        client.run(None, timeout_s=0.3)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(WallError, match=r"tokenizer\.json"):
        quality.Quality("http://127.0.0.1:1", "m", tmp_path, 0.0).run(None, timeout_s=1)


def test_nothing_listens(monkeypatch):
    client = quality.Quality("http://127.0.0.1:9", "m", "nowhere", time.perf_counter())
    monkeypatch.setattr(client, "_tokenizer", lambda: Tokenizer())
    result = client.run(None, timeout_s=20)
    assert (result.requests["outcome"] == "failed").all() and result.bench["perplexity"] is None


def test_surprise_refuses_what_does_not_fit():
    assert quality.surprise([5, 6], [None, {"6": {"logprob": -2.0}}]) == [2.0]
    with pytest.raises(ValueError, match="1 probabilities for 2 tokens"):
        quality.surprise([5, 6], [None])
    with pytest.raises(KeyError):
        quality.surprise([5, 6], [None, {"7": {"logprob": -2.0}}])


def test_the_text_is_long_enough_and_about_something_else():
    words = quality.text().split()
    assert 500 <= len(words) <= 700 and not {"vLLM", "server", "GPU", "token"} & set(words)
