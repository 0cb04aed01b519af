"""What fewer bits cost in words: perplexity of a fixed text and greedy continuations, asked of the running server.

What:   `Quality.run` sends the text of `experiments/part_5_quantization/text.txt` in windows and asks how probable the server
        finds each of its tokens; then it lets the server go on with eight short beginnings, always with the likeliest token.
Why:    a faster format that says something else is not the same service. The check goes through the server, so that it
        tests the kernels that the speed was measured on, and not another implementation of the same format.
Use:    result = Quality(base_url, served_name, tokenizer, clock_zero).run(point, timeout_s=60)     (see `measure`)
Not:    a benchmark of ability. One text of everyday prose can show damage; it cannot show that there is none. Comparing two
        formats is `quantization`'s work.

    perplexity = exp(sum of -ln p(token | tokens before it in its window) / number of scored tokens)

The first token of a window has nothing before it and is not scored. Requests go one after the other: in a shared batch the
order of additions, and with it the last bits of a sum, would depend on who else is there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import WallError
from .load import LoadResult
from .rigs import root
from .samples import UNIT_S

WINDOW = 512  # tokens: probabilities of a whole prompt need a table of window x vocabulary
CONTINUATION = 32  # tokens of each continuation
BEGINNINGS = (
    "The capital of France is",
    "To make a cup of tea, first",
    "The sun rises in the",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "The three primary colours are",
    "My favourite season is autumn, because",
    "A bicycle has two wheels and",
)
COLUMNS = {"request": "int32", "intended": "Int64", "sent": "Int64", "first_token": "Int64", "end": "Int64", "prompt_tokens": "Int64",
           "output_tokens": "int32", "outcome": "object", "error": "object", "role": "object", "stream": "Int16", "round": "Int16",
           "asked_prompt_tokens": "Int32", "asked_output_tokens": "Int32"}


def text() -> str:
    """The fixed text."""
    return (root() / "experiments" / "part_5_quantization" / "text.txt").read_text(encoding="utf-8")


def windows(tokens: list[int], longest: int = WINDOW) -> list[list[int]]:
    """Tokens cut into as few windows as possible of nearly equal length, at most `longest` each, without overlap."""
    count = math.ceil(len(tokens) / longest) or 1
    borders = [round(len(tokens) * place / count) for place in range(count + 1)]
    return [tokens[start:end] for start, end in itertools.pairwise(borders) if end > start]


class Quality:
    """The client of a `quality` point. `tokenizer` is the model folder (with tokenizer.json); `clock_zero` as in `load`."""

    def __init__(self, base_url: str, served_name: str, tokenizer: str | Path, clock_zero: float):
        self.url, self.served_name, self.clock_zero = f"{base_url.rstrip('/')}/v1/completions", served_name, clock_zero
        self._folder = Path(tokenizer)

    def run(self, point: Any = None, *, timeout_s: float, on_done: Callable[[int], None] = lambda done: None) -> LoadResult:
        """Ask all questions and wait for the answers. `point` is not needed: text and beginnings are fixed.

        `bench` of the result: text_tokens (scored), nll_nats, perplexity, continuations (token ids), continuation_tokens,
        windows, and `reason` where perplexity is null. `on_done` is called with the number of finished requests. Raises
        WallError when it takes longer than `timeout_s` or the tokenizer is missing. Failed requests are rows, not exceptions.
        """
        tokenizer = self._tokenizer()
        pieces = windows(tokenizer.encode(text(), add_special_tokens=False).ids)
        beginnings = [tokenizer.encode(beginning, add_special_tokens=False).ids for beginning in BEGINNINGS]
        start = time.perf_counter()
        try:
            answers = asyncio.run(asyncio.wait_for(self._ask_all(pieces, beginnings, on_done), timeout_s))
        except TimeoutError as problem:
            raise WallError(f"the quality check was not done after {timeout_s:.0f} s",
                            "the server hangs or is far slower than planned; finished points are kept, run again to go on") from problem
        end = time.perf_counter()
        requests, chunks = self._frames(answers)
        bench = summary([answer for answer in answers if answer["scored"]], [answer for answer in answers if not answer["scored"]], tokenizer)
        last = requests["end"].max()
        first = answers[0]["sent"] - self.clock_zero
        return LoadResult(requests, chunks, bench, start - self.clock_zero, end - self.clock_zero, first,
                          end - self.clock_zero if pd.isna(last) else last * UNIT_S)

    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        file = self._folder / "tokenizer.json"
        if not self._folder.is_dir():  # a model of a hub, which the server has fetched by now
            from huggingface_hub import hf_hub_download

            try:
                file = Path(hf_hub_download(str(self._folder), "tokenizer.json"))
            except (OSError, ValueError) as problem:
                raise WallError(f"the tokenizer of {self._folder} cannot be had: {type(problem).__name__}",
                                "check the network and HF_TOKEN") from problem
        if not file.is_file():
            raise WallError("the model folder has no tokenizer.json, so the fixed text cannot be turned into tokens",
                            "use a model folder with a fast tokenizer, or leave the quality check out")
        return Tokenizer.from_file(str(file))

    async def _ask_all(self, pieces: list[list[int]], beginnings: list[list[int]], on_done: Callable[[int], None]) -> list[dict[str, Any]]:
        import aiohttp

        answers = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20) as session:
            for prompt, scored in [*((piece, True) for piece in pieces), *((beginning, False) for beginning in beginnings)]:
                answers.append(await self._ask(session, prompt, scored))
                on_done(len(answers))
        return answers

    async def _ask(self, session: Any, prompt: list[int], scored: bool) -> dict[str, Any]:
        """One request. A scored window is answered whole (the server cannot stream its probabilities), a continuation streams."""
        import aiohttp

        wanted = 1 if scored else CONTINUATION
        body: dict[str, Any] = {"model": self.served_name, "prompt": prompt, "max_tokens": wanted, "temperature": 0, "return_token_ids": True,
                                "ignore_eos": True}
        body |= {"prompt_logprobs": 0} if scored else {"stream": True, "stream_options": {"include_usage": True}}
        answer: dict[str, Any] = {"prompt": prompt, "scored": scored, "wanted": wanted, "chunks": [], "tokens": [], "text": "", "logprobs": None,
                                  "prompt_tokens": None, "error": None, "sent": time.perf_counter()}
        try:
            async with session.post(self.url, json=body) as response:
                if response.status != 200:
                    raise ValueError(f"HTTP {response.status}: {(await response.text()).strip()[:300]}")
                if scored:
                    _take(answer, json.loads(await response.read()))
                else:
                    async for line in response.content:
                        message = line.decode(errors="replace").strip().removeprefix("data:").strip()
                        if message and message != "[DONE]" and not message.startswith(":"):
                            _take(answer, json.loads(message))
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as problem:
            answer["error"] = str(problem) or type(problem).__name__
        got = sum(count for _, count in answer["chunks"])
        if answer["error"] is None and got < wanted:
            answer["error"] = f"the answer ended early: {got} of {wanted} tokens"
        return answer

    def _frames(self, answers: list[dict[str, Any]]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The raw rows in the shape of docs/decisions/0004; such a client has no schedule, so intended = sent."""

        def ticks(seconds: float) -> int:
            return round((seconds - self.clock_zero) / UNIT_S)

        rows, chunks = [], []
        for number, answer in enumerate(answers):
            times = [ticks(moment) for moment, _ in answer["chunks"]]
            chunks += [(number, time_, count) for time_, (_, count) in zip(times, answer["chunks"], strict=True)]
            rows.append({
                "request": number, "intended": ticks(answer["sent"]), "sent": ticks(answer["sent"]), "first_token": times[0] if times else None,
                "end": times[-1] if times else None, "prompt_tokens": answer["prompt_tokens"],
                "output_tokens": sum(count for _, count in answer["chunks"]), "outcome": "failed" if answer["error"] else "completed",
                "error": answer["error"], "role": "load", "stream": None, "round": None,
                "asked_prompt_tokens": len(answer["prompt"]), "asked_output_tokens": answer["wanted"],
            })
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS), pd.DataFrame(chunks, columns=["request", "time", "tokens"])


def _take(answer: dict[str, Any], event: dict[str, Any]) -> None:
    """Note what one response or one streamed event says."""
    now = time.perf_counter()
    if "error" in event:
        raise ValueError(str(event["error"].get("message", event["error"]) if isinstance(event["error"], dict) else event["error"]))
    if usage := event.get("usage"):
        answer["prompt_tokens"] = usage.get("prompt_tokens")
    for choice in event.get("choices") or []:
        ids, words = choice.get("token_ids"), choice.get("text") or ""
        if choice.get("prompt_logprobs"):
            answer["logprobs"] = choice["prompt_logprobs"]
        answer["text"] += words
        if ids or (ids is None and words):
            answer["tokens"] = None if ids is None or answer["tokens"] is None else answer["tokens"] + ids
            answer["chunks"].append((now, len(ids) if ids else (event.get("usage") or {}).get("completion_tokens") or 1))


def summary(scored: list[dict[str, Any]], continued: list[dict[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Answers to the `bench` of a quality point. One window without an answer makes the perplexity null: the text would differ."""
    result: dict[str, Any] = {"windows": len(scored), "text_tokens": None, "nll_nats": None, "perplexity": None, "reason": None}
    problems = [answer["error"] or "the server returned no probabilities of the prompt" for answer in scored
                if answer["error"] or answer["logprobs"] is None]
    try:
        values = [] if problems else [value for answer in scored for value in surprise(answer["prompt"], answer["logprobs"])]
    except (KeyError, TypeError, ValueError) as problem:
        values, problems = [], [f"the server's probabilities of the prompt cannot be read: {problem!r}"]
    if values:
        nll = math.fsum(values)
        result |= {"text_tokens": len(values), "nll_nats": nll, "perplexity": _exp(nll / len(values))}
    if result["perplexity"] is None:
        result["reason"] = problems[0] if problems else "too surprised for a finite number" if values else "no token was scored"
    # A server that does not return token ids gives text: encoding it again is close, but not sure to be what was sampled.
    continuations = [[] if answer["error"] else answer["tokens"] or tokenizer.encode(answer["text"], add_special_tokens=False).ids
                     for answer in continued]
    return result | {"continuations": continuations, "continuation_tokens": sum(map(len, continuations))}


def surprise(prompt: list[int], logprobs: list[dict[str, Any] | None]) -> list[float]:
    """-ln p of each token of a window but its first, in nats. `logprobs[i]`: {token id: {"logprob": ...}} as vLLM returns it."""
    if len(prompt) != len(logprobs):
        raise ValueError(f"{len(logprobs)} probabilities for {len(prompt)} tokens")
    return [-float(entry[str(token)]["logprob"]) for token, entry in zip(prompt[1:], logprobs[1:], strict=True)]


def _exp(value: float) -> float | None:
    return math.exp(value) if value < 700 else None
