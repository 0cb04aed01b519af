"""`wall check`: every check has a meaning, a failed one a remedy, and the status is for scripts."""

import json

import pytest
from click.testing import CliRunner

from inference_wall import check, cli, records, stats
from inference_wall.errors import WallError

FOLDERS = [path for post in ("part_1", "part_2", "part_3", "part_4", "part_5") for path in records.record_folders(post, committed_only=True)]


def test_every_check_that_is_made_has_a_meaning_and_a_remedy():
    run = records.open_run(FOLDERS[0])
    made = stats.validity(*(run.frame(name, 0) for name in ("requests", "chunks", "metrics")), None, 64, 32)["checks"]
    assert set(made) == set(check.MEANINGS) and all(meaning and remedy for meaning, remedy in check.MEANINGS.values())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: "/".join(folder.parts[-3:]))
def test_the_counts_of_every_committed_record_add_up_to_its_points(folder):
    found, run = check.look(folder), records.open_run(folder)
    assert all(sum(counted) == len(run.points) for counted in found.counts.values())
    assert found.valid == (not run.document["validity"]["invalid"]) and found.invalid == len(run.document["validity"]["invalid"])
    assert found.name in check.describe(found) and json.dumps(check.as_json(found), allow_nan=False)


@pytest.fixture
def invalid():
    return next(path for path in FOLDERS if not check.look(path).valid)


@pytest.fixture
def valid():
    return next(path for path in FOLDERS if check.look(path).valid)


def test_a_failed_check_is_explained_and_a_noted_one_is_no_failure(invalid):
    text = check.describe(check.look(invalid))
    assert "FAILED" in text and "remedy for littles_law: look for a second client" in text and "not valid: a page leaves them out" in text
    assert "2 noted" in text and "drift:" in text


def test_the_status_tells_a_script_what_a_reader_sees(valid, invalid, tmp_path):
    run = CliRunner().invoke
    assert run(cli.main, ["check", str(valid)]).exit_code == 0
    said = run(cli.main, ["check", str(valid), str(invalid), "--json"])
    assert said.exit_code == check.INVALID_STATUS and [each["valid"] for each in json.loads(said.output)] == [True, False]
    broken = run(cli.main, ["check", str(tmp_path)])
    assert broken.exit_code == 1 and broken.output.startswith("error: ")
    with pytest.raises(WallError):
        check.look(tmp_path / "nowhere")


def test_a_refused_arm_says_why(monkeypatch, valid):
    real = records.open_run(valid)
    refused = records.Run(real.path, real.document | {"not_testable": {"reason": "no kernel", "remedy": ""}})
    monkeypatch.setattr(records, "open_run", lambda path: refused)
    assert "not testable here: no kernel" in check.describe(check.look(valid))


def test_a_check_of_another_version_is_no_error():
    assert "does not know" in check._meaning("tomorrow")[0]
