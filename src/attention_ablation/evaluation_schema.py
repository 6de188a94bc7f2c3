"""The one schema of an evaluation Parquet file: one row a (checkpoint, validation window)."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from attention_ablation.errors import UserError
from attention_ablation.files import replacing

# No column may be null: a value that is missing is a row that is missing.
EVALUATION_SCHEMA = pa.schema(
    [
        pa.field("run", pa.string(), nullable=False),
        pa.field("variant", pa.string(), nullable=False),
        pa.field("arm", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),  # optimiser updates done
        pa.field("tokens_seen", pa.int64(), nullable=False),  # step * batch_tokens
        pa.field("sequence", pa.int64(), nullable=False),  # number of the validation window
        pa.field("token_count", pa.int64(), nullable=False),  # tokens predicted in the window
        pa.field("loss_sum", pa.float64(), nullable=False),  # nats, summed over the window
    ]
)


def write_evaluation(path: Path, table: pa.Table) -> None:
    """Write an evaluation, whole or not at all; equal rows in equal order give equal bytes.

    `table` has exactly the schema's columns, in any order; types are widened where nothing is lost.
    Raises ValueError for other columns, nulls, or values that do not fit.
    """
    write_parquet(path, table, EVALUATION_SCHEMA)


def write_parquet(path: Path, table: pa.Table, schema: pa.Schema) -> None:
    """Write `table` under exactly `schema` (its metadata too) in zstd, whole or not at all."""
    if set(table.column_names) != set(schema.names):
        raise ValueError(f"columns {table.column_names} are not the schema's {schema.names}")
    # One chunk a column: the chunking of the table would show in the file's pages.
    typed = table.select(schema.names).cast(schema).combine_chunks()
    with replacing(path) as temporary:
        # Checksums: without them a flipped bit reads back as another loss (180 of 400 flips did).
        pq.write_table(typed, temporary, compression="zstd", row_group_size=1 << 20, write_page_checksum=True)


def read_evaluation(path: Path) -> pa.Table:
    """Read an evaluation; UserError unless the file is whole and has exactly the schema."""
    return read_parquet(path, EVALUATION_SCHEMA)


def read_parquet(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a table of exactly `schema`, its metadata too, every page's checksum verified; or UserError."""
    check_parquet_schema(path, schema)
    try:
        return pq.ParquetFile(path, page_checksum_verification=True).read()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: damaged ({' '.join(str(error).split())}); delete it and make it again") from None


def check_parquet_schema(path: Path, schema: pa.Schema) -> None:
    """Raise UserError unless `path` is a Parquet file with exactly these columns, types and nullability.

    DuckDB would take the first file's types and round the others to them without a word.
    """
    try:
        found = pq.read_schema(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the step that makes it") from None
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a whole Parquet file ({error}); delete it and make it again") from None
    for position, expected in enumerate(schema):
        actual = found.field(position) if position < len(found) else None
        if actual is None or not actual.equals(expected):
            raise UserError(
                f"{path}: column {position} is '{actual}', expected '{expected}'; "
                "make the file again with this version"
            )
    if len(found) > len(schema):
        raise UserError(
            f"{path}: unexpected column '{found.field(len(schema))}'; make the file again with this version"
        )
