"""A server that looks like vLLM and misbehaves on demand. For tests only: nothing measured with it is ever published.

Run:    python fake_server.py --port 9000 --served-model-name m --behaviour ok
Behaviours: ok, dies (prints a known cause and leaves), never_ready (health answers 503), wrong_model, no_generation,
            two_tokens_in_a_chunk, empty_events, ends_early, repeats_last_event, splits_events, refuses_some
"""

import argparse
import asyncio
import json
import sys
import time

from aiohttp import web

STEP_S = 0.004
PREFILL_S = 2e-5  # for each token of a prompt that is given as token ids; every stream waits meanwhile


def event(text, tokens, model="m", finish=None, prompt=8):
    return {"id": "cmpl-1", "object": "text_completion", "model": model,
            "choices": [{"index": 0, "text": text, "finish_reason": finish}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}}


class Fake:
    def __init__(self, arguments):
        self.behaviour, self.name = arguments.behaviour, arguments.served_model_name
        self.running = self.prompt_tokens = self.generation_tokens = self.requests = 0
        self.busy_until = 0.0

    async def health(self, _request):
        return web.Response(status=503 if self.behaviour == "never_ready" else 200)

    async def models(self, _request):
        return web.json_response({"data": [{"id": "somebody-else" if self.behaviour == "wrong_model" else self.name}]})

    async def version(self, _request):
        return web.json_response({"version": "0.32.0"})

    async def metrics(self, _request):
        label = f'{{engine="0",model_name="{self.name}"}}'
        return web.Response(text="\n".join(
            ["# HELP vllm:num_requests_running running", "# TYPE vllm:num_requests_running gauge",
             f"vllm:num_requests_running{label} {self.running}.0", f"vllm:num_requests_waiting{label} 0.0",
             f"vllm:kv_cache_usage_perc{label} 0.01", f"vllm:prompt_tokens_total{label} {self.prompt_tokens}.0",
             f"vllm:generation_tokens_total{label} {self.generation_tokens}.0"]) + "\n")

    async def completions(self, request):
        body = await request.json()
        count = body["max_tokens"]
        self.requests += 1
        if self.behaviour == "refuses_some" and self.requests % 3 == 0:
            return web.json_response({"error": "no"}, status=500)
        if self.behaviour == "no_generation":
            return web.json_response({"error": "broken"}, status=500)
        if not body.get("stream"):
            return web.json_response(event(" Paris", count))
        ids = body["prompt"] if isinstance(body["prompt"], list) else []
        self.busy_until = max(self.busy_until, time.monotonic()) + len(ids) * PREFILL_S
        prompt = len(ids) or 8
        self.prompt_tokens += prompt
        self.running += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self.stream(response, count, prompt)
        finally:
            self.running -= 1
        return response

    async def send(self, response, payload):
        await response.write(f"data: {json.dumps(payload)}\n\n".encode())

    async def step(self):
        await asyncio.sleep(STEP_S)
        while (left := self.busy_until - time.monotonic()) > 0:
            await asyncio.sleep(left)

    async def stream(self, response, count, prompt):
        kind = self.behaviour
        if kind == "empty_events":
            await self.send(response, event("", 0, prompt=prompt))
        step = 2 if kind == "two_tokens_in_a_chunk" else 1
        last = count // 2 if kind == "ends_early" else count
        for so_far in range(step, last + 1, step):
            await self.step()
            payload = event(" t" * step, so_far, prompt=prompt)
            if kind == "splits_events":
                raw = f"data: {json.dumps(payload)}\n\n".encode()
                await response.write(raw[:20])
                await asyncio.sleep(STEP_S / 4)
                await response.write(raw[20:])
            else:
                await self.send(response, payload)
            self.generation_tokens += step
        if kind == "repeats_last_event":
            await self.send(response, event("", last, finish="length", prompt=prompt))
        if kind != "ends_early":
            await self.send(response, event("", count, self.name, prompt=prompt) | {"choices": []})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="m")
    parser.add_argument("--behaviour", default="ok")
    arguments = parser.parse_args()
    if arguments.behaviour == "dies":
        sys.exit("ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (1000)")
    fake = Fake(arguments)
    application = web.Application()
    application.add_routes([web.get("/health", fake.health), web.get("/v1/models", fake.models), web.get("/version", fake.version),
                            web.get("/metrics", fake.metrics), web.post("/v1/completions", fake.completions)])
    web.run_app(application, host=arguments.host, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
