"""Plans: what is measured, in which order, follows from rig and parameters alone."""

import math

import pytest

from inference_wall import plans, rigs
from inference_wall.errors import WallError

RIG = rigs.load_rig("cpu")
FLAGS = RIG.engine["flags"]


def plan(post, values=None, arm=0, ceiling=None):
    values = rigs.check_parameters(rigs.load_protocol(post), values or {})
    chosen = plans.settings(RIG, post, values)
    return plans.points(post, chosen, values, plans.arms(post, chosen, FLAGS)[arm], ceiling)


def arms(post, values=None):
    values = rigs.check_parameters(rigs.load_protocol(post), values or {})
    return plans.arms(post, plans.settings(RIG, post, values), FLAGS)


def test_order_seeds_and_scale():
    points = [point for point in plan("part_1", {"rates": "1,inf", "repeats": 2, "scale": 0.5}) if point.pass_name != "trace"]
    assert [(p.pass_name, p.repeat, p.rate_label) for p in points] == [
        ("cold", 0, "1"), ("cold", 0, "inf"), ("measured", 0, "1"), ("measured", 0, "inf"), ("measured", 1, "1"), ("measured", 1, "inf")]
    assert [p.index for p in points] == list(range(6))
    assert len({p.seed for p in points}) == 6
    assert points[2].num_prompts == RIG.posts["part_1"]["num_prompts"] // 2
    assert points[1].request_rate is None and points[0].as_dict()["pass"] == "cold"


def test_a_seed_stays_when_another_rate_is_added():
    few = {p.rate_label: p.seed for p in plan("part_1", {"rates": "1,2"}) if p.pass_name == "measured"}
    more = {p.rate_label: p.seed for p in plan("part_1", {"rates": "1,1.5,2"}) if p.pass_name == "measured"}
    assert few.items() <= more.items()


def test_rates_as_shares_of_the_ceiling_follow_the_calibration():
    first, full = plan("part_1"), plan("part_1", ceiling=1.234)
    assert [(p.pass_name, p.rate_label) for p in first] == [("cold", "inf"), ("calibration", "inf")]
    assert [p.as_dict() for p in full[:2]] == [p.as_dict() for p in first]
    shares = [share for share in plans.settings(RIG, "part_1", {})["rate_fractions"] if not math.isinf(share)]
    measured = [p.request_rate for p in full if p.pass_name == "measured"]
    assert measured == [float(f"{share * 1.234:.2g}") for share in shares] + [None]
    assert [p.request_rate for p in full if p.pass_name == "cold"][1:] == measured[:-1]


@pytest.mark.parametrize("post", rigs.protocol_names())
def test_every_point_of_every_arm_has_its_own_number_and_its_own_prompts(post):
    for number in range(len(arms(post))):
        points = plan(post, arm=number, ceiling=2.0)
        assert [point.index for point in points] == list(range(len(points)))
        assert len({point.seed for point in points}) == len(points)
        passes = [point.pass_name for point in points]
        assert (passes[0] == "cold" and passes == sorted(passes, key=["cold", "calibration", "measured", "trace"].index)) or post == "part_1"


def test_an_arm_with_the_rigs_own_flags_is_the_rig_itself():
    assert [(arm.name, arm.is_base) for arm in arms("part_2")] == [
        ("chunked-2048", True), ("chunked-512", False), ("chunked-128", False), ("unchunked", False)]
    assert [(arm.name, arm.flags) for arm in arms("part_3", {"caps": "1,16"})] == [("cap-16", {}), ("cap-1", {"max-num-seqs": 1})]
    assert [arm.name for arm in arms("part_4", {"blocks": "20,17"})] == ["natural", "blocks-20", "blocks-17"]


def test_all_posts_on_the_cpu_rig_need_at_most_eight_servers():
    configurations = {(tuple(sorted(arm.flags.items())), arm.model.get("embedded")) for post in rigs.protocol_names() for arm in arms(post)}
    assert len(configurations) <= 8


def test_variants_are_chosen_by_name_and_the_first_one_stays():
    assert [arm.name for arm in arms("part_5")] == ["float32", "int8", "bigger-int8"]
    assert [arm.name for arm in arms("part_5", {"variants": "int4"})] == ["float32", "int4"]
    with pytest.raises(WallError, match="no variant 'int3'") as caught:
        arms("part_5", {"variants": "int3"})
    assert "int8" in caught.value.remedy


def test_random_weights_get_no_check_of_quality():
    loads = [{point.load for point in plan("part_5", arm=number)} for number in range(3)]
    assert "quality" in loads[0] and "quality" in loads[1] and "quality" not in loads[2]


def test_scale_shrinks_prompts_and_rounds_but_no_batch():
    whole, small = plan("part_2"), plan("part_2", {"scale": 0.25})
    assert [p.rounds for p in whole if p.pass_name == "measured"] == [4, 2] and [p.rounds for p in small if p.pass_name == "measured"] == [1, 1]
    assert {p.victims for p in small} == {RIG.posts["part_2"]["victims"]}
    assert {p.num_prompts for p in plan("part_4", {"scale": 0.1}) if p.pass_name == "measured"} == {RIG.posts["part_4"]["min_prompts"]}
    batches = [p.num_prompts for p in plan("part_3", {"scale": 0.1}) if p.load == "steps" and p.pass_name == "measured"]
    assert batches == RIG.posts["part_3"]["batches"]


@pytest.mark.parametrize(("post", "values", "said"), [
    ("part_3", {"batches": "1,4,1000"}, "at most 16"), ("part_5", {"batches": "1,4,1000"}, "at most 16"),
    ("part_3", {"concurrency": "32"}, "at most 16"),
    ("part_3", {"batches": "1,2"}, "bear no line"), ("part_5", {"batches": "1"}, "bear no line"), ("part_3", {"caps": "16"}, "no cliff"),
    ("part_4", {"blocks": "1"}, "engine's own"), ("part_2", {"victims": "16"}, "no seat"),
])
def test_what_no_server_could_show_is_refused_before_anything_starts(post, values, said):
    with pytest.raises(WallError, match=said) as caught:
        arms(post, values)
    assert caught.value.remedy


@pytest.mark.parametrize(("rate", "prompts"), [(4, 299), (6, 360), (8, 480), (11, 500), (math.inf, 500)])
def test_a_point_of_the_sweep_lasts_as_long_as_asked_and_bears_its_percentile(rate, prompts):
    chosen = {"num_prompts": 500, "point_s": 60, "slo": {"ttft_percentile": 99}}
    assert plans._sweep_prompts(chosen, rate) == prompts
    assert plans._sweep_prompts({**chosen, "point_s": None}, rate) == 500


def test_rates_below_the_mark_are_measured_once():
    rig = rigs.load_rig("h200-27b")
    settings = plans.settings(rig, "part_1", {})
    (arm,) = plans.arms("part_1", settings, {})
    measured = [point for point in plans.points("part_1", settings, {}, arm) if point.pass_name == "measured"]
    counts = {rate: sum(point.request_rate == rate for point in measured) for rate in (settings["rates"][0], settings["repeat_from"], None)}
    assert list(counts.values()) == [1, settings["repeats"], settings["repeats"]] and settings["rates"][0] < settings["repeat_from"]
