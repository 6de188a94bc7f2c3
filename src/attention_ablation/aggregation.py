"""From the evaluations of all runs to `loss_deltas.parquet`: DuckDB runs the SQL, this module feeds it.

The SQL says what is computed and what is refused; here are the inputs and the settings that make the bytes
reproducible (one thread; ordered compensated sums and a total order of rows are in the SQL).
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import duckdb
import pyarrow as pa

from attention_ablation.errors import UserError
from attention_ablation.evaluation_schema import read_evaluation
from attention_ablation.loss_delta_schema import Intervals, write_loss_deltas

SQL_FILES = (
    "1_evaluations.sql",
    "2_pairs.sql",
    "3_refusals.sql",
    "4_blocks.sql",
    "5_within_seed.sql",
    "6_over_seeds.sql",
)
REFUSAL_FILE = "3_refusals.sql"
RESULT_FILE = "7_loss_deltas.sql"
STUDENT_T_FILE = "student_t.csv"
# Fewer blocks make the standard error itself too uncertain to draw a band from.
FEWEST_BLOCKS = 30

RUN_SCHEMA = pa.schema([("run", pa.string()), ("variant", pa.string()), ("arm", pa.string()), ("seed", pa.int64())])
COMPARISON_SCHEMA = pa.schema([("name", pa.string()), ("baseline", pa.string()), ("treatment", pa.string())])


class Run(TypedDict):
    """A run of the study; `run` is the name that its evaluation's rows carry."""

    run: str
    variant: str
    arm: str
    seed: int


class Comparison(TypedDict):
    """Two arms; the delta is the treatment's loss minus the baseline's."""

    name: str
    baseline: str
    treatment: str


def loss_deltas(
    evaluations: Sequence[Path],
    runs: Sequence[Run],
    comparisons: Sequence[Comparison],
    *,
    confidence: float,
    blocks: int,
    sql: Path,
    output: Path,
) -> None:
    """Write the loss deltas of every comparison, variant, seed and checkpoint to `output`.

    `evaluations` holds one file a run, in any order; `sql` is the folder of the SQL files and the t table.
    Within a seed the interval comes from `blocks` contiguous blocks of validation windows, over seeds from
    their spread.
    Raises UserError, one line, for whatever would make a delta wrong: see 3_refusals.sql.
    """
    if blocks < FEWEST_BLOCKS:
        raise UserError(f"{blocks} blocks are too few for an interval; expected at least {FEWEST_BLOCKS}")
    check_unique("run", [run["run"] for run in runs])
    check_unique("variant, arm and seed", [(run["variant"], run["arm"], run["seed"]) for run in runs])
    check_unique("comparison", [comparison["name"] for comparison in comparisons])
    check_unique("evaluation file", [str(path) for path in evaluations])
    for path in evaluations:
        read_evaluation(path)  # DuckDB verifies no checksums, and silently takes another schema
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.stem}.") as spill,
        # Sums larger than memory spill beside the output, not into the working directory.
        duckdb.connect(config={"threads": 1, "temp_directory": spill}) as connection,
    ):
        load_student_t(connection, sql / STUDENT_T_FILE, confidence, blocks)
        for name, value in (
            ("evaluations", sorted(escape_glob(str(path)) for path in evaluations)),
            ("confidence", confidence),
            ("blocks", blocks),
        ):
            connection.execute(f"SET VARIABLE {name} = $value", {"value": value})
        connection.register("run", pa.Table.from_pylist(list(runs), schema=RUN_SCHEMA))
        connection.register("comparison", pa.Table.from_pylist(list(comparisons), schema=COMPARISON_SCHEMA))
        for name in SQL_FILES:
            connection.execute((sql / name).read_text(encoding="utf-8"))
            if name == REFUSAL_FILE:
                refuse(connection)
        result = connection.sql((sql / RESULT_FILE).read_text(encoding="utf-8"))
        write_loss_deltas(output, result.to_arrow_table(), Intervals(confidence, blocks))


def refuse(connection: duckdb.DuckDBPyConnection) -> None:
    """Raise UserError with the first refusal, if there is one."""
    found = connection.execute("SELECT message FROM refusal ORDER BY check_order, message LIMIT 1").fetchone()
    if found:
        raise UserError(found[0])


def load_student_t(connection: duckdb.DuckDBPyConnection, path: Path, confidence: float, blocks: int) -> None:
    """Make table student_t(confidence, degrees_of_freedom, t): two-sided quantiles, no interpolation."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; it belongs to the workflow, restore it")
    connection.execute(
        "CREATE TABLE student_t AS SELECT * FROM read_csv($path, header = true, "
        "columns = {'confidence': 'DOUBLE', 'degrees_of_freedom': 'BIGINT', 't': 'DOUBLE'})",
        {"path": escape_glob(str(path))},
    )
    listed = connection.execute(
        "SELECT confidence, max(degrees_of_freedom) FROM student_t GROUP BY confidence ORDER BY confidence"
    ).fetchall()
    most = dict(listed)
    if confidence not in most:
        valid = ", ".join(f"{value:g}" for value in most)
        raise UserError(f"confidence {confidence:g} is not in {path}; expected one of {valid}")
    if blocks - 1 > most[confidence]:
        raise UserError(f"{blocks} blocks are too many; {path} ends at {most[confidence]} degrees of freedom")


def check_unique(what: str, values: Sequence[object]) -> None:
    """Raise UserError when a value is given twice."""
    for value, count in Counter(values).items():
        if count > 1:
            raise UserError(f"{what} {value} is given {count} times; expected once")


def escape_glob(path: str) -> str:
    """A path that DuckDB reads as a name, not as a pattern."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)
