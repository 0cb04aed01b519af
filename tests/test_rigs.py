"""Rigs and protocols: every bad parameter is one clear error before anything starts."""

import math

import pytest

from inference_wall import plans, rigs
from inference_wall.errors import WallError


@pytest.fixture
def protocol():
    return rigs.load_protocol("part_1")


@pytest.mark.parametrize(("given", "said", "remedy"), [
    ({"rate": "1"}, "unknown parameter of part_1 'rate'", "did you mean 'rates'"),
    ({"rates": "-1"}, "must be above 0", ""),
    ({"rates": "nan"}, "not a number", ""),
    ({"rates": "0"}, "must be above 0", ""),
    ({"rates": "1,two"}, "could not convert", ""),
    ({"rates": "2,2"}, "given twice", ""),
    ({"rates": ","}, "no rate given", ""),
    ({"num_prompts": "0"}, "whole number", ""),
    ({"num_prompts": "2.5"}, "whole number", ""),
    ({"num_prompts": "inf"}, "whole number", ""),
    ({"scale": "0"}, "above 0", ""),
    ({"scale": "2"}, "at most 1", ""),
    ({"mode": "lives"}, "must be one of recorded, live", ""),
    ({"port": "80"}, "1024", ""),
    ({"port": "http"}, "could not convert", ""),
    ({"base_url": "127.0.0.1:8000"}, "must look like http://", ""),
    ({"rig": "h100"}, "unknown rig 'h100'", "known:"),
    ({"slo_ttft_s": "-1"}, "above 0", ""),
    ({"slo_completed_ratio": "95"}, "from 0 to 1", ""),
])
def test_a_bad_parameter_is_one_clear_error(protocol, given, said, remedy):
    with pytest.raises(WallError) as caught:
        rigs.check_parameters(protocol, given)
    assert said in caught.value.message
    assert remedy in caught.value.remedy
    assert caught.value.remedy


def test_good_parameters_are_converted(protocol):
    values = rigs.check_parameters(protocol, {"rates": "4, 1 inf", "scale": "0.5", "num_prompts": "7", "port": "8123"})
    assert values["rates"] == [1.0, 4.0, math.inf]
    assert (values["scale"], values["num_prompts"], values["port"]) == (0.5, 7, 8123)
    assert values["rig"] == "auto" and values["mode"] == "recorded"


def test_every_rig_file_loads_and_has_what_the_instrument_reads():
    for name in rigs.rig_names():
        rig = rigs.load_rig(name)
        assert rig.name == name
        if rig.kind == "published":
            continue
        assert rig.model["served_name"] and {"embedded", "shape", "path", "hub"} & set(rig.model)
        assert "trust-remote-code" not in rig.engine.get("flags", {})
        assert {"part_1", "part_2", "part_3"} <= set(rig.posts) <= set(rigs.protocol_names())
        for post in rig.posts:
            settings = plans.settings(rig, post, {})
            flags = {**rig.engine["flags"], **settings.get("flags", {})}
            arms = plans.arms(post, settings, flags)
            assert len({arm.name for arm in arms}) == len(arms) > 0
            for arm in arms:
                points = plans.points(post, settings, {}, arm, ceiling_req_s=1.0)
                assert {"cold", "measured", "trace"} >= {point.pass_name for point in points} - {"calibration"}
                assert all(point.longest <= flags["max-model-len"] for point in points), (name, post, arm.name)


def test_every_protocol_names_a_notebook_whose_parameters_cell_is_the_same_list(protocol):
    import jupytext

    for name in rigs.protocol_names():
        each = rigs.load_protocol(name)
        notebook = jupytext.read(rigs.root() / each.notebook)
        cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        assert len(cells) == 1
        assigned = [line.split("=")[0].strip() for line in cells[0].source.splitlines() if "=" in line.split("#")[0]]
        assert sorted(assigned) == sorted(each.parameters)


def test_a_rig_that_needs_a_gpu_says_so_without_one(monkeypatch):
    monkeypatch.setattr("inference_wall.hardware.gpus", lambda: [])
    with pytest.raises(WallError, match="no NVIDIA GPU"):
        rigs.require_hardware(rigs.load_rig("a10g"))
    assert rigs.pick_rig("auto").name == "cpu"


@pytest.mark.parametrize(("card", "memory", "expected"), [
    ("NVIDIA A10G", 22.5, "a10g"), ("NVIDIA L4", 22.5, "gpu"), ("Tesla T4", 8.0, "cpu"),
])
def test_auto_picks_the_rig_that_names_the_card_then_any_card_then_the_cpu(monkeypatch, card, memory, expected):
    monkeypatch.setattr("inference_wall.hardware.gpus", lambda: [{"name": card, "memory_total_gib": memory}])
    assert rigs.pick_rig("auto").name == expected


def test_a_published_rig_cannot_be_run():
    with pytest.raises(WallError, match="published"):
        rigs.pick_rig("a10g-published")
