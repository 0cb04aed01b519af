"""How many events a second our own client can take: is it ever the client that makes a server look slow?

What:   a plain server in a process of its own answers equal streams with events of vLLM's shape, one a token and stream, as fast as it can
        write them; the probe reads them as in a measured point. Prints one JSON document.
Why:    a step time is only the engine's if nobody behind the engine is slower. Part 3 finds a server whose front end is; this shows that
        the client is not. The result is a lower bound: server and client share the machine, and either may be what ends it.
Use:    python benchmarks/probe_capacity.py > result.json && mv result.json benchmarks/probe_capacity.json
Not:    a test (speeds are not pass or fail), and no engine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import statistics
from datetime import UTC, datetime
from types import SimpleNamespace

from inference_wall import cliff, hardware
from inference_wall.probe import Probe

STREAMS, TOKENS, REPEATS = 256, 512, 3
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def event(tokens: int) -> bytes:
    """One server-sent event with the answer's next token, as a chunk of HTTP."""
    said = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 0, "model": "m",
            "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}],
            "usage": {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}}
    text = f"data: {json.dumps(said)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(text), text)


def serve(pipe: multiprocessing.connection.Connection) -> None:
    """Wait until all streams have asked, then give each its next token, round after round; once a repeat, without end."""
    answers, waiting = [event(number) for number in range(1, TOKENS + 1)], []

    async def rounds(writers: list[asyncio.StreamWriter]) -> None:
        for answer in answers:
            for writer in writers:
                writer.write(answer)
            await asyncio.gather(*(writer.drain() for writer in writers))
        for writer in writers:
            writer.write(b"0\r\n\r\n")
            writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")))
        writer.write(HEAD)
        waiting.append(writer)
        if len(waiting) == STREAMS:
            every, waiting[:] = list(waiting), []
            await rounds(every)

    async def forever() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2 * STREAMS)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(forever())


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    probe, rates = Probe(f"http://127.0.0.1:{ours.recv()}", "m"), []
    for seed in range(REPEATS):
        point = SimpleNamespace(kind="streams", num_prompts=STREAMS, seed=seed, input_len=8, output_len=TOKENS)
        found = probe.run(point, timeout_s=120)
        step = cliff.step_time(found.requests, found.chunks)
        rates.append(STREAMS / step["mean_ms"] * 1e3)  # the mean: events that arrive together have no gap between them
    server.terminate()
    host = hardware.host_facts()
    print(json.dumps({
        "what": "events a second that the probe took from a plain server on the same machine, one event a token and stream",
        "events_s": round(statistics.median(rates)), "events_s_low": round(min(rates)), "events_s_high": round(max(rates)), "repeats": REPEATS,
        "streams": STREAMS, "tokens": TOKENS, "cpu": host["cpu"]["model"], "cores": host["cores"],
        "measured": datetime.now(UTC).isoformat(timespec="seconds")}, indent=2))


if __name__ == "__main__":
    main()
