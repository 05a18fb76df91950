"""The run directory: whose it is, and which one a command line means."""

import pytest
import torch
from mlflow import MlflowClient

from raytrain import checkpoint
from raytrain import run as runs
from raytrain.commandline import parse
from raytrain.errors import RunError
from raytrain.results import finish

FLAGS = frozenset({"--resume"})


def resolve(tmp_path, *words):
    return runs.resolve(parse([f"run.storage_path={tmp_path}", *words], "quickstart", FLAGS))


def test_only_one_process_trains_in_a_directory(tmp_path):
    config, folder = resolve(tmp_path, "run.name=one", "tracking.enabled=false")
    with runs.claim(folder, resume=False):
        runs.start(config, folder, 1438, {}, pytest.fail)
        with pytest.raises(RunError, match="run one exists already"), runs.claim(folder, resume=False):
            pass
        with pytest.raises(RunError, match="is being trained by another process"), runs.claim(folder, resume=True):
            pass
    with runs.claim(folder, resume=True):
        assert sorted(entry.name for entry in folder.path.iterdir()) == [".lock", "config.yaml"]
    assert [entry.name for entry in folder.path.iterdir()] == ["config.yaml"]


def test_a_run_that_has_not_begun_leaves_its_name_free(tmp_path):
    _, folder = resolve(tmp_path, "run.name=one")
    with pytest.raises(ZeroDivisionError), runs.claim(folder, resume=False):
        raise ZeroDivisionError
    assert not folder.path.exists()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is no run"):
        resolve(tmp_path, "run.name=one")


def test_resume_without_a_name_takes_the_newest_run_of_that_very_config(tmp_path):
    for name in ("quickstart-20260101-000000", "quickstart-20260102-000000", "quickstart-large-20260103-000000"):
        config, folder = resolve(tmp_path, f"run.name={name}", "tracking.enabled=false")
        with runs.claim(folder, resume=False):
            runs.start(config, folder, 1438, {}, pytest.fail)
    assert resolve(tmp_path, "--resume")[1].name == "quickstart-20260102-000000"
    with pytest.raises(RunError, match="no run absent"):
        resolve(tmp_path, "--resume", "run.name=absent")


def test_what_a_process_left_that_was_killed_before_a_run_had_begun_is_taken_over(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / ".lock").touch()
    config, folder = resolve(tmp_path, "run.name=one", "tracking.enabled=false")
    with runs.claim(folder, resume=False):
        runs.start(config, folder, 1438, {}, pytest.fail)
    assert folder.exists("config.yaml")


@pytest.mark.filterwarnings("ignore")  # in MLflow itself
@pytest.mark.parametrize("wanted", [True, False])
def test_checkpoints_go_to_mlflow_where_that_is_wanted(tmp_path, wanted):
    store = f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"
    config, folder = resolve(tmp_path, "run.name=one", store, f"tracking.log_checkpoints={str(wanted).lower()}")
    with runs.claim(folder, resume=False):
        run = runs.start(config, folder, 1438, {}, pytest.fail)
        state = {"metrics": {"val/top1": 0.5}}
        checkpoint.save(run.checkpoints, 45, {"model": {"fc.bias": torch.zeros(3)}}, {}, state)
        assert finish(run, "KILLED", pytest.fail)
    artifacts = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").list_artifacts(run.tracked.run_id)
    assert ("checkpoints" in [one.path for one in artifacts]) == wanted
