"""The freeze: which gap belongs to which window, and what the counts say, on rows that were laid out by hand."""

import dataclasses
import math
from functools import cache

import numpy as np
import pandas as pd
import pytest
from synthetic_freeze import arm_set, load, refused, run, whole_set

from inference_wall import freeze, freeze_bound, freeze_floor
from inference_wall.samples import token_gaps


@cache
def whole():
    return freeze.read(whole_set())


def rows(victims, injected):
    """Requests and chunks from seconds. victims: {request: [token times]}; injected: [(round, sent, first token or None, end or None)]."""
    def unit(value):
        return None if value is None else round(value * 1e5)

    requests = [{"request": number, "role": "victim", "stream": number, "round": None, "sent": 0, "first_token": unit(times[0]),
                 "end": unit(times[-1])} for number, times in victims.items()]
    requests += [{"request": 100 + number, "role": "injected", "stream": None, "round": turn, "sent": unit(sent), "first_token": unit(first),
                  "end": unit(end)} for number, (turn, sent, first, end) in enumerate(injected)]
    frame = pd.DataFrame(requests).astype({"first_token": "Int64", "end": "Int64", "round": "Int16", "stream": "Int16"})
    frame["intended"], frame["prompt_tokens"] = frame["sent"], 8
    frame["outcome"] = ["completed" if pd.notna(end) else "failed" for end in frame["end"]]
    chunks = pd.DataFrame([{"request": number, "time": unit(time), "tokens": 1} for number, times in victims.items() for time in times])
    return frame, chunks


def places(requests, chunks):
    found = freeze.gaps(requests, chunks)
    return dict(zip(found["end_s"].round(5), found["where"], strict=True))


def test_each_gap_gets_its_place_by_the_written_rule():
    # Injected at 2.5, first token at 5.0, answered at 7.0.
    requests, chunks = rows({0: [1.0, 2.0, 3.0, 4.5, 5.0, 6.0, 7.0, 8.0]}, [(0, 2.5, 5.0, 7.0)])
    assert places(requests, chunks) == {
        2.0: "calm",    # over before the injection
        3.0: "window",  # under way when it was sent
        4.5: "window", 5.0: "window",
        6.0: "tail",    # began as the first token came
        7.0: "tail",
        8.0: "calm",    # began as the answer ended
    }  # fmt: skip
    assert freeze.gaps(requests, chunks)["gap_s"].tolist() == pytest.approx([1, 1, 1.5, 0.5, 1, 1, 1])


def test_a_gap_that_ends_as_the_injection_leaves_is_calm():
    requests, chunks = rows({0: [1.0, 2.0, 3.0]}, [(0, 2.0, 2.5, 2.6)])
    assert places(requests, chunks) == {2.0: "calm", 3.0: "window"}


def test_the_window_lasts_until_the_last_of_several_prompts_has_its_first_token():
    requests, chunks = rows({0: [1.0, 2.0, 3.0, 4.0, 5.0]}, [(0, 1.5, 2.0, 9.0), (0, 1.4, 3.5, 4.5)])
    window = freeze.rounds(requests).iloc[0]
    assert (window["sent_s"], window["last_first_s"], window["last_end_s"], window["injected"]) == pytest.approx((1.4, 3.5, 9.0, 2))
    assert places(requests, chunks) == {2.0: "window", 3.0: "window", 4.0: "window", 5.0: "tail"}


def test_a_stall_over_two_rounds_counts_once_when_pooled_and_in_both_rounds():
    requests, chunks = rows({0: [1.0, 1.5, 9.0, 9.5]}, [(0, 2.0, 4.0, 5.0), (1, 6.0, 8.0, 8.5)])
    found, windows = freeze.gaps(requests, chunks), freeze.rounds(requests)
    stall = found[found["gap_s"] > 1].iloc[0]
    assert (stall["where"], stall["round"], stall["windows"]) == ("window", 0, 2)
    each = freeze.by_round(found, windows)
    assert each["worst_s"].tolist() == pytest.approx([7.5, 7.5])
    assert freeze.populations(requests, chunks)["window"]["n"] == 1


def test_the_first_gap_of_a_request_is_ttft_and_never_a_gap():
    requests, chunks = rows({0: [3.0, 3.1, 3.2]}, [(0, 1.0, 2.0, 2.5)])
    result = freeze.populations(requests, chunks)
    assert result["all"]["n"] == 2 and result["all"]["max_ms"] == pytest.approx(100.0)
    assert result["victim_ttft"]["max_ms"] == 3000.0 and result["victim_ttft_window"]["n"] == 1


def test_gaps_are_those_of_the_shared_rule_and_bundled_tokens_count():
    requests, chunks = rows({0: [1.0, 2.0, 4.0], 1: [1.5, 2.5]}, [(0, 1.6, 1.8, 2.0)])
    chunks.loc[1, "tokens"] = 3
    assert sorted(freeze.gaps(requests, chunks)["gap_s"]) == pytest.approx(sorted(token_gaps(chunks)))


def test_a_victim_that_failed_in_the_stall_keeps_its_gaps_and_its_silence_is_told():
    requests, chunks = rows({0: [1.0, 2.0, 3.0], 1: [1.0, 2.0]}, [(0, 2.5, 6.0, 6.5)])
    requests.loc[1, ["outcome", "end"]] = ["failed", 950_000]
    result = freeze.populations(requests, chunks)
    assert result["all"]["n"] == 3
    assert result["unfinished_gap_ms"] == pytest.approx(7500.0)
    assert result["outcomes"]["victim"] == {"completed": 1, "failed": 1}


def test_a_round_whose_prompts_never_answered_is_neither_calm_nor_window():
    requests, chunks = rows({0: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}, [(0, 2.5, None, 4.5)])
    assert places(requests, chunks) == {2.0: "calm", 3.0: "unclear", 4.0: "unclear", 5.0: "unclear", 6.0: "calm"}
    result = freeze.populations(requests, chunks)
    assert result["window"]["n"] == 0 and result["window"]["empty"] == "no sample" and result["window"]["max_ms"] is None
    assert (result["rounds"], result["rounds_without_window"]) == (1, 1)
    assert result["lost_ms"] is None and result["lost_reason"]
    assert len(freeze.widening(freeze.gaps(requests, chunks), freeze.rounds(requests))) == 0


def test_victims_that_ended_early_leave_an_empty_window_not_a_zero():
    requests, chunks = rows({0: [0.1 * k for k in range(1, 11)]}, [(0, 5.0, 6.0, 7.0)])
    result = freeze.populations(requests, chunks)
    assert result["calm"]["n"] == 9 and result["window"]["n"] == 0
    assert result["worst_by_round_ms"] == [] and result["hurt"]["window"] == 0


def test_no_injection_at_all():
    requests, chunks = rows({0: [0.1 * k for k in range(1, 11)]}, [])
    result = freeze.populations(requests, chunks)
    assert result["rounds"] == 0 and result["calm"]["n"] == result["all"]["n"] == 9
    assert result["injected_ttft"]["n"] == 0 and result["prompt_tokens"] is None


def test_points_are_not_mixed_although_their_request_numbers_are_equal():
    requests, chunks = rows({0: [1.0, 2.0, 3.0]}, [(0, 1.5, 2.5, 2.6)])
    late = [frame.assign(point=1) for frame in rows({0: [11.0, 12.0, 13.0]}, [(0, 15.0, 16.0, 17.0)])]
    both = [pd.concat([frame.assign(point=0), other]) for frame, other in zip((requests, chunks), late, strict=True)]
    found = freeze.gaps(*both)
    assert found["gap_s"].tolist() == pytest.approx([1.0] * 4)
    assert found["where"].tolist() == ["window", "window", "calm", "calm"]


def test_hurt_tokens_and_lost_time_by_hand():
    # A step of 20 ms; 1,000 prompt tokens in 4 steps of 250 cost 20 + 125 ms each; two victims, two rounds.
    result = freeze.populations(*load(250))
    assert result["calm"]["p50_ms"] == 20.0
    assert result["window"]["max_ms"] == 145.0
    # In a window lie the gap that was under way at the injection, which is not hurt, and the slices, which are.
    assert result["hurt"]["window"] == result["hurt"]["broad"] == 2 * 2 * 4 and result["hurt"]["calm"] == 0
    assert result["lost_ms"] == pytest.approx(500.0)  # 1,000 tokens at 0.5 ms, whatever the size of a slice
    assert freeze.populations(*load(1000))["lost_ms"] == pytest.approx(500.0)
    assert result["hurt"]["limit_ms"] == pytest.approx(60.0)
    assert result["worst_by_round_ms"] == [145.0, 145.0]
    assert result["reading_by_round_ms"] == [4 * 145.0 + 10.0] * 2  # sent half a step before the first slice


def test_a_calm_median_of_zero_gives_no_hurt_count():
    requests, chunks = rows({0: [float(k) for k in range(1, 12)]}, [(0, 20.0, 21.0, 22.0)])
    hurt = freeze.populations(requests, chunks.assign(tokens=4))["hurt"]
    assert hurt["broad"] is None and "bundled" in hurt["reason"]


def test_widening_starts_with_the_window_and_ends_with_everything():
    requests, chunks = load(1000, calm=400, rounds=4)  # 8 hurt tokens: in the p99 up to 799 tokens
    found, windows = freeze.gaps(requests, chunks), freeze.rounds(requests)
    wide = freeze.widening(found, windows)
    assert wide["n"].iloc[0] == (found["where"] == "window").sum() and wide["n"].iloc[-1] == len(found)
    assert wide["max_ms"].nunique() == 1  # the same stall all along
    assert wide["seconds"].is_monotonic_increasing and wide["seconds"].iloc[0] == 0
    known = wide["p99_ms"].dropna()
    assert known.iloc[0] == 520.0 and known.iloc[-1] == 20.0  # the p99 forgets it
    assert wide["p99_ms"].isna().iloc[0]  # so few gaps bear no p99


def test_hides_after_counts_the_tokens_that_a_p99_leaves_out():
    cases = whole()
    case = cases["chunked-250", "light"]  # 8 hurt tokens an injection
    tokens, seconds, why = freeze.hides_after(case)
    assert (tokens, why) == (800, "") and seconds == pytest.approx(800 * 0.020 / 2)
    gaps = np.r_[np.full(8, 1.0), np.zeros(792)]
    assert freeze.percentile(gaps, 99) == 0.0 and freeze.percentile(gaps[:-1], 99) == 1.0


# --- arms -------------------------------------------------------------------------------------------------------------


def test_read_gives_each_arm_and_load_and_leaves_out_what_was_refused():
    cases = freeze.read(arm_set(run("chunked-250", 250), refused()))
    assert list(cases) == [("chunked-250", "light"), ("chunked-250", "heavy")]
    assert cases["chunked-250", "heavy"].injected == 3


@pytest.mark.parametrize(("arm", "load_name", "tokens"), [
    ("chunked-250", "light", 248),   # two victims take a token each
    ("unchunked", "light", 1000),
    ("unchunked", "heavy", 1000),    # room for 1,998: one whole prompt
])
def test_tokens_of_the_fullest_step(arm, load_name, tokens):
    assert whole()[arm, load_name].step_tokens == tokens


def test_a_budget_above_the_prompt_is_limited_by_the_prompt_and_by_the_seats():
    cases = freeze.read(arm_set(run("chunked-5000", 5000)))
    assert cases["chunked-5000", "light"].step_tokens == 1000
    assert cases["chunked-5000", "heavy"].step_tokens == 3000
    narrow = run("chunked-5000", 5000)
    narrow.document["flags"]["max-num-seqs"] = 4
    assert freeze.read(arm_set(narrow))["chunked-5000", "heavy"].step_tokens == 2000


def test_an_arm_that_did_the_opposite_is_not_used():
    stubborn = run("unchunked", 2000)  # the log says that chunking is on
    cases = freeze.read(arm_set(run("chunked-250", 250), stubborn))
    assert not cases["unchunked", "light"].as_asked
    assert "off" not in freeze.roles(cases, "light") and freeze.roles(cases, "light")["smallest"].arm == "chunked-250"


def test_invalid_points_are_kept_apart_and_marked():
    bad = run("chunked-250", 250)
    bad.points[0]["validity"] = {"valid": False, "reasons": ["drift"]}
    case = freeze.read(arm_set(bad))["chunked-250", "light"]
    assert not case.usable and case.reasons == ["drift"] and case.populations["window"]["n"] > 0
    assert freeze.roles({("chunked-250", "light"): case}, "light") == {}


def test_roles_choose_by_budget_and_never_by_the_result():
    found = freeze.roles(whole(), "light")
    assert {name: case.arm for name, case in found.items()} == {"off": "unchunked", "smallest": "chunked-100", "largest": "chunked-500"}
    lucky = arm_set(run("chunked-500", 500), run("chunked-100", 100))
    _, chunks = lucky.runs["chunked-500"]._frames[0]
    chunks.loc[:, "time"] = chunks["time"] // 100  # the large budget looks far better
    assert freeze.roles(freeze.read(lucky), "light")["smallest"].arm == "chunked-100"


@pytest.mark.parametrize(("mine", "other", "way"), [
    ([3.0, 4.0], [1.0, 2.0], 1), ([1.0, 2.0], [3.0, 4.0], -1), ([1.0, 3.0], [2.0, 4.0], 0), ([1.0, 2.0], [2.0, 3.0], 0),
    ([9.0], [1.0, 2.0], None), ([], [1.0, 2.0], None),
])
def test_rounds_are_apart_only_where_the_ranges_do_not_meet(mine, other, way):
    assert freeze.apart(mine, other) == way


def test_with_many_rounds_one_stray_value_does_not_hide_a_difference():
    low, high = [40.0 + each / 10 for each in range(30)], [80.0 + each / 10 for each in range(30)]
    for mine, other, way in (([*high, 15.0], low, 1), (low, [*high, 15.0], -1), ([*low, 90.0], [*low, 10.0], 0)):
        assert freeze.apart(mine, other) == way and not freeze.disjoint(mine, other)
    few = freeze.MANY - 1
    assert freeze.apart([*high[:few - 1], 15.0], low[:few]) == 0, "few rounds are judged by their ranges"


def with_floor(fixed, per_token, calm=4.0):
    """The whole set, its stalls on a given line."""
    cases = whole()
    return {key: dataclasses.replace(case, populations=case.populations | {
        "worst_by_round_ms": [fixed + per_token * case.step_tokens] * 2, "calm": case.populations["calm"] | {"p50_ms": calm}})
        for key, case in cases.items()}


def test_a_floor_is_most_of_the_smallest_step_and_more_than_an_ordinary_one():
    found = freeze_bound.floor(with_floor(45.0, 0.01))
    assert found["fixed_ms"] == pytest.approx(45) and found["ms_per_token"] == pytest.approx(0.01)
    assert found["share"] == pytest.approx(45 / (45 + 0.01 * found["tokens"]))
    assert freeze_bound.floor(with_floor(45.0, 1.0)) is None, "the tokens are most of it"
    assert freeze_bound.floor(with_floor(45.0, 0.01, calm=40.0)) is None, "that is an ordinary step"
    assert freeze_bound.floor({}) is None


def test_the_words_about_the_floor_follow_it():
    cases = with_floor(45.0, 0.01)
    said = freeze_floor.floor_sentence(cases)
    assert "45.0 ms for any step that reads" in said and "0.010 ms" in said and "price of steps" in said
    assert "4,500 in a step" in freeze_floor.takeaway(cases)
    assert freeze_floor.floor_sentence(whole()) == freeze_floor.takeaway(whole()) == ""


# --- what is expected ---------------------------------------------------------------------------------------------------


def test_the_cost_is_read_at_the_smallest_budget_and_its_ordinary_steps_are_taken_off():
    expected, why = freeze_bound.expectation(whole())
    assert expected.source.arm == "chunked-100" and expected.source.load == "light" and why == ""
    assert expected.steps == 11  # 98 tokens each
    # Sent half a step early: 10 ms + 11 steps of 20 ms + 500 ms for the tokens.
    assert expected.ms_per_token == pytest.approx((10 + 11 * 20 + 500 - 11 * 20) / 1000)
    assert expected.step_ms(1000) == pytest.approx(20 + 510)
    assert freeze_bound.expectation({}) == (None, "no arm has a valid load in which the long prompts were read")


def test_a_step_of_the_same_size_is_no_test_on_whatever_server_or_load():
    cases = whole()
    expected, _ = freeze_bound.expectation(cases)
    tested = {(case.arm, case.load) for case, _ in freeze_bound.ratios(cases, expected)}
    assert tested == {(arm, name) for arm in ("chunked-250", "chunked-500", "unchunked") for name in freeze.LOADS}
    twins = freeze.read(arm_set(run("chunked-3002", 3002), run("unchunked", 1002, whole=True)))  # one prompt, one step, two servers
    expected, _ = freeze_bound.expectation(twins)
    assert expected.steps == 1 and [(case.arm, case.load) for case, _ in freeze_bound.ratios(twins, expected)] == [("chunked-3002", "heavy")]


def test_the_expectation_does_not_move_with_the_stalls_that_it_is_held_against():
    """The kind of error: a bound that is read from the thing it bounds agrees with it whatever happens."""
    def ratio(factor):
        slow = run("unchunked", 2_000, whole=True)
        for requests, chunks in slow._frames.values():
            chunks["time"] = chunks["time"] * factor
            for name in ("sent", "first_token", "end"):
                requests[name] = requests[name] * factor
        cases = freeze.read(arm_set(run("chunked-100", 100), slow))
        return next(ratio for case, ratio in freeze_bound.ratios(cases, freeze_bound.expectation(cases)[0]) if case.load == "light")

    assert ratio(1) == pytest.approx(520 / 530) and ratio(3) == pytest.approx(3 * 520 / 530)


def test_no_visible_cost_gives_no_expectation():
    free = run("chunked-100", 100)
    for requests, _ in free._frames.values():
        requests.loc[requests["role"] == "injected", "first_token"] = requests.loc[requests["role"] == "injected", "sent"] + 10
    expected, why = freeze_bound.expectation(freeze.read(arm_set(free)))
    assert expected is None and "no visible cost" in why


# --- time lost ----------------------------------------------------------------------------------------------------------


def waiting(calm_waits=6):
    """Two victims, a step of 1 s. From 100 to 110 a prompt is read: one victim has a gap of 10 s, the other asked at 100.5 and waits 10.5 s.
    Before that `calm_waits` requests of the second waited 2 s each."""
    times = {0: [*range(60, 101), 110, 111], 1: [111.0, 112.0]}
    times |= {10 + number: [10.0 * number + 12, 10.0 * number + 13] for number in range(calm_waits)}
    requests, chunks = rows(times, [(0, 100.0, 110.0, 111.0)])
    requests.loc[requests["request"] >= 10, "stream"] = 1
    requests = requests.assign(stream=requests["stream"].where(requests["role"] == "victim"))
    sent = {0: 58.0, 1: 100.5} | {10 + number: 10.0 * number + 10 for number in range(calm_waits)}
    victims = requests["role"] == "victim"
    requests.loc[victims, "sent"] = (requests.loc[victims, "request"].map(sent) * 1e5).astype(int)
    return requests, chunks


def test_a_victim_that_only_waited_lost_time_too():
    result = freeze.populations(*waiting())
    assert result["calm"]["p50_ms"] == 1000.0 and result["victim_ttft_calm"]["p50_ms"] == 2000.0
    # A gap of 10 s less 1 s, a wait of 10.5 s less 2 s, over two victims.
    assert result["lost_between_ms"] == pytest.approx(4500.0) and result["lost_waiting_ms"] == pytest.approx(4250.0)
    assert result["lost_ms"] == pytest.approx(8750.0) and result["lost_by_round_ms"] == [8750.0] and result["lost_waits"] == 1


def test_time_lost_is_withheld_where_a_wait_has_nothing_to_be_compared_with():
    result = freeze.populations(*waiting(calm_waits=2))
    assert result["lost_ms"] is None and "calm waits" in result["lost_reason"]
    assert freeze.populations(*waiting(calm_waits=2), calm_wait_ms=2000.0)["lost_ms"] == pytest.approx(8750.0)


def test_the_calm_wait_is_that_of_all_loads_of_one_server():
    # Two victims ask once in each load, so that each load alone has two waits of 20 ms, and the medians need five.
    three = arm_set(run("chunked-250", 250))
    only = three.runs["chunked-250"]
    assert freeze.read(three)["chunked-250", "light"].populations["calm_wait_ms"] is None
    only.points.append(only.points[0] | {"point": 2})
    only._frames[2] = only._frames[0]
    assert freeze.read(three)["chunked-250", "heavy"].populations["calm_wait_ms"] == 20.0


# --- the line through the stalls ----------------------------------------------------------------------------------------


def test_the_cost_of_a_prompt_token_comes_out_of_the_stalls():
    cost = freeze_bound.prefill_cost(whole())
    # Steps hold 98, 248, 498 and 1,000 prompt tokens, at both loads.
    assert cost["ms_per_token"] == pytest.approx(0.5) and cost["fixed_ms"] == pytest.approx(20.0) and cost["n"] == 8
    assert cost["tok_s"] == pytest.approx(2000)
    few = freeze_bound.prefill_cost(freeze.read(arm_set(run("chunked-250", 250))))
    assert few["ms_per_token"] is None and "needs 3" in few["reason"] and math.isfinite(few["n"])
