"""Commands: exit codes, one line for a mistake, and no writing under another's name."""

import subprocess
import sys
from pathlib import Path

import pytest

from attention_ablation import identity
from attention_ablation.cli import main
from attention_ablation.study import load_study
from attention_ablation.training import state
from attention_ablation.workflow import STATE

ROOT = Path(__file__).parent.parent
SMOKE = str(ROOT / "workflow/presets/smoke.yaml")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def last_line(capsys) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_every_step_has_a_command():
    help_text = subprocess.run(
        [sys.executable, "-m", "attention_ablation.cli", "--help"], capture_output=True, text=True, check=True
    ).stdout
    rules = []
    for path in (ROOT / "workflow" / "rules").glob("*.smk"):
        rules += [line.split()[1].rstrip(":") for line in path.read_text().splitlines() if line.startswith("rule ")]
    assert len(rules) == 10
    for rule in rules:
        assert f"    {rule.replace('_', '-')}" in help_text


def test_a_wrong_study_file_is_one_line_and_exit_code_1(capsys):
    assert main(["train", "--configfile", "no.yaml", "--run", "a", "--dataset", "b", "--output", "c"]) == 1
    assert last_line(capsys) == "error: study file no.yaml: No such file or directory"


def test_the_log_of_a_mistake_holds_its_traceback(capsys):
    main(["train", "--configfile", "no.yaml", "--run", "a", "--dataset", "b", "--output", "c"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_config_value_without_equals_is_told(capsys):
    arguments = ["fetch-corpus", "--configfile", SMOKE, "--file", "corpus.whl", "--output", "corpus.whl"]
    assert main([*arguments, "--config", "training"]) == 1
    assert last_line(capsys) == "error: --config training: KEY=VALUE is wanted"


def test_a_run_of_another_configuration_is_refused(capsys):
    run = next(iter(identity.runs(load_study([SMOKE]))))
    arguments = ["train", "--configfile", SMOKE, "--run", run, "--dataset", "b", "--output", "c"]
    assert main([*arguments, "--config", "training={learning_rate: 1}"]) == 1
    assert f"error: --run {run}: this study and this code make" in last_line(capsys)
    assert not Path("results").exists()


def test_data_of_another_configuration_is_refused(capsys):
    arguments = ["index-corpus", "--configfile", SMOKE, "--data", "iambic-0", "--corpus", "c", "--output", "o"]
    assert main(arguments) == 1
    assert "error: --data iambic-0: this study and this code make iambic-" in last_line(capsys)


def test_an_evaluation_of_another_configuration_is_refused(capsys):
    run = next(iter(identity.runs(load_study([SMOKE]))))
    arguments = ["evaluate", "--configfile", SMOKE, "--run", run, "--dataset", "d", "--snapshots", "s"]
    assert (
        main(
            [
                *arguments,
                "--output",
                "evaluation-0.parquet",
                "--sidecar",
                "s.json",
                "--code",
                identity.code_digest("evaluate"),
            ]
        )
        == 1
    )
    assert "error: --output evaluation-0.parquet: this study's evaluation is evaluation-" in last_line(capsys)


@pytest.mark.parametrize("command", ["evaluate", "loss-deltas", "figure"])
def test_code_that_changed_since_the_workflow_started_is_refused(capsys, command):
    flags = {
        "evaluate": ["--run", "r", "--dataset", "d", "--snapshots", "s", "--output", "o", "--sidecar", "s"],
        "loss-deltas": ["--evaluations", "e", "--output", "o"],
        "figure": ["--deltas", "d", "--output", "o"],
    }
    assert main([command, "--configfile", SMOKE, *flags[command], "--code", "0123456789ab"]) == 1
    assert "has changed since the workflow started; start it again" in last_line(capsys)


def test_an_evaluation_by_other_code_is_refused(capsys):
    Path("e.json").write_text('{"code": "0123456789ab"}')
    arguments = ["loss-deltas", "--configfile", SMOKE, "--evaluations", "e.parquet", "--output", "o"]
    assert main([*arguments, "--code", identity.code_digest("loss_deltas")]) == 1
    assert "e.parquet: evaluated by code 0123456789ab, today's is" in last_line(capsys)


def test_a_value_that_is_no_yaml_is_told(capsys):
    assert (
        main(
            [
                "fetch-corpus",
                "--configfile",
                SMOKE,
                "--file",
                "corpus.whl",
                "--output",
                "c",
                "--config",
                "training={seeds: [0",
            ]
        )
        == 1
    )
    assert last_line(capsys) == "error: --config training={seeds: [0: the value is not YAML"


def test_a_pinned_older_code_cannot_train(capsys):
    pin = ["--config", "training={code: 0123456789ab}"]
    run = next(iter(identity.runs(load_study([SMOKE], {"training": {"code": "0123456789ab"}}))))
    assert main(["train", "--configfile", SMOKE, "--run", run, "--dataset", "b", "--output", "c", *pin]) == 1
    assert "training.code: 0123456789ab is an older code" in last_line(capsys)


def test_kernels_for_an_unknown_target_are_refused_without_a_study(capsys):
    assert main(["kernels", "--target", "sm_1"]) == 1
    assert "error: --target sm_1: expected one of sm_80" in last_line(capsys)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_data_that_is_not_made_yet_is_told_with_the_target_that_makes_it(command, capsys):
    assert main(["data", command, "--configfile", SMOKE]) == 1
    assert "this study's data is not made yet; snakemake results/data/iambic-" in last_line(capsys)


def test_clean_failed_lets_exactly_the_failed_runs_be_tried_again(capsys):
    run = next(iter(identity.runs(load_study([SMOKE]))))
    state.record_failure(STATE / run, "the loss is nan at step 7")
    state.record_failure(STATE / "another-study's", "the loss is nan at step 8")
    (STATE / run / "autosave").mkdir()
    assert main(["clean", "--failed", "--configfile", SMOKE]) == 0
    assert capsys.readouterr().out == f"{run}: will be tried again; it had failed with: the loss is nan at step 7\n"
    assert state.failure_of(STATE / run) is None
    assert state.failure_of(STATE / "another-study's") == "the loss is nan at step 8"
    assert (STATE / run / "autosave").exists()
    assert main(["clean", "--failed", "--configfile", SMOKE]) == 0
    assert capsys.readouterr().out == ""
