"""Deltas equal a plain numpy computation, bytes depend on no order, and nothing wrong gets through."""

import csv
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from evidence_samples import SCALING, SQL, evaluation_table, run_record, write_evaluations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from attention_ablation.aggregation import loss_deltas
from attention_ablation.errors import UserError
from attention_ablation.evaluation_schema import EVALUATION_SCHEMA, read_evaluation, write_evaluation
from attention_ablation.loss_delta_schema import LOSS_DELTA_SCHEMA, read_loss_deltas

BLOCKS = 30


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def aggregate(folder: Path, evaluations, runs, comparisons=(SCALING,), *, confidence=0.95, blocks=BLOCKS):
    output = folder / "results" / "loss_deltas.parquet"
    loss_deltas(evaluations, runs, comparisons, confidence=confidence, blocks=blocks, sql=SQL, output=output)
    return read_loss_deltas(output)


def study(folder: Path, *, variants=("MLA",), seeds=(0,), checkpoints=2, windows=BLOCKS, random_seed=0):
    """Random evaluations of both arms; returns the runs, their tables and the files."""
    random = generator(random_seed)
    token_counts = random.integers(5, 17, windows)
    runs = [run_record(v, arm, s) for v in variants for s in seeds for arm in ("scaled", "unscaled")]
    tables = [
        evaluation_table(run, 3.0 * token_counts + random.normal(size=(checkpoints, windows)), token_counts)
        for run in runs
    ]
    return runs, tables, write_evaluations(folder, tables)


def numpy_within_seed(baseline, treatment, token_counts, blocks, confidence):
    """Delta, standard error and interval of one checkpoint, written without the SQL in sight."""
    windows = len(token_counts)
    edges = [-(-block * windows // blocks) for block in range(blocks + 1)]
    difference = np.array([math.fsum((treatment - baseline)[a:b]) for a, b in pairwise(edges)])
    tokens = np.array([token_counts[a:b].sum() for a, b in pairwise(edges)])
    delta = math.fsum(difference) / tokens.sum()
    residual = difference - delta * tokens
    error = math.sqrt(blocks / (blocks - 1) * math.fsum(residual**2)) / tokens.sum()
    half = stats.t.ppf(0.5 + confidence / 2, blocks - 1) * error
    return delta, error, delta - half, delta + half


def test_small_case_by_hand(tmp_path):
    """30 blocks of one window of 4 tokens; half of the differences are +4 nats, half 0: all by pencil."""
    runs = [run_record(arm="scaled"), run_record(arm="unscaled")]
    token_counts = np.full(30, 4)
    losses = np.full((1, 30), 8.0)
    treatment = losses + np.where(np.arange(30) % 2 == 0, 4.0, 0.0)
    paths = write_evaluations(
        tmp_path,
        [evaluation_table(r, x, token_counts) for r, x in zip(runs, (losses, treatment), strict=True)],
    )
    (row,) = aggregate(tmp_path, paths, runs).to_pylist()
    # 15 * 4 nats / 120 tokens; the residuals are +-2, so the error is sqrt(30 / 29 * 30 * 4) / 120.
    assert row["delta"] == 0.5
    assert row["standard_error"] == pytest.approx(math.sqrt(30 / 29 * 120) / 120, rel=1e-14)
    assert row["ci_low"] == pytest.approx(0.5 - 2.0452296421 * row["standard_error"], rel=1e-9)
    assert row["ci_high"] == pytest.approx(0.5 + 2.0452296421 * row["standard_error"], rel=1e-9)
    exact = {
        "comparison": "scaling", "variant": "MLA", "baseline_arm": "scaled", "treatment_arm": "unscaled",
        "seed": 0, "step": 10, "tokens_seen": 10_000, "interval_kind": "blocks",
        "baseline_loss": 2.0, "treatment_loss": 2.5, "sequences": 30, "seeds": 1,
    }  # fmt: skip
    assert {key: row[key] for key in exact} == exact


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    windows=st.integers(30, 95),
    blocks=st.sampled_from([30, 31]),
    checkpoints=st.integers(1, 3),
    seeds=st.integers(1, 3),
    confidence=st.sampled_from([0.80, 0.90, 0.95, 0.99]),
    random_seed=st.integers(0, 2**32 - 1),
)
def test_equals_plain_numpy(tmp_path_factory, windows, blocks, checkpoints, seeds, confidence, random_seed):
    folder = tmp_path_factory.mktemp("study")
    windows = max(windows, blocks)
    runs, tables, paths = study(
        folder, seeds=range(seeds), checkpoints=checkpoints, windows=windows, random_seed=random_seed
    )
    rows = aggregate(folder, paths, runs, confidence=confidence, blocks=blocks).to_pylist()
    assert len(rows) == checkpoints * (seeds + (seeds > 1))
    losses = {
        run["run"]: table["loss_sum"].to_numpy().reshape(checkpoints, windows)
        for run, table in zip(runs, tables, strict=True)
    }
    token_counts = tables[0]["token_count"].to_numpy()[:windows]
    for checkpoint in range(checkpoints):
        deltas = []
        at_step = {row["seed"]: row for row in rows if row["step"] == 10 * (checkpoint + 1)}
        for seed in range(seeds):
            expected = numpy_within_seed(
                losses[f"MLA.scaled.seed{seed}"][checkpoint],
                losses[f"MLA.unscaled.seed{seed}"][checkpoint],
                token_counts,
                blocks,
                confidence,
            )
            row = at_step[seed]
            found = (row["delta"], row["standard_error"], row["ci_low"], row["ci_high"])
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert row["treatment_loss"] - row["baseline_loss"] == pytest.approx(row["delta"], abs=1e-12)
            deltas.append(expected[0])
        if seeds > 1:
            row = at_step[None]
            low, high = stats.t.interval(confidence, seeds - 1, np.mean(deltas), stats.sem(deltas))
            assert (row["delta"], row["standard_error"]) == pytest.approx((np.mean(deltas), stats.sem(deltas)))
            assert (row["ci_low"], row["ci_high"]) == pytest.approx((low, high), rel=1e-9, abs=1e-12)
            assert (row["interval_kind"], row["seeds"]) == ("seeds", seeds)


def test_interval_covers_the_truth_on_correlated_windows(tmp_path):
    """400 checkpoints are 400 studies whose true delta is 0.1; neighbouring windows are correlated (0.5).

    95 % of the block intervals should hold the truth; one block a window would hold it in about 74 %.
    """
    checkpoints, windows = 400, 900
    noise = generator(3).normal(size=(checkpoints, windows))
    correlated = np.empty_like(noise)
    correlated[:, 0] = noise[:, 0] / math.sqrt(1 - 0.5**2)
    for window in range(1, windows):
        correlated[:, window] = 0.5 * correlated[:, window - 1] + noise[:, window]
    token_counts = np.full(windows, 10)
    runs = [run_record(arm="scaled"), run_record(arm="unscaled")]
    losses = np.full((checkpoints, windows), 30.0)
    paths = write_evaluations(
        tmp_path,
        [
            evaluation_table(runs[0], losses, token_counts),
            evaluation_table(runs[1], losses + 1 + correlated, token_counts),
        ],
    )
    table = aggregate(tmp_path, paths, runs)
    low, high = table["ci_low"].to_numpy(), table["ci_high"].to_numpy()
    assert 0.91 <= np.mean((low <= 0.1) & (high >= 0.1)) <= 0.98


def test_order_of_files_runs_and_rows_leaves_the_bytes(tmp_path):
    runs, tables, paths = study(tmp_path / "a", variants=("MLA", "GLA-2"), seeds=(0, 1), windows=640)
    aggregate(tmp_path / "a", paths, runs)
    shuffled = [table.take(generator(9).permutation(len(table))) for table in reversed(tables)]
    paths_again = write_evaluations(tmp_path / "b", shuffled)
    aggregate(tmp_path / "b", paths_again, [runs[i] for i in (3, 0, 7, 1, 6, 2, 5, 4)])
    results = [(tmp_path / f / "results" / "loss_deltas.parquet").read_bytes() for f in "ab"]
    assert results[0] == results[1]
    assert read_loss_deltas(tmp_path / "a" / "results" / "loss_deltas.parquet").schema.equals(LOSS_DELTA_SCHEMA)
    assert [p.name for p in (tmp_path / "a" / "results").iterdir()] == ["loss_deltas.parquet"]


def test_swapped_arms_negate_the_delta(tmp_path):
    runs, _, paths = study(tmp_path, seeds=(0, 1, 2), windows=47)
    swapped = {"name": "scaling", "baseline": "unscaled", "treatment": "scaled"}
    there = aggregate(tmp_path, paths, runs).to_pylist()
    back = aggregate(tmp_path, paths, runs, [swapped]).to_pylist()
    for one, other in zip(there, back, strict=True):
        assert (other["delta"], other["ci_low"], other["ci_high"]) == (
            -one["delta"],
            -one["ci_high"],
            -one["ci_low"],
        )
        assert other["standard_error"] == one["standard_error"]


def test_a_folder_with_pattern_letters_is_a_folder(tmp_path):
    runs, _, paths = study(tmp_path / "seed=[01]*?")
    assert len(aggregate(tmp_path, paths, runs)) == 2


def test_a_comparison_takes_the_variants_that_have_both_arms(tmp_path):
    runs, _, paths = study(tmp_path, variants=("MLA", "GLA-2"))
    kept = [i for i, run in enumerate(runs) if run["run"] != "GLA-2.unscaled.seed0"]
    table = aggregate(tmp_path, [paths[i] for i in kept], [runs[i] for i in kept])
    assert set(table["variant"].to_pylist()) == {"MLA"}


def test_evaluation_bytes_are_equal_and_only_the_schema_is_written(tmp_path):
    table = evaluation_table(run_record(), np.ones((2, 5)), np.full(5, 4))
    chunked = pa.concat_tables([table[:3], table[3:]]).select(list(reversed(table.column_names)))
    write_evaluation(tmp_path / "one.parquet", table)
    write_evaluation(tmp_path / "two.parquet", chunked)
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    assert read_evaluation(tmp_path / "one.parquet").equals(table)
    with pytest.raises(ValueError, match="columns"):
        write_evaluation(tmp_path / "three.parquet", table.drop_columns(["seed"]))
    assert not (tmp_path / "three.parquet").exists()


def test_student_t_table_equals_scipy():
    with (SQL / "student_t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    confidence = np.array([float(row["confidence"]) for row in rows])
    degrees = np.array([int(row["degrees_of_freedom"]) for row in rows])
    np.testing.assert_allclose(
        [float(row["t"]) for row in rows], stats.t.ppf(0.5 + confidence / 2, degrees), rtol=1e-11
    )
    assert sorted(zip(confidence, degrees, strict=True)) == [
        (c, d) for c in (0.80, 0.90, 0.95, 0.99) for d in range(1, 1001)
    ]


def replaced(table: pa.Table, column: str, row: int, value) -> pa.Table:
    values = table[column].to_pylist()
    values[row] = value
    index = table.column_names.index(column)
    return table.set_column(
        index, EVALUATION_SCHEMA.field(column), pa.array(values, EVALUATION_SCHEMA.field(column).type)
    )


def constant(table: pa.Table, column: str, value) -> pa.Table:
    for row in range(len(table)):
        table = replaced(table, column, row, value)
    return table


UNSCALED = "MLA.unscaled.seed0"
# Each breaks the file of the unscaled arm; then the words that the one-line message must hold.
BROKEN = {
    "nan": (lambda t: replaced(t, "loss_sum", 33, math.nan), (UNSCALED, "step 20", "window 3", "nan")),
    "infinite": (lambda t: replaced(t, "loss_sum", 2, math.inf), (UNSCALED, "step 10", "window 2", "inf")),
    "duplicate": (lambda t: pa.concat_tables([t, t[5:6]]), (UNSCALED, "step 10", "duplicate", "31 rows")),
    "other token count": (lambda t: replaced(t, "token_count", 4, 99), (UNSCALED, "window 4", "and 99 in")),
    "absent window": (lambda t: t.filter(pc.not_equal(t["sequence"], 7)), (UNSCALED, "window 7", "and 0 in")),
    "absent step": (lambda t: t.filter(pc.equal(t["step"], 10)), (UNSCALED, "step 20", "none")),
    "other batch": (lambda t: shifted_tokens(t), (UNSCALED, "step 10", "10000", "10001")),
    "other dataset": (lambda t: constant(t, "dataset", "novels"), (UNSCALED, "dataset", "novels", "plays")),
    "two datasets": (lambda t: replaced(t, "dataset", 0, "novels"), ("one dataset", "novels", "plays")),
    "other seed": (lambda t: constant(t, "seed", 5), (UNSCALED, "seed 5")),
    "other run": (lambda t: constant(t, "run", "stranger"), ("stranger", "not a run of this study")),
    "two runs": (lambda t: replaced(t, "run", 0, "MLA.scaled.seed0"), ("MLA.scaled.seed0", "arm unscaled")),
    "empty": (lambda t: t[:0], (UNSCALED, "no rows")),
    "no tokens": (lambda t: replaced(t, "token_count", 4, 0), (UNSCALED, "window 4", "no tokens")),
}


def shifted_tokens(table: pa.Table) -> pa.Table:
    seen = [value + 1 for value in table["tokens_seen"].to_pylist()]
    return table.set_column(table.column_names.index("tokens_seen"), EVALUATION_SCHEMA.field("tokens_seen"), [seen])


@pytest.mark.parametrize("case", BROKEN)
def test_broken_evaluation_is_refused_and_named(tmp_path, case):
    runs, tables, paths = study(tmp_path)
    change, words = BROKEN[case]
    write_evaluation(paths[1], change(tables[1]))
    with pytest.raises(UserError) as refusal:
        aggregate(tmp_path, paths, runs)
    message = str(refusal.value)
    assert "\n" not in message
    for word in [*words, *([] if case == "empty" else [str(paths[1])])]:
        assert word in message
    assert not list((tmp_path / "results").iterdir())


def test_seeds_with_other_checkpoints_are_refused(tmp_path):
    runs, tables, paths = study(tmp_path, seeds=(0, 1))
    for index in (2, 3):
        write_evaluation(paths[index], tables[index].filter(pc.equal(tables[index]["step"], 10)))
    with pytest.raises(UserError, match=r"MLA\.scaled\.seed0 .* step 20.*MLA\.scaled\.seed1"):
        aggregate(tmp_path, paths, runs)


def test_other_schema_is_refused_before_duckdb_casts_it(tmp_path):
    runs, tables, paths = study(tmp_path)
    narrow = tables[1].set_column(9, "loss_sum", tables[1]["loss_sum"].cast(pa.float32()))
    pq.write_table(narrow, paths[1])
    with pytest.raises(UserError, match=r"unscaled.*column 9.*float"):
        aggregate(tmp_path, paths, runs)
    paths[1].write_bytes(paths[1].read_bytes()[:100])
    with pytest.raises(UserError, match=r"unscaled.*not a whole Parquet file"):
        aggregate(tmp_path, paths, runs)
    with pytest.raises(UserError, match=r"gone\.parquet: no such file"):
        aggregate(tmp_path, [paths[0], tmp_path / "gone.parquet"], runs)


def test_a_run_without_a_file_or_in_two_files_is_refused(tmp_path):
    runs, tables, paths = study(tmp_path)
    with pytest.raises(UserError, match=r"MLA\.unscaled\.seed0: no rows"):
        aggregate(tmp_path, paths[:1], runs)
    write_evaluation(tmp_path / "copy.parquet", tables[0])
    with pytest.raises(UserError, match=r"MLA\.scaled\.seed0: duplicate rows.*copy\.parquet"):
        aggregate(tmp_path, [*paths, tmp_path / "copy.parquet"], runs)


def test_wrong_settings_are_refused_with_the_numbers(tmp_path):
    runs, _, paths = study(tmp_path, windows=40)
    with pytest.raises(UserError, match=r"12 blocks.*30"):
        aggregate(tmp_path, paths, runs, blocks=12)
    with pytest.raises(UserError, match=r"40 windows; 41 blocks"):
        aggregate(tmp_path, paths, runs, blocks=41)
    with pytest.raises(UserError, match=r"1002 blocks.*1000"):
        aggregate(tmp_path, paths, runs, blocks=1002)
    with pytest.raises(UserError, match=r"0\.68 .*0\.8, 0\.9, 0\.95, 0\.99"):
        aggregate(tmp_path, paths, runs, confidence=0.68)
    with pytest.raises(UserError, match=r"comparison query: .*scaled_query"):
        aggregate(tmp_path, paths, runs, [{"name": "query", "baseline": "scaled", "treatment": "scaled_query"}])
    with pytest.raises(UserError, match=r"comparison scaling is given 2 times"):
        aggregate(tmp_path, paths, runs, [SCALING, SCALING])
