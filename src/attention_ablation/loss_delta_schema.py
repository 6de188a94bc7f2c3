"""The schema of `loss_deltas.parquet`, its reader, and which of its rows a figure draws."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from attention_ablation.errors import UserError
from attention_ablation.evaluation_schema import read_parquet, write_parquet

LOSS_DELTA_SCHEMA = pa.schema(
    [
        pa.field("comparison", pa.string(), nullable=False),
        pa.field("variant", pa.string(), nullable=False),
        pa.field("baseline_arm", pa.string(), nullable=False),
        pa.field("treatment_arm", pa.string(), nullable=False),
        pa.field("seed", pa.int64()),  # null: over all seeds
        pa.field("step", pa.int64(), nullable=False),
        pa.field("tokens_seen", pa.int64(), nullable=False),
        pa.field("delta", pa.float64(), nullable=False),  # treatment - baseline, nats a token
        pa.field("standard_error", pa.float64(), nullable=False),
        pa.field("ci_low", pa.float64(), nullable=False),
        pa.field("ci_high", pa.float64(), nullable=False),
        pa.field("interval_kind", pa.string(), nullable=False),  # 'blocks' or 'seeds'
        pa.field("baseline_loss", pa.float64(), nullable=False),  # nats a token
        pa.field("treatment_loss", pa.float64(), nullable=False),
        pa.field("sequences", pa.int64(), nullable=False),  # validation windows
        pa.field("seeds", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Intervals:
    """How the intervals of a table were made; travels in the Parquet file's metadata."""

    confidence: float
    blocks: int


def write_loss_deltas(path: Path, table: pa.Table, intervals: Intervals) -> None:
    """Write the table, whole or not at all; equal rows give equal bytes."""
    metadata = {"confidence": repr(intervals.confidence), "blocks": str(intervals.blocks)}
    write_parquet(path, table, LOSS_DELTA_SCHEMA.with_metadata(metadata))


def read_loss_deltas(path: Path) -> pa.Table:
    """Read the table with its metadata; UserError unless the file has exactly the schema."""
    return read_parquet(path, LOSS_DELTA_SCHEMA)


def intervals_of(deltas: pa.Table, confidence: float) -> Intervals:
    """How the table's intervals were made; UserError when that is not at the `confidence` asked for."""
    metadata = deltas.schema.metadata or {}
    if b"confidence" not in metadata or b"blocks" not in metadata:
        raise UserError("loss deltas: no metadata 'confidence' and 'blocks'; run `ablation loss-deltas` again")
    found = Intervals(float(metadata[b"confidence"]), int(metadata[b"blocks"]))
    if found.confidence != confidence:
        raise UserError(
            f"loss deltas: intervals have confidence {found.confidence:g}, asked for {confidence:g}; "
            "run `ablation loss-deltas` again"
        )
    return found


def drawn_rows(deltas: pa.Table, comparison: str) -> list[dict]:
    """The rows of a comparison that a figure shows, by variant and step.

    A variant with rows over all seeds shows those; one with a single seed shows that seed's.
    Raises UserError for an unknown comparison.
    """
    rows = [row for row in deltas.to_pylist() if row["comparison"] == comparison]
    if not rows:
        known = ", ".join(sorted(set(deltas["comparison"].to_pylist()))) or "none"
        raise UserError(f"comparison '{comparison}' has no loss deltas; there are: {known}")
    over_seeds = {row["variant"] for row in rows if row["seed"] is None}
    drawn = [row for row in rows if (row["seed"] is None) == (row["variant"] in over_seeds)]
    seen: set[tuple[str, int]] = set()
    for row in drawn:
        place = (row["variant"], row["step"])
        if place in seen:
            raise UserError(
                f"comparison '{comparison}', variant {row['variant']}, step {row['step']}: several seeds "
                "but no row over all of them; run `ablation loss-deltas` again"
            )
        seen.add(place)
    return sorted(drawn, key=lambda row: (row["variant"], row["step"]))


def interval_sentences(rows: list[dict], names: list[str], intervals: Intervals) -> list[str]:
    """What the intervals of drawn rows mean, one sentence a kind; variants are named where kinds differ."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for name in names:
        for found in sorted({(row["interval_kind"], row["seeds"]) for row in rows if row["variant"] == name}):
            kinds.setdefault(found, []).append(name)
    percent = f"{100 * intervals.confidence:g} %"
    sentences = []
    for (kind, seeds), variants in kinds.items():
        if kind == "seeds":
            text = f"{percent} t interval over {seeds} seeds"
        else:
            text = (
                f"{percent} interval over {intervals.blocks} blocks of validation windows: "
                "the two trained models of each pair, on this text; training noise not measured"
            )
        sentences.append(f"{', '.join(variants)}: {text}." if len(kinds) > 1 else f"{text}.")
    return sentences
