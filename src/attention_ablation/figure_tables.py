"""The numbers that the figure draws: all of them as CSV, and a short summary in Markdown."""

import csv as csv_module
import io
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from attention_ablation.figures import check_legend, load
from attention_ablation.files import write_text
from attention_ablation.loss_delta_schema import (
    LOSS_DELTA_SCHEMA,
    drawn_rows,
    interval_sentences,
    intervals_of,
)

START_FRACTION = 0.01  # the start of a curve: its first checkpoint at or after this fraction of training
LAST_FRACTION = 0.8  # the end of a curve: the checkpoints after this fraction
FEWEST_SEEDS = 3  # for any word about the variant


def write_tables(
    deltas: pa.Table | Path,
    *,
    comparison: str,
    variants: Sequence[tuple[str, str]],
    csv: Path,
    markdown: Path,
    confidence: float,
    notes: Sequence[str] = (),
    training_tokens: int | None = None,
) -> None:
    """Write every drawn number of every comparison to `csv` and a summary a comparison to `markdown`.

    `comparison` (the main figure's) comes first, the others by name; `variants` are (name, colour) in
    legend order; `notes` become a list at the end of the summary. Raises UserError as `figures.draw` does.
    """
    table = load(deltas)
    intervals = intervals_of(table, confidence)
    others = sorted(set(table["comparison"].to_pylist()) - {comparison})
    drawn: list[dict] = []
    sections = []
    for name in (comparison, *others):
        rows = drawn_rows(table, name)
        names = [variant for variant, _ in check_legend(rows, variants)]
        rows.sort(key=lambda row: (names.index(row["variant"]), row["step"]))
        drawn += rows
        length = max(training_tokens or 0, *(row["tokens_seen"] for row in rows))
        sections.append(
            f"## {name}: {rows[0]['treatment_arm']} \N{MINUS SIGN} {rows[0]['baseline_arm']}\n\n"
            "Loss difference in nats per token; above zero, "
            f"`{rows[0]['treatment_arm']}` has the higher loss.\n\n"
            + summary_table(rows, names, length, confidence)
            + "\n"
            + "\n".join(f"- Interval: {text}" for text in interval_sentences(rows, names, intervals))
            + "\n"
            + "\n".join(
                f"- {variant}: {verdict([row for row in rows if row['variant'] == variant])}." for variant in names
            )
            + "\n"
        )
    write_text(csv, csv_text(drawn))
    closing = "## Notes\n\n" + "\n".join(f"- {note}" for note in notes) + "\n" if notes else ""
    write_text(markdown, "\n".join(["# Loss differences\n", *sections, *([closing] if closing else [])]))


def csv_text(rows: list[dict]) -> str:
    """All columns; floats in their shortest exact form, an empty seed for "over all seeds"."""
    text = io.StringIO()
    writer = csv_module.writer(text, lineterminator="\n")
    writer.writerow(LOSS_DELTA_SCHEMA.names)
    for row in rows:
        values = (row[name] for name in LOSS_DELTA_SCHEMA.names)
        writer.writerow(
            "" if value is None else repr(value) if isinstance(value, float) else value for value in values
        )
    return text.getvalue()


def summary_table(rows: list[dict], names: list[str], length: int, confidence: float) -> str:
    """One line a variant: start, mean of the last fifth, last checkpoint with its interval."""
    lines = [
        "| variant | start | mean over the last fifth | last checkpoint | "
        f"{100 * confidence:g} % interval | interval over | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        own = [row for row in rows if row["variant"] == name]
        last = own[-1]
        start = next((row for row in own if row["tokens_seen"] >= START_FRACTION * length), None)
        late = [row["delta"] for row in own if row["tokens_seen"] > LAST_FRACTION * length]
        cells = (
            name.replace("|", "\\|"),
            f"{start['delta']:.5f} at {start['tokens_seen']:,} tokens" if start else "not reached",
            f"{sum(late) / len(late):.5f} (checkpoints: {len(late)})" if late else "not reached",
            f"{last['delta']:.5f} at {last['tokens_seen']:,} tokens",
            f"{last['ci_low']:.5f} to {last['ci_high']:.5f}",
            last["interval_kind"],
            str(last["seeds"]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def verdict(rows: list[dict]) -> str:
    """What the last checkpoint says about the variant itself; nothing with fewer than three seeds."""
    last = rows[-1]
    baseline, treatment = last["baseline_arm"], last["treatment_arm"]
    unknown = f"whether `{treatment}` differs from `{baseline}` cannot be told"
    if last["interval_kind"] == "blocks":
        return f"{unknown}: training noise was not measured"
    if last["seeds"] < FEWEST_SEEDS:
        return f"{unknown}: {last['seeds']} seeds are too few, {FEWEST_SEEDS} are needed"
    if last["ci_low"] > 0:
        return f"`{treatment}` ends with a higher loss than `{baseline}`, over {last['seeds']} seeds"
    if last["ci_high"] < 0:
        return f"`{treatment}` ends with a lower loss than `{baseline}`, over {last['seeds']} seeds"
    return f"no difference from zero can be told at the end, over {last['seeds']} seeds"
