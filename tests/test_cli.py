"""The command line: bad input is one clear error with a remedy and an exit status, before anything starts."""

import importlib.util
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from inference_wall import bundle, cli, engines, jobs, post, records, regenerate
from inference_wall.errors import WallError


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
    (["bundle", "--box", "none", "--rig", "h200-4b", "--out", "nowhere"], "unknown box 'none'", "hopper"),
    (["bundle", "--box", "hopper", "--rig", "cpu", "--out", "nowhere"], "rig cpu does not measure a GPU", "cuda"),
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


@pytest.fixture
def four_posts(monkeypatch, tmp_path):
    """A rig with settings for four of the five posts, on a server of somebody else; what is measured is noted, not done."""
    asked = []
    monkeypatch.setenv("WALL_BENCHMARKS", str(tmp_path))
    monkeypatch.setattr(jobs, "installed", lambda: engines.engine("0.25.1"))
    monkeypatch.setattr(jobs, "model_folder", lambda rig, model: "nowhere")
    monkeypatch.setattr(post, "measure", lambda *arguments, **options: asked.append((*arguments[:3], options)))
    return ["run", "all", "--rig", "h200-4b", "--base-url", "http://127.0.0.1:9"], asked


def test_all_leaves_out_what_the_rig_has_no_settings_for(four_posts, monkeypatch):
    command, _ = four_posts
    executed = []
    monkeypatch.setattr(regenerate, "execute", lambda name, *_, **options: executed.append((name, list(options["batch"]["also"]))))
    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 0 and "rig h200-4b has no settings for part_4: left out" in result.output, result.output
    assert executed == [("part_1", ["part_2", "part_3", "part_5"]), ("part_2", ["part_3", "part_5"]), ("part_3", ["part_5"]), ("part_5", [])]
    one = CliRunner().invoke(cli.main, ["run", "part_4", *command[2:]])
    assert one.exit_code == 1 and "has no settings for part_4" in one.output and "remedy: " in one.output
    assert "left out" in CliRunner().invoke(cli.main, [*command, "--plan"]).output


def test_records_only_measures_without_a_notebook(nothing_starts, four_posts, tmp_path):
    command, asked = four_posts
    for name in ("part_1", "part_5"):
        (tmp_path / "local" / name / "h200-4b").mkdir(parents=True)
    result = CliRunner().invoke(cli.main, [*command, "--scale", "0.5", "-p", "rates=1,inf", "--records-only", "--again"])
    assert result.exit_code == 0, result.output
    given = {"base_url": "http://127.0.0.1:9", "scale": "0.5", "mode": "live"}
    assert len(asked) == 1  # one process for all posts
    posts, rig, _, options = asked[0]
    assert rig == "h200-4b" and list(posts) == ["part_1", "part_2", "part_3", "part_5"] and options["since"]
    assert posts == {"part_1": {**given, "rates": "1,inf"}, **dict.fromkeys(("part_2", "part_3", "part_5"), given)}
    packing = next(line for line in result.output.splitlines() if line.startswith("pack the records:"))
    assert f"-C {tmp_path} local/part_1/h200-4b local/part_5/h200-4b" in packing  # and not of what was never begun
    assert "wall keep benchmarks/local/*/h200-4b/*" in result.output


def test_the_printed_command_packs_records_and_nothing_unfinished(tmp_path):
    for name in ("local/part_1/r/done-1/run.json", "local/part_1/r/half-2.partial/identity.json", "local/part_1/other/x-3/run.json"):
        (tmp_path / "benchmarks" / name).parent.mkdir(parents=True)
        (tmp_path / "benchmarks" / name).write_text("{}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WALL_BENCHMARKS", str(tmp_path / "benchmarks"))
        command = cli._transport(["part_1"], "r").splitlines()[0].partition(":")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    packed = subprocess.run(["tar", "-tf", "records.tar"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in packed if not name.endswith("/")] == ["local/part_1/r/done-1/run.json"]


def test_records_only_says_how_to_carry_off_what_there_is_also_after_a_failure(four_posts, monkeypatch, tmp_path):
    command, _ = four_posts
    (tmp_path / "local" / "part_1" / "h200-4b").mkdir(parents=True)

    def measured(*_, **__):
        raise WallError("the server died", "look")

    monkeypatch.setattr(post, "measure", measured)
    result = CliRunner().invoke(cli.main, [*command, "--records-only"])
    assert result.exit_code == 1 and "the server died" in result.output
    packing = next(line for line in result.output.splitlines() if line.startswith("pack the records:"))
    assert "part_1" in packing and "part_2" not in packing


def test_keep_takes_many_and_says_which_it_did_not(monkeypatch, tmp_path):
    kept = []

    def keep(path):
        if path.name == "bad":
            raise WallError("record bad cannot be used", "measure it again")
        kept.append(path.name)
        return path

    monkeypatch.setattr(records, "keep", keep)
    result = CliRunner().invoke(cli.main, ["keep", *(str(tmp_path / name) for name in ("one", "bad", "two"))])
    assert kept == ["one", "two"] and result.exit_code == 1
    assert "record bad cannot be used" in result.output and "1 of 3 records were not kept" in result.output
    assert CliRunner().invoke(cli.main, ["keep", str(tmp_path / "one"), str(tmp_path / "two")]).exit_code == 0
    assert CliRunner().invoke(cli.main, ["keep"]).exit_code == 2


def test_a_package_that_is_not_installed_is_one_error(monkeypatch):
    def absent(*_, **__):
        raise ModuleNotFoundError("No module named 'sphinx'", name="sphinx")

    monkeypatch.setattr(records, "inventory", absent)
    result = CliRunner().invoke(cli.main, ["runs"])
    assert result.exit_code == 1 and "this environment has no sphinx" in result.output and "remedy: " in result.output


def test_bundle_says_what_to_do_on_the_box(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(bundle, "bundle", lambda *arguments, **options: asked.append((arguments, options)) or ["engine: unchanged"])
    out = tmp_path / "parts"
    result = CliRunner().invoke(cli.main, ["bundle", "--box", "hopper", "--rig", "h200-27b", "--rig", "h200-4b", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert asked[0][0] == ("hopper", ("h200-27b", "h200-4b"), out) and asked[0][1]["part_bytes"] == bundle.PART_BYTES
    assert "bash parts/unpack.sh" in result.output and "~/inference-wall/wall run all --rig h200-4b --records-only" in result.output


def test_help_teaches_and_costs_little():
    result = CliRunner().invoke(cli.main, ["--help"])
    for command in ("run", "site", "doctor", "runs", "keep", "bundle"):
        assert command in result.output
    code = "import sys; from inference_wall import cli; print(sorted({'pandas', 'torch', 'vllm', 'papermill'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
