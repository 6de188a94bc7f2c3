"""The real pipeline on a tiny study: corpus to figure, and exactly the work that an edit implies."""

import json

import duckdb
import pytest
from workflow.snakemake_runs import ROOT, SMOKE, planned, snakemake, write_study


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A folder in which the smoke study has run."""
    directory = tmp_path_factory.mktemp("smoke")
    result = snakemake(directory, "--configfile", str(SMOKE))
    assert result.returncode == 0, result.stdout
    return directory


def edited(smoke, name: str, **changes) -> dict[str, int]:
    return planned(smoke, "--configfile", str(write_study(smoke / f"{name}.yaml", **changes)))


def test_the_study_runs_from_corpus_to_figure(smoke):
    for suffix in ("svg", "png", "pdf", "html", "csv", "md"):
        assert (smoke / "figures" / f"smoke.{suffix}").stat().st_size > 0
    rows = duckdb.sql(
        f"select variant, count(*) from '{smoke}/results/smoke/loss_deltas.parquet' group by 1"
    ).fetchall()
    assert dict(rows) == {"MLA": 6, "MLRA-2": 6}


def test_validation_counts_each_token_once(smoke):
    counts = duckdb.sql(
        f"select step, sum(token_count), count(*) from '{smoke}/results/runs/*/evaluation-*.parquet'"
        " where variant = 'MLA' and arm = 'scaled' group by 1"
    ).fetchall()
    assert len(counts) == 6
    assert {(tokens, windows) for _, tokens, windows in counts} == {(4160 - 1, 65)}


def test_a_run_says_what_made_it(smoke):
    for path in (smoke / "results" / "runs").glob("*/run.json"):
        sidecar = json.loads(path.read_text())
        assert sidecar["run"] == path.parent.name
        assert sidecar["execution"]["micro_batch"] == 8  # `auto`, resolved
        metrics = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in metrics] == list(range(1, 41))
        assert metrics[0]["learning_rate"] == 0
        assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_both_arms_of_a_variant_start_from_the_same_weights_and_the_same_batches(smoke):
    first = {}
    for path in (smoke / "results" / "runs").glob("*/metrics.jsonl"):
        variant, arm = path.parent.name.split(".")[:2]
        # W_o is zero at first, so the arms' first two losses (the first update has rate 0) are equal to the bit.
        first[variant, arm] = [json.loads(line)["loss"] for line in path.read_text().splitlines()[:2]]
    for variant in ("MLA", "MLRA-2"):
        assert first[variant, "scaled"] == first[variant, "unscaled"]


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_a_second_call_has_nothing_to_do(smoke, seed):
    assert planned(smoke, "--configfile", str(SMOKE), PYTHONHASHSEED=seed) == {}


def test_touched_files_cause_no_work(smoke):
    for path in sorted((smoke / "results").rglob("*")):
        path.touch()
    assert planned(smoke, "--configfile", str(SMOKE)) == {}


def test_execution_causes_no_work(smoke):
    assert edited(smoke, "execution", execution={"threads": 2, "micro_batch": 1, "autosave_steps": 3}) == {}


def test_a_title_redraws_the_figure_alone(smoke):
    assert edited(smoke, "title", figure={"title": "Other"}) == {"figure": 1}


def test_the_interval_level_aggregates_again(smoke):
    assert edited(smoke, "level", statistics={"confidence": 0.9}) == {"loss_deltas": 1, "figure": 1}


def test_the_number_of_evaluated_tokens_evaluates_again(smoke):
    assert edited(smoke, "tokens", evaluation={"tokens": 4096}) == {"evaluate": 4, "loss_deltas": 1, "figure": 1}


def test_a_learning_rate_trains_every_run_again(smoke):
    training = {"learning_rate": 1e-3}
    assert edited(smoke, "rate", training=training) == {"train": 4, "evaluate": 4, "loss_deltas": 1, "figure": 1}


def test_a_second_seed_trains_only_its_runs(smoke):
    jobs = {"train": 4, "evaluate": 4, "loss_deltas": 1, "figure": 1}
    assert edited(smoke, "seeds", training={"seeds": [0, 1]}) == jobs


def test_the_number_of_parts_makes_nothing_again(smoke):
    assert edited(smoke, "parts", data={"parts": 3}) == {}


def test_two_edits_at_once_cause_the_work_of_both(smoke):
    jobs = edited(smoke, "both", data={"parts": 3}, training={"learning_rate": 1e-3}, figure={"title": "Other"})
    assert jobs == {"train": 4, "evaluate": 4, "loss_deltas": 1, "figure": 1}


def test_the_vocabulary_starts_from_the_tokenizer(smoke):
    jobs = edited(
        smoke, "vocabulary", data={"tokenizer": {"kind": "bpe", "vocabulary_size": 400, "holdout_bytes": 65536}}
    )
    assert "fetch_corpus" not in jobs
    assert {"index_corpus", "train_tokenizer", "tokenize", "dataset", "train", "evaluate"} <= set(jobs)


def test_a_typo_in_the_target_draws_nothing(smoke):
    result = snakemake(smoke, "figures/typo.svg", "--configfile", str(SMOKE))
    assert result.returncode != 0
    assert "MissingRuleException" in result.stdout or "No rule to produce" in result.stdout


def test_a_mistake_in_the_study_is_told_before_the_dag(tmp_path):
    result = snakemake(tmp_path, "--dry-run", "--configfile", str(SMOKE), "--config", "training={learning_rat: 1}")
    assert result.returncode != 0
    assert "unknown key 'learning_rat'; did you mean 'learning_rate'?" in result.stdout
    assert "Job stats" not in result.stdout


def test_a_second_study_file_replaces_the_default(tmp_path):
    jobs = planned(tmp_path, "--configfile", str(SMOKE))
    assert jobs["train"] == 4  # the default study has six runs
    assert planned(tmp_path, "--configfile", str(ROOT / "config.yaml"))["train"] == 6
