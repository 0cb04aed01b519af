"""Cache starvation: the room formula, the scheduler's rules, believable zeros, and who was put out, on hand-made and on played records."""

import copy
import math
from functools import lru_cache

import pandas as pd
import pytest

from inference_wall import block_rules, cache_room, starvation, starvation_published, stats
from inference_wall.arms import ArmSet
from inference_wall.block_rules import Cache

# --- a record in the right shape, without a server ------------------------------------------------------------------------

LOADS = {"positive": (32, 224, 24), "balanced": (128, 128, 24), "long": (448, 32, 16)}
DENSE = {"num_hidden_layers": 30, "num_attention_heads": 9, "use_sliding_window": False, "sliding_window": 4096}
HYBRID = {"text_config": {"num_hidden_layers": 32, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8}}
DECODE, PREFILL, OWN = 2000, 4000, 300  # record units (10 us): a step, what a prompt adds, the spread of one step's chunks


class FakeRun:
    """What pages ask of a record, from rows made here."""

    def __init__(self, arm, blocks, block_size=128, length=2048, seats=16, state_blocks=0, config=DENSE):
        each = math.ceil(length / block_size) + state_blocks
        self.arm, self.name, self.not_testable, self.points, self._frames = arm, f"{arm}-made", None, [], {}
        self.path, self.is_local = None, True
        self.said = {"kv_cache_blocks": blocks, "block_size": block_size, "max_concurrency": round(blocks / each, 2),
                     "max_concurrency_tokens": length, "kv_cache_tokens": blocks * block_size, "max_num_batched_tokens": 2048,
                     "max_model_len": length}
        self.document = {"post": "part_4", "arm": arm, "rig": {"name": "cpu", "title": "made"}, "started": "2026-01-01T00:00:00+00:00",
                         "set_arms": None,
                         "engine": {"version": "0.32.0", "table_exact": True}, "flags": {"max-num-seqs": seats, "max-model-len": length},
                         "model": {"name": "made", "dtype": "float32", "weights": "checkpoint", "config": config},
                         "settings": {"repeats": 1}, "parameters": {"scale": 1.0},
                         "starts": [{"server": {"said": self.said, "ready_s": 20.0, "argv": ["vllm", "serve", "model"]}, "server_start": 0,
                                     "host": {}, "gpus": []}]}

    def add(self, load, repeat=0, counter=True, head=None, late=True):
        """One flood of a load, played with the rules; without `counter` the server does not export its preemptions.

        `head`: of `block_rules.steps`. `late`: the counter moves when a request comes back, as the engine's does; else when it is put out.
        """
        input_len, output_len, number = LOADS[load]
        cache, out = cache_room.cache_of(self)[0], set()
        zero = 10_000_000 * len(self.points) + 100_000
        now, total, chunks, samples = zero, 0, [], [(zero - 30_000, 0, 0, 0.0, 0)]
        first, end = {}, {}
        tokens_in = tokens_out = 0
        for step in block_rules.steps(cache, number, input_len, output_len, self.document["flags"]["max-num-seqs"], 2048, head=head):
            now += DECODE + PREFILL * len(step.admitted)
            total += len(out & set(step.admitted)) if late else len(step.evicted)
            out = (out - set(step.admitted)) | set(step.evicted)
            for place, request in enumerate(step.made):
                at = now + place * OWN // max(1, len(step.made))
                chunks.append((request, at, 1))
                first.setdefault(request, at)
                end[request] = at + 10
            samples.append((now, step.running, step.waiting, step.used_blocks / cache.blocks, total))
        tokens_in, tokens_out = number * input_len, len(chunks)
        samples.append((now + 30_000, 0, 0, 0.0, total))
        index = len(self.points)
        requests = pd.DataFrame({"point": index, "request": range(number), "intended": zero, "sent": [zero + each for each in range(number)],
                                 "first_token": [first[each] for each in range(number)], "end": [end[each] for each in range(number)],
                                 "prompt_tokens": input_len, "output_tokens": output_len, "outcome": "completed", "error": None})
        metrics = pd.DataFrame(samples, columns=["time", "running", "waiting", "kv_cache_usage", "preemptions_total"])
        metrics = metrics.assign(prompt_tokens_total=0.0, generation_tokens_total=0.0)
        metrics.loc[1:, "prompt_tokens_total"] = float(tokens_in)
        metrics.loc[1:, "generation_tokens_total"] = float(tokens_out)
        if not counter:
            metrics["preemptions_total"] = math.nan
        self.put(load, requests, pd.DataFrame(chunks, columns=["request", "time", "tokens"]), metrics, input_len, output_len, repeat)
        return self

    def put(self, load, requests, chunks, metrics, input_len, output_len, repeat=0):
        index = len(self.points)
        self._frames[index] = {"requests": requests, "chunks": chunks, "metrics": metrics}
        summary = stats.point_summary(requests, chunks, metrics, None, input_len, output_len)
        validity = stats.validity(requests, chunks, metrics, None, input_len, output_len, num_prompts=len(requests), prefix_caching=False)
        span = {"start_s": requests["sent"].min() * 1e-5, "end_s": requests["end"].max() * 1e-5}
        self.points.append({"point": index, "pass": "measured", "arm": self.arm, "load": load, "kind": "bench", "request_rate": None,
                            "rate_label": "inf", "repeat": repeat, "seed": 1, "num_prompts": len(requests), "input_len": input_len,
                            "output_len": output_len, **span, "overhead_s": 0.1, "server_start": 0,
                            "summary": summary, "validity": validity | {"valid": True, "reasons": []}})

    def frame(self, name, point=None):
        if point is None:
            return pd.concat([frames[name] for frames in self._frames.values()], ignore_index=True)
        return self._frames[point][name]

    def trace(self, point):
        return None


@lru_cache
def _made(cut_blocks, natural_blocks, loads, counter):
    runs = {}
    for arm, blocks in (("natural", natural_blocks), (f"blocks-{cut_blocks}", cut_blocks)):
        runs[arm] = FakeRun(arm, blocks)
        for load in loads:
            runs[arm].add(load, counter=counter)
    return runs


def made_set(cut_blocks=17, natural_blocks=182, loads=tuple(LOADS), counter=True, names=None):
    """Arms `natural` and `blocks-<n>` with one flood a load, played with the rules. A copy: a test may change it."""
    runs = copy.deepcopy(_made(cut_blocks, natural_blocks, loads, counter))
    return ArmSet("part_4", "cpu", names or list(runs), runs)


@pytest.fixture(scope="module")
def arms():
    return made_set()


# --- the room formula and the rules ---------------------------------------------------------------------------------------


def test_one_block_is_the_engines_own_and_concurrency_counts_it():
    run = FakeRun("blocks-17", 17)
    assert cache_room.cache_of(run) == (Cache(16, 128, 0), "")
    found = cache_room.room(run)
    assert found.formula == pytest.approx(17 / 16) and found.fits == 1 and found.agrees is True
    assert Cache(16, 128).room(32) == 16 and Cache(16, 128).room(255) == 8 and Cache(16, 128).room(257) == 5


@pytest.mark.parametrize(("config", "blocks", "why"), [
    (DENSE, 0, ""), (HYBRID, 3, ""), ({"layer_types": ["full_attention"] * 4}, 0, ""),
    ({"layer_types": ["linear_attention", "full_attention"]}, 1, ""),
    (None, None, "does not hold the model's configuration"), ({}, None, "does not hold"), ({"hidden_size": 8}, None, "does not name its layers"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, None, "another kind (sliding_attention)"),
    ({"layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2}, None, "3 linear-attention layers do not make whole groups of 2"),
    (DENSE | {"use_sliding_window": True}, None, "sliding_window"), (DENSE | {"mamba_d_state": 16}, None, "mamba_d_state"),
])
def test_blocks_of_state_come_from_the_layers(config, blocks, why):
    found, reason = cache_room.state_blocks(config)
    assert found == blocks and why in reason and (found is None) == bool(reason)


def test_formula_and_server_are_independent_where_the_layers_are_known():
    # Published for the A10G: 586 blocks of 528 tokens, 83.71 requests of 2,048. 24 linear layers to 8 full ones make 3 blocks of state.
    run = FakeRun("natural", 586, block_size=528, state_blocks=3, config=HYBRID)
    assert run.said["max_concurrency"] == 83.71 and cache_room.room(run).agrees is True
    run.said["max_concurrency"] = 97.67  # a server that counts 2 blocks of state: the formula must not follow it
    found = cache_room.room(run)
    assert found.cache == Cache(585, 528, 3) and found.formula == pytest.approx(586 / 7) and found.agrees is False


def test_without_a_configuration_the_servers_number_gives_the_blocks_and_is_no_check():
    for blocks, said in ((586, 83.71), (40, 5.71)):
        run = FakeRun("natural", blocks, block_size=528, state_blocks=3, config=None)
        found = cache_room.room(run)
        assert run.said["max_concurrency"] == said and found.cache == Cache(blocks - 1, 528, 3)
        assert found.agrees is None and not found.from_layers and "configuration" in found.layers_reason


def test_the_published_blocks_of_state_are_those_of_the_layers():
    assert starvation_published._state_blocks(starvation_published.author.table(starvation_published.RUNS_CSV), 528) == \
        cache_room.state_blocks(HYBRID)[0]


def test_a_cache_that_does_not_add_up_is_unknown():
    run = FakeRun("natural", 182, config=None)
    run.said["max_concurrency"] = 10.3
    cache, reason = cache_room.cache_of(run)
    assert cache is None and "which is not" in reason
    del run.said["kv_cache_blocks"]
    assert cache_room.cache_of(run) == (None, "the server did not say its kv_cache_blocks")


@pytest.mark.parametrize(("load", "whole_prompt", "counted"), [((64, 2000), False, 205), ((512, 512), False, 36), ((2000, 64), False, 19)])
def test_rules_come_within_two_of_the_published_positive_controls(load, whole_prompt, counted):
    found = block_rules.play(Cache(299, 16), 40, *load, 256, 2048, whole_prompt)
    assert abs(found.preemptions - counted) <= 2


def test_rules_give_the_published_counts_at_natural_caches_and_their_onset():
    # 4B: 586 blocks of 528 and 3 blocks of state; published 11 until the first completions, 17 in all. 7B: 92,496 tokens; 60.
    hybrid = block_rules.play(Cache(585, 528, 3), 200, 1024, 512, 256, 2048, False)
    assert (hybrid.preemptions, hybrid.before_first_end) == (17, 11)
    assert block_rules.play(Cache(92_496 // 16 - 1, 16), 200, 1024, 512, 256, 2048, False).preemptions == 60


def test_the_later_rule_lets_no_prompt_in_that_must_leave_at_once():
    assert block_rules.play(Cache(299, 16), 40, 2000, 64, 256, 2048, True).preemptions == 0


def test_two_requests_by_hand():
    # Four blocks of 2; two requests of 2 in, 3 out hold 4 tokens at most: both fit. With three blocks the later one leaves once.
    assert block_rules.play(Cache(4, 2), 2, 2, 3, 8, 100).preemptions == 0
    played = list(block_rules.steps(Cache(3, 2), 2, 2, 3, 8, 100))
    assert [step.evicted for step in played if step.evicted] == [(1,)]
    assert sum(step.lost_tokens for step in played) == 2
    assert [request for step in played for request in step.ended] == [0, 1]
    with pytest.raises(ValueError, match="one request needs 2 blocks"):
        block_rules.play(Cache(1, 2), 2, 2, 3, 8, 100)


def test_the_bound_of_the_positive_control_by_hand():
    found = starvation.bound(Cache(16, 128), 24, 32, 224, 16, 2048)
    assert (found["need_start"], found["need_end"], found["admitted"], found["fits"]) == (1, 2, 16, 8)
    assert found["demand"] == 32 and found["demand_over_room"] == 2 and found["must"] is True
    assert found["rules"] == 8 and found["rules_before"] == 8 and found["read_again"] == 8 * 128 and found["first_batch"] == 16
    # One step ahead, the first request ends alone and one of the eight comes back alone; that costs one more. A real server counted 9, too.
    assert (found["ahead_rules"], found["ahead_rules_before"]) == (9, 8)
    assert starvation.bound(Cache(181, 128), 24, 32, 224, 16, 2048)["must"] is False
    assert starvation.bound(Cache(16, 128), 24, 32, 224, None, 2048)["rules"] is None


def test_more_needed_than_there_is_does_not_mean_that_somebody_must_go():
    # 2 blocks of 4 tokens; two prompts of 4 read one a step, one token each: the first ends before the second would grow.
    found = starvation.bound(Cache(2, 4), 2, 4, 2, 2, 4)
    assert found["demand"] == 4 > found["usable"] and found["rules"] == found["ahead_rules"] == 0 and found["must"] is False
    assert starvation.bound(Cache(2, 4), 2, 4, 2, None, None)["must"] is True  # where the rules cannot be played, demand decides


def test_a_late_head_by_hand():
    # Room for both. The first request is alone in the first step, so it ends one step before the other.
    played = list(block_rules.steps(Cache(4, 2), 2, 2, 3, 8, 100, head=1))
    assert [step.admitted for step in played] == [(0,), (1,), (), ()] and [step.ended for step in played] == [(), (), (0,), (1,)]
    assert block_rules.play(Cache(4, 2), 2, 2, 3, 8, 100, head=1).first_batch == 2


def test_bounds_take_the_prompt_as_the_server_counted_it():
    arms = made_set()
    before = starvation.bounds(arms).set_index(["arm", "load"]).loc[("blocks-17", "balanced")]
    arms["blocks-17"].frame("requests", 1)["prompt_tokens"] += 1
    after = starvation.bounds(arms).set_index(["arm", "load"]).loc[("blocks-17", "balanced")]
    assert (before["input_len"], before["need_start"], after["input_len"], after["need_start"]) == (128, 1, 129, 2)
    assert (before["rules"], after["rules"]) == (8, 0)


def test_which_rule_an_engine_follows():
    assert [starvation.whole_prompt_rule(version) for version in ("0.18.0", "0.25.1", "0.32.0")] == [False, True, True]


# --- counts ---------------------------------------------------------------------------------------------------------------


def test_counts_of_a_played_set(arms):
    found = starvation.counts(arms).set_index(["arm", "load"])
    assert found.loc[("blocks-17", "positive"), ["preemptions", "before", "after", "excess", "excess_out", "pauses"]].tolist() == [8, 8, 0, 0, 0, 8]
    assert found.loc[("blocks-17", "positive"), ["first_batch", "head"]].tolist() == [16, 16]
    assert found.loc[("blocks-17", "positive"), "proof"] == "counted"
    # The long load moves nothing, but the same server's counter moved under the control.
    assert found.loc[("blocks-17", "long"), ["preemptions", "proof"]].tolist() == [0, "control"]
    # Nothing moved on the natural server: its zero is the arithmetic's, not the counter's.
    assert found.loc[("natural", "positive"), ["preemptions", "proof"]].tolist() == [0, "room"]


def test_a_points_metrics_reach_one_sample_beyond_it(arms):
    run = arms["blocks-17"]
    requests, _, metrics = starvation.raw_rows(run, 1)
    assert len(metrics) < len(run.frame("metrics"))
    assert metrics["time"].iloc[0] < requests["sent"].min() <= metrics["time"].iloc[1]
    assert metrics["time"].iloc[-2] <= requests["end"].max() < metrics["time"].iloc[-1]


def test_a_zero_without_a_control_is_unknown():
    found = starvation.counts(made_set(loads=("long",))).set_index(["arm", "load"])
    row = found.loc[("blocks-17", "long")]
    # 4 of 4 fit, but the cache was full: neither the counter nor the arithmetic vouches for the zero.
    assert row["raw"] == 0 and pd.isna(row["preemptions"]) and row["proof"] == "" and "proves nothing" in row["why"]


def test_a_zero_of_another_server_start_does_not_count():
    arms = made_set()
    arms["blocks-17"].points[2]["server_start"] = 1
    row = starvation.counts(arms).set_index(["arm", "load"]).loc[("blocks-17", "long")]
    assert pd.isna(row["preemptions"])


def test_an_absent_counter_is_null_with_a_reason():
    found = starvation.counts(made_set(counter=False))
    assert found["preemptions"].isna().all() and found["raw"].isna().all()
    assert (found["why"] == "this server exposes no preemptions_total").all()


def test_a_load_under_the_profiler_is_in_no_count_and_proves_no_zero():
    arms = made_set(loads=("long",))
    before = starvation.counts(arms)
    run = arms["blocks-17"].add("positive")
    run.points[-1] |= {"pass": "trace", "kind": "streams"}
    after = starvation.counts(arms)
    # Its counter moved, yet the zero of `long` stays unknown.
    assert run.points[-1]["summary"]["preemptions"] == 8 and after["load"].tolist() == ["long", "long"]
    assert after.drop(columns=["reasons"]).astype(str).equals(before.drop(columns=["reasons"]).astype(str))
    assert starvation.bounds(arms)["load"].tolist() == ["long", "long"]


def test_a_token_counter_is_not_compared_where_a_request_has_no_count():
    arms = made_set()
    arms["blocks-17"].frame("requests", 0).loc[3, "prompt_tokens"] = None
    row = starvation.counts(arms).set_index(["arm", "load"]).loc[("blocks-17", "positive")]
    assert pd.isna(row["excess"]) and row["excess_out"] == 0


def test_onset_and_steady_are_split_at_the_first_end():
    requests = pd.DataFrame({"sent": [0, 0, 0], "first_token": [100, 250, 350], "end": [300, 900, 800], "outcome": "completed"})
    requests[["sent", "first_token", "end"]] *= 100_000
    paused = pd.DataFrame({"start": [200, 290, 301]}) * 100_000
    found = starvation.onset(requests, paused)
    assert {name: round(value) for name, value in found.items()} == {"first_end_s": 300, "end_s": 900, "before": 2, "after": 1, "first_batch": 2}
    assert set(starvation.onset(requests.assign(outcome="failed"), paused).values()) == {None}


def test_a_counter_that_moves_at_the_return_is_found_late():
    for late, counted in ((True, 0), (False, 8)):
        run = FakeRun("blocks-17", 17).add("positive", late=late)
        requests, chunks, metrics = (run.frame(name, 0) for name in ("requests", "chunks", "metrics"))
        found = starvation.lateness(requests, starvation.pauses(requests, chunks), metrics)
        assert (found["begun"], found["counted"]) == (8, counted)
    assert starvation.lateness(requests, starvation.pauses(requests, chunks), metrics.assign(preemptions_total=math.nan)) is None


# --- who ------------------------------------------------------------------------------------------------------------------


def hand_made(streams):
    """Requests 0, 1, ... with token times in units of 1,000. Within a step, tokens come in the order in which `streams` names the requests."""
    chunks = pd.DataFrame([(request, time * 1000 + 10 * place, 1) for place, (request, times) in enumerate(streams.items()) for time in times],
                          columns=["request", "time", "tokens"])
    requests = pd.DataFrame([{"request": request, "intended": 0, "sent": request, "first_token": min(times) * 1000, "end": max(times) * 1000,
                              "outcome": "completed"} for request, times in streams.items()])
    return requests, chunks


def test_a_pause_is_a_stop_while_others_go_on():
    requests, chunks = hand_made({0: range(1, 11), 1: range(1, 11), 2: [1, 2, 3, 8, 9, 10]})
    found = starvation.pauses(requests, chunks)
    assert found[["request", "missed", "place", "behind", "tokens_before"]].values.tolist() == [[2, 5, 2, 0, 3]]
    assert found["pause_s"].tolist() == pytest.approx([5000 * 1e-5])


def test_a_slow_step_stops_everybody_and_is_not_a_pause():
    slow = [1, 2, 3, 9, 10, 11]
    assert starvation.pauses(*hand_made({0: slow, 1: slow})).empty


def test_a_victim_that_was_not_the_latest_is_seen():
    requests, chunks = hand_made({0: range(1, 12), 1: [1, 2, 3, 9, 10], 2: range(2, 12)})
    row = starvation.pauses(requests, chunks).iloc[0]
    assert (row["request"], row["place"], row["behind"]) == (1, 1, 1)


def test_the_order_within_a_step_is_that_of_the_list_not_of_sending():
    # Request 0 was sent first but stands last: it is the latest.
    requests, chunks = hand_made({1: range(1, 12), 2: range(1, 12), 0: [1, 2, 3, 9, 10]})
    row = starvation.pauses(requests, chunks).iloc[0]
    assert (row["request"], row["place"], row["behind"]) == (0, 2, 0)


def test_who_is_put_out_in_the_same_step_does_not_stand_behind():
    requests, chunks = hand_made({0: range(1, 12), 1: [1, 2, 3, 9, 10], 2: [1, 2, 3, 9, 10]})
    assert starvation.pauses(requests, chunks)[["place", "behind"]].values.tolist() == [[1, 0], [1, 0]]


def test_work_done_twice_is_read_from_either_mark():
    columns = ["context_requests", "context_tokens", "generation_requests", "generation_tokens"]
    steps = pd.DataFrame([(0, 0, 8, 8), (0, 0, 8, 903), (7, 903, 1, 1), (2, 64, 8, 8)], columns=columns)
    assert starvation.read_again(steps, 32).tolist() == [0, 895, 896, 0]
    assert starvation.read_again(steps, None).tolist() == [0, 895, 0, 0]  # a long context may be a prompt


def test_victims_of_a_played_flood_are_the_latest(arms):
    run = arms["blocks-17"]
    found = starvation.pauses(run.frame("requests", 0), run.frame("chunks", 0))
    assert sorted(found["request"]) == list(range(8, 16)) and (found["behind"] == 0).all()


def test_price_compares_the_same_load(arms):
    found = starvation.price(starvation.counts(arms), "natural", "blocks-17").set_index("load")
    assert found.loc["positive", "duration_x"] > 1.2 and found.loc["positive", "cut_completed"] == 24
    assert found.loc["positive", "cut_stall_max_ms"] > 3 * found.loc["positive", "natural_stall_max_ms"]
