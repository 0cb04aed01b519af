"""All rigs on one figure: each divided by its own scale, so that the same shape on another scale is the same curve."""

import math
import shutil

import pandas as pd
import pytest

from inference_wall import cliff_figures, evidence, laid_over, laid_over_figures, post, published, records, rigs
from inference_wall.site import mime

POSTS = ("part_1", "part_2", "part_4", "part_5")


@pytest.fixture(scope="module")
def committed():
    return {name: post.recorded(name, "cpu", committed_only=True) for name in rigs.protocol_names()}


@pytest.fixture(scope="module")
def alone(committed):
    """Each overlay with the CPU rig alone."""
    return {name: getattr(laid_over, name)([committed[name]]) for name in POSTS}


@pytest.mark.parametrize("name", POSTS)
def test_one_rig_and_the_published_figures_make_a_figure(alone, name):
    overlay = alone[name]
    assert {curve.rig for curve in overlay.curves} == {"cpu", published.RIG}, overlay.left_out
    figure = laid_over_figures.draw(overlay)
    assert not mime.unknown_trace_types(figure.to_dict())
    assert {trace.line.dash for trace in figure.data if trace.legendgroup == published.RIG} == {"dot"}
    words = figure.layout.meta["alt"]
    assert "cpu" in words and "a10g (published)" in words and overlay.x_title in figure.layout[f"xaxis{len(overlay.y_titles)}".rstrip("1")].title.text
    for curve in overlay.curves:
        assert (curve.rows["x"] > 0).all() and curve.rows["y"].map(math.isfinite).all()
        assert curve.rows["what"].str.contains(r"\d").all()  # the hover has the numbers before they were divided
        assert (curve.rows["from"].str.contains("published").all()) == curve.published


def scaled(run_frame, rate, time):
    """The same machine, `rate` times as fast and with latencies `time` times as long."""
    frame = run_frame.copy()
    for column in ("request_rate", "steady_req_s", "steady_offered_req_s", "completed_req_s"):
        frame[column] = frame[column] * rate
    latencies = [column for column in frame if column.endswith("_ms")]
    return frame.assign(**{column: frame[column] * time for column in latencies}, rig="h200-27b")


def test_a_machine_on_another_scale_lies_on_the_same_curve(committed, monkeypatch):
    """The purpose of the division: speed and patience of a machine drop out, its shape stays."""
    arms = committed["part_1"]
    before = laid_over.part_1([arms])
    original = records.points_frame
    monkeypatch.setattr(records, "points_frame", lambda run: scaled(original(run), 100.0, 0.01))
    slo = arms.first.document["settings"]["slo"]
    monkeypatch.setitem(slo, "ttft_s", slo["ttft_s"] * 0.01)
    after = laid_over.part_1([arms])
    for old, new in zip(before.curves[:2], after.curves[:2], strict=True):
        pd.testing.assert_frame_equal(old.rows[["x", "y", "low", "high"]], new.rows[["x", "y", "low", "high"]])
    assert 1.0 == before.curves[0].rows["y"].iloc[0]


def test_a_rig_without_a_knee_is_left_out_and_named(committed, monkeypatch):
    monkeypatch.setattr(laid_over, "knee", lambda frame, slo, real=laid_over.knee: real(frame, slo) if slo == {"completed_ratio": 0.0} else
                        {"bracket": [None, None], "status": "no knee in range", "slo": {"ttft_percentile": 90}})
    overlay = laid_over.part_1([committed["part_1"]])
    assert overlay.left_out == {"cpu": "no knee in range"} and {curve.rig for curve in overlay.curves} == {published.RIG}
    assert "cpu is left out: no knee in range" in laid_over_figures.draw(overlay).layout.meta["alt"]


def test_every_arm_of_part_2_has_its_mark_and_the_range_of_its_injections(alone, committed):
    curve = alone["part_2"].curves[0]
    assert len(curve.rows) == len(committed["part_2"].testable)
    assert (curve.rows["low"] <= curve.rows["y"]).all() and (curve.rows["y"] <= curve.rows["high"]).all()
    assert curve.rows["y"].is_monotonic_increasing  # more of a prompt in a step, a longer stall


def test_part_4_divides_by_the_requests_of_each_flood(alone):
    curve = alone["part_4"].curves[0]
    counted = curve.rows["what"].str.extract(r"(\d+) preemptions of (\d+) requests").astype(float)
    assert (curve.rows["y"] == counted[0] / counted[1]).all() and curve.rows["y"].max() > 0


def test_an_invalid_point_is_hollow(alone):
    curve = alone["part_4"].curves[0]
    broken = laid_over.Curve(curve.rig, curve.name, curve.rows.assign(valid=False), joined=False)
    overlay = laid_over.Overlay("x", "x", ("y",), (False,), [broken], {}, "x.csv")
    assert all(symbol.endswith("-open") for symbol in laid_over_figures.draw(overlay).data[0].marker.symbol)


def test_part_3_hands_every_machine_to_the_one_curve(committed):
    machines = laid_over.part_3([committed["part_3"]])
    assert [machine["rig"] for machine in machines] == ["cpu", published.RIG]
    assert "a10g (published)" in cliff_figures.on_one_curve(machines).layout.meta["alt"]


def test_the_page_comes_first_then_the_others_in_their_order(committed, tmp_path, monkeypatch):
    folder = committed["part_4"].first.path.parent
    for rig in ("cpu", "h200-4b", "h200-27b"):
        shutil.copytree(folder, tmp_path / "part_4" / rig)
    monkeypatch.setenv("WALL_BENCHMARKS", str(tmp_path))
    shown = evidence.sets("part_4")["cpu"]
    found = laid_over.beside(shown)
    assert found[0] is shown and len(found) == 3


@pytest.mark.parametrize("name", rigs.protocol_names())
def test_every_post_shows_it_once(name):
    text = (rigs.root() / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(f"laid_over.{name}(laid_over.beside(arms))") == 1
