"""The command line: bad input is one clear error with a remedy and an exit status, before anything starts."""

import importlib.util
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from inference_wall import cli, jobs, regenerate


@pytest.fixture
def nothing_starts(monkeypatch):
    def started(*_args, **_options):
        raise AssertionError("something was started")

    monkeypatch.setattr(regenerate, "execute", started)
    monkeypatch.setattr(jobs, "model_folder", started)


@pytest.mark.parametrize(("arguments", "said", "remedy"), [
    (["run", "part_9"], "unknown post 'part_9'", "part_1"),
    (["run", "part_1", "-p", "rate=1"], "unknown parameter of part_1 'rate'", "did you mean 'rates'"),
    (["run", "part_1", "-p", "rates=-1"], "must be above 0", "Offered loads"),
    (["run", "part_1", "-p", "rates=NaN"], "not a number", "Offered loads"),
    (["run", "part_1", "-p", "rates"], "is not NAME=VALUE", "rates=1,2,inf"),
    (["run", "part_1", "--rig", "h100"], "unknown rig 'h100'", "known:"),
    (["run", "part_1", "--rig", "a10g-published"], "cannot be run", "choose a rig"),
    (["run", "part_1", "--rig", "a10g"], "no NVIDIA GPU", "--rig cpu"),
    (["run", "part_1", "--scale", "7"], "at most 1", "prompt count"),
    (["run", "part_1", "--base-url", "ftp://x"], "must look like http://", "server"),
    (["keep", "no/such/record"], "no record at", "wall runs"),
])
def test_bad_input_is_two_lines_and_status_1(nothing_starts, monkeypatch, arguments, said, remedy):
    monkeypatch.setattr("inference_wall.hardware.gpus", lambda: [])
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 1, result.output
    lines = result.output.strip().splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("remedy: ")
    assert said in lines[0] and remedy in lines[1]


def test_a_busy_port_is_refused_before_the_start(nothing_starts):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        result = CliRunner().invoke(cli.main, ["run", "part_1", "--rig", "cpu", "--port", str(holder.getsockname()[1])])
    assert result.exit_code == 1 and "in use by process" in result.output and "remedy: " in result.output


def test_a_missing_engine_is_refused_before_the_start(nothing_starts, monkeypatch):
    monkeypatch.setattr(jobs, "installed", lambda: None)
    result = CliRunner().invoke(cli.main, ["run", "part_1", "--rig", "cpu"])
    assert result.exit_code == 1 and "no vLLM is installed" in result.output and "make engine" in result.output


def test_a_flag_that_the_engine_does_not_know_is_refused_before_the_start(nothing_starts, monkeypatch):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    rig = jobs.rigs.load_rig("cpu")
    rig.engine["flags"]["max-num-seq"] = 8
    monkeypatch.setattr(jobs.rigs, "pick_rig", lambda name: rig)
    result = CliRunner().invoke(cli.main, ["run", "part_1", "--rig", "cpu"])
    assert result.exit_code == 1 and "did you mean 'max-num-seqs'" in result.output


def test_a_request_longer_than_the_context_is_refused_before_the_start(nothing_starts, monkeypatch):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    rig = jobs.rigs.load_rig("cpu")
    rig.posts["part_1"]["input_len"] = 2040
    monkeypatch.setattr(jobs.rigs, "pick_rig", lambda name: rig)
    monkeypatch.setattr(jobs, "model_folder", lambda rig, model: "nowhere")
    result = CliRunner().invoke(cli.main, ["run", "part_1", "--rig", "cpu"])
    assert result.exit_code == 1 and "max-model-len is 2048" in result.output


def test_a_prompt_longer_than_the_context_is_refused_before_the_start(nothing_starts, monkeypatch):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    monkeypatch.setattr(jobs, "model_folder", lambda rig, model: "nowhere")
    result = CliRunner().invoke(cli.main, ["run", "part_2", "--rig", "cpu", "-p", "injected_len=5000"])
    assert result.exit_code == 1 and "5008 tokens" in result.output and "max-model-len is 2048" in result.output


@pytest.mark.parametrize(("given", "said"), [
    ("budgets=0", "whole number"), ("budgets=512,512", "given twice"), ("budgets=,", "no number"), ("budget=512", "unknown parameter")])
def test_a_knob_that_no_post_can_take_is_refused_in_a_batch_too(nothing_starts, monkeypatch, given, said):
    monkeypatch.setattr(jobs, "model_folder", lambda rig, model: "nowhere")
    for posts in (["part_2"], ["all"]):
        result = CliRunner().invoke(cli.main, ["run", *posts, "--rig", "cpu", "-p", given])
        assert result.exit_code == 1 and said in result.output, result.output


def test_help_teaches_and_costs_little():
    result = CliRunner().invoke(cli.main, ["--help"])
    for command in ("run", "site", "doctor", "runs", "keep"):
        assert command in result.output
    code = "import sys; from inference_wall import cli; print(sorted({'pandas', 'torch', 'vllm', 'papermill'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
