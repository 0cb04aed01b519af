"""The scheduler's rules for cache blocks, played without a model: who is let in, who is put out, and how often.

What:   `Cache` is the room formula: how many requests of a length fit. `steps` plays a flood of equal requests step by step
        with the rules that vLLM's V1 scheduler follows; `play` folds that into the number of preemptions and what they cost.
Why:    the room formula says that a batch will not fit at its end, not how often somebody is put out. The rules say that too,
        before anything is measured, and a count that agrees with them needs no other explanation.
Use:    play(Cache(16, 128), requests=24, input_len=32, output_len=224, seats=32, budget=2048).preemptions  ->  8
Not:    time. A step is a step here, long or short; what one costs is what the measurement is for.

The rules, read in the source of vLLM 0.32.0 (policy first come, first served; no prefix caching, no speculation):
1. Running requests first, oldest admission first. Each gets the blocks for its next tokens. If none are free, the request at
   the end of the running list is put out: its blocks are free, what was worked out is lost, and it goes to the head of the
   queue. If that is the request itself, the round ends.
2. Then, unless somebody was put out in this step, requests from the head of the queue as long as seats, step budget and blocks
   last. Each books blocks for what it holds now: its prompt, and after a preemption also the tokens it has made.
   Nobody books blocks for tokens to come.
3. A prompt that is read in pieces is let in when all of it fits (`scheduler_reserve_full_isl`, on by default in 0.32.0). Before that
   option (vLLM pull request 37307, March 2026) its first piece was enough. That 0.18.0 still did so was not read in its source: it is
   what the published counts of the long prompts agree with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Cache:
    """Blocks that requests can use (the pool less the one that the engine keeps empty), tokens in a block, and how many
    further blocks each request of a hybrid model takes for its recurrent state."""

    blocks: int
    block_size: int
    state_blocks: int = 0

    def need(self, tokens: int) -> int:
        """Blocks of one request that holds `tokens` tokens: ceil(tokens / block_size) + state_blocks."""
        return math.ceil(tokens / self.block_size) + self.state_blocks

    def room(self, tokens: int) -> int:
        """How many requests of that many tokens fit at once."""
        return self.blocks // self.need(tokens)


@dataclass(frozen=True)
class Step:
    """What one step did: requests that made a token, were let in, were put out, have ended; then the state after it."""

    made: tuple[int, ...]
    admitted: tuple[int, ...]
    evicted: tuple[int, ...]
    ended: tuple[int, ...]
    lost_tokens: int  # worked out before, dropped with the evictions of this step
    running: int
    waiting: int
    used_blocks: int  # at the end of the step, before what has ended gives its blocks back


@dataclass(frozen=True)
class Outcome:
    """A flood, played to its end."""

    preemptions: int
    before_first_end: int  # of these, the ones before the first request ended
    read_again_tokens: int  # tokens whose cache was dropped and had to be worked out again
    first_batch: int  # requests that have made a token before the first one ends
    peak_running: int
    steps: int


def steps(cache: Cache, requests: int, input_len: int, output_len: int, seats: int, budget: int,
          whole_prompt: bool = True, head: int | None = None) -> Iterator[Step]:
    """Play a flood of `requests` equal requests; one `Step` an engine step until all have ended.

    `seats`: max_num_seqs; `budget`: the most tokens of a step; `whole_prompt`: rule 3, the later one; `head`: how many are there in the
    first step, while the others come before the second (None: all are there). A request that could not fit alone is a ValueError: the
    engine would refuse it.
    """
    most = input_len + output_len - 1  # the last token is made, but nothing is computed from it
    if cache.need(most) > cache.blocks:
        raise ValueError(f"one request needs {cache.need(most)} blocks, there are {cache.blocks}")
    head = requests if head is None else min(head, requests)
    waiting, running, coming = deque(range(head)), [], deque(range(head, requests))
    computed, made, held = [0] * requests, [0] * requests, [0] * requests
    free = cache.blocks
    while waiting or running or coming:
        left, lost, work = budget, 0, {}
        admitted, evicted = [], []
        place = 0
        while place < len(running) and left > 0:
            request = running[place]
            tokens = min(input_len + made[request] - computed[request], left)
            more = cache.need(computed[request] + tokens) - held[request]
            while more > free:
                last = running.pop()
                free += held[last]
                lost += computed[last]
                computed[last] = held[last] = 0
                waiting.appendleft(last)
                evicted.append(last)
                if last == request:
                    break
            if more > free or (evicted and evicted[-1] == request):
                break
            free, held[request], left = free - more, held[request] + more, left - tokens
            work[request] = tokens
            place += 1
        while not evicted and waiting and len(running) < seats and left > 0:
            request = waiting[0]
            known = input_len + made[request]
            tokens = min(known, left)
            if cache.need(known if whole_prompt else tokens) > free:
                break
            running.append(waiting.popleft())
            admitted.append(request)
            held[request] = cache.need(tokens)
            free, left = free - held[request], left - tokens
            work[request] = tokens
        produced = []
        for request, tokens in work.items():
            computed[request] += tokens
            if computed[request] == input_len + made[request]:
                made[request] += 1
                produced.append(request)
        waiting.extend(coming)
        coming.clear()
        used = cache.blocks - free
        ended = [request for request in produced if made[request] == output_len]
        for request in ended:
            running.remove(request)
            free += held[request]
        yield Step(tuple(produced), tuple(admitted), tuple(evicted), tuple(ended), lost, len(running) + len(ended), len(waiting), used)


@lru_cache(maxsize=256)
def play(cache: Cache, requests: int, input_len: int, output_len: int, seats: int, budget: int, whole_prompt: bool = True,
         head: int | None = None) -> Outcome:
    """The outcome of `steps`. Arguments and errors as there."""
    preemptions = early = lost = peak = count = 0
    ended, batch = False, set()
    for step in steps(cache, requests, input_len, output_len, seats, budget, whole_prompt, head):
        count += 1
        preemptions += len(step.evicted)
        early += 0 if ended else len(step.evicted)
        batch |= set() if ended or step.ended else set(step.made)
        ended = ended or bool(step.ended)
        lost += step.lost_tokens
        peak = max(peak, step.running)
    return Outcome(preemptions, early, lost, len(batch), peak, count)
