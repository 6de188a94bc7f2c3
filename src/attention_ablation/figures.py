"""The figure: loss difference over training tokens, one line a variant, as in the published chart."""

import csv
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import altair as alt
import pyarrow as pa
import vl_convert

from attention_ablation.errors import UserError
from attention_ablation.figure_axes import (
    SYMLOG_CONSTANT,
    Axis,
    linear_axis,
    symlog_axis,
    tokens_axis,
    tokens_unit,
)
from attention_ablation.files import replacing
from attention_ablation.loss_delta_schema import (
    LOSS_DELTA_SCHEMA,
    drawn_rows,
    interval_sentences,
    intervals_of,
    read_loss_deltas,
)

FORMATS = ("svg", "png", "pdf", "html")
# vl-convert carries Liberation Sans only; an unknown family without a fallback draws no text at all.
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
GRID = "#e3e3e3"
TEXT = "#333333"
PNG_SCALE = 2.0
PUBLISHED_CURVE = "published_curve.csv"
LESS_THAN = "\ue03c"  # of the private use area
PUBLISHED_TOKENS_BILLION = 100.0


@dataclass(frozen=True)
class FigureSettings:
    """How the figure looks; the defaults are the study's, in `attention_ablation.config`."""

    title: str
    y: Literal["linear", "symlog"]
    reference: Literal["published", "none"]  # published: the published curve as a dashed overlay
    width: int  # of the plot itself, pixels
    height: int


@dataclass(frozen=True)
class Curves:
    """What is drawn: the records of the data sets `deltas` and `published`, and the words about them."""

    names: list[str]
    colors: list[str]
    shapes: list[str]  # by place in the whole legend, so that a variant keeps its shape from figure to figure
    deltas: list[dict[str, Any]]
    published: list[dict[str, Any]]
    x: Axis
    y: Axis
    x_title: str
    y_title: str
    subtitle: list[str]


def draw(
    deltas: pa.Table | Path,
    *,
    comparison: str,
    variants: Sequence[tuple[str, str]],
    settings: FigureSettings,
    confidence: float,
    outputs: Mapping[str, Path],
    training_tokens: int | None = None,
) -> None:
    """Write the figure of one comparison to `outputs`, a path for each of svg, png, pdf, html.

    `variants` are (name, colour) in legend order; one that the comparison does not have is left out of the
    legend. `training_tokens` is the length of the training, for unfinished runs; without it the last
    checkpoint is taken for the end. SVG, PNG and HTML are byte-equal for equal input; PDF carries a date.
    Raises UserError for a variant without a colour, values that are not finite, or other confidence.
    """
    for format_ in outputs:
        check_format(format_)
    table = load(deltas)
    spec = specification(curves(table, comparison, variants, settings, confidence, training_tokens), settings)
    for format_, path in outputs.items():
        content = convert(spec, format_)
        with replacing(path) as temporary:
            temporary.write_bytes(content)


def check_format(format_: str) -> None:
    """Raise UserError for a format that cannot be written."""
    if format_ not in FORMATS:
        raise UserError(f"figure.formats: found {format_!r}, expected some of {list(FORMATS)}")


def load(deltas: pa.Table | Path) -> pa.Table:
    """The table, from memory or from its file."""
    if isinstance(deltas, Path):
        return read_loss_deltas(deltas)
    if not deltas.schema.equals(LOSS_DELTA_SCHEMA):
        raise ValueError(f"not a table of loss deltas: {deltas.schema}")
    return deltas


def curves(
    table: pa.Table,
    comparison: str,
    variants: Sequence[tuple[str, str]],
    settings: FigureSettings,
    confidence: float,
    training_tokens: int | None,
) -> Curves:
    """Choose the rows, put them on one full grid of checkpoints, and find domains, ticks and words."""
    intervals = intervals_of(table, confidence)
    rows = drawn_rows(table, comparison)
    legend = check_legend(rows, variants)
    names = [name for name, _ in legend]
    length = max(training_tokens or 0, *(row["tokens_seen"] for row in rows))
    unit, letter = tokens_unit(length)
    records, missing = full_grid(rows, names, unit)
    published = published_records(names, length / unit) if settings.reference == "published" else []
    values = [row[key] for row in rows for key in ("delta", "ci_low", "ci_high")]
    values += [record["delta"] for record in published]
    y = symlog_axis(values, settings.height) if settings.y == "symlog" else linear_axis(values)
    assert all(y.low <= value <= y.high for value in values), "a value lies outside of the y axis"
    sentences = [f"Bands: {sentence}" for sentence in interval_sentences(rows, names, intervals)]
    if published:
        sentences.append(
            "Dashed: the published curves, read by eye from the paper's chart, against the same fraction of training."
        )
    if missing:
        counts = ", ".join(f"{name} {count}" for name, count in missing.items())
        sentences.append(f"Gaps: checkpoints without a value ({counts}).")
    return Curves(
        names=names,
        colors=[color for _, color in legend],
        shapes=[SHAPES[variants.index(entry) % len(SHAPES)] for entry in legend],
        deltas=records,
        published=published,
        x=tokens_axis(length / unit),
        y=y,
        x_title=f"training tokens ({letter})" if letter else "training tokens",
        y_title=f"loss difference ({rows[0]['treatment_arm']} \N{MINUS SIGN} {rows[0]['baseline_arm']}), "
        "nats per token",
        subtitle=sentences,
    )


def check_legend(rows: list[dict], variants: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The legend's entries that have rows; UserError when a row's variant would vanish from it."""
    listed = [name for name, _ in variants]
    if len(set(listed)) < len(listed):
        raise UserError(f"variants {listed}: expected each name once")
    drawn = {row["variant"] for row in rows}
    for name in sorted(drawn - set(listed)):
        raise UserError(f"variant {name} has loss deltas but no colour; give it one or leave it out of the study")
    for row in rows:
        for key in ("delta", "ci_low", "ci_high"):
            if not math.isfinite(row[key]):
                raise UserError(
                    f"variant {row['variant']}, step {row['step']}: {key} is {row[key]}, expected a finite number"
                )
    return [(name, color) for name, color in variants if name in drawn]


def full_grid(rows: list[dict], names: list[str], unit: float) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """One record a (variant, checkpoint of any variant), and how many a variant lacks.

    A checkpoint that a variant lacks is a record with nulls: it breaks line and band, where an absent record
    would be bridged as if it had been measured.
    """
    by_place = {(row["variant"], row["tokens_seen"]): row for row in rows}
    grid = sorted({row["tokens_seen"] for row in rows})
    records: list[dict[str, Any]] = []
    missing: dict[str, int] = {}
    for name in names:
        for tokens in grid:
            row = by_place.get((name, tokens))
            if row is None:
                missing[name] = missing.get(name, 0) + 1
            records.append(
                {
                    "variant": name,
                    "tokens": tokens / unit,
                    "step": row["step"] if row else None,
                    "delta": row["delta"] if row else None,
                    "low": row["ci_low"] if row else None,
                    "high": row["ci_high"] if row else None,
                    "seeds": row["seeds"] if row else None,
                    "missing": row is None,
                    "alone": False,
                }
            )
        mark_alone(records[-len(grid) :])
    return records, missing


def mark_alone(records: list[dict[str, Any]]) -> None:
    """Mark the points with no neighbour to draw a band to: their interval is drawn as a bar."""
    present = [False, *(not record["missing"] for record in records), False]
    for index, record in enumerate(records, start=1):
        record["alone"] = present[index] and not present[index - 1] and not present[index + 1]


def published_records(names: list[str], length: float) -> list[dict[str, Any]]:
    """The published curves of the variants that have one, stretched to a training of `length` (x unit)."""
    text = resources.files("attention_ablation").joinpath(PUBLISHED_CURVE).read_text(encoding="utf-8")
    points = list(csv.DictReader(text.splitlines()))
    return [
        {
            "variant": name,
            "tokens": float(point["tokens_billion"]) / PUBLISHED_TOKENS_BILLION * length,
            "delta": float(point["loss_difference"]),
        }
        for name in names
        for point in points
        if point["variant"] == name
    ]


def specification(curves: Curves, settings: FigureSettings) -> dict[str, Any]:
    """The Vega-Lite specification; every name is given, as automatic ones depend on content and history."""
    choice = alt.selection_point(name="chosen_variant", fields=["variant"], bind="legend")
    legend = alt.Legend(title=None, symbolSize=70, symbolStrokeWidth=2, labelFontSize=12)
    x = alt.X(
        "tokens:Q",
        title=curves.x_title,
        scale=alt.Scale(domain=[curves.x.low, curves.x.high], nice=False),
        axis=alt.Axis(values=list(curves.x.ticks), format=f",.{curves.x.decimals}f", labelFlush=False),
    )
    scale = {"type": "symlog", "constant": SYMLOG_CONSTANT} if settings.y == "symlog" else {}
    y_scale = alt.Scale(domain=[curves.y.low, curves.y.high], nice=False, zero=False, **scale)
    y_axis = alt.Axis(values=list(curves.y.ticks), format=f".{curves.y.decimals}f", labelFlush=False)
    y = alt.Y("delta:Q", title=curves.y_title, scale=y_scale, axis=y_axis)
    color = alt.Color("variant:N", scale=alt.Scale(domain=curves.names, range=curves.colors), legend=legend)
    shape = alt.Shape("variant:N", scale=alt.Scale(domain=curves.names, range=curves.shapes), legend=legend)
    base = alt.Chart(alt.NamedData("deltas"))
    crowded = len(curves.deltas) > 40 * len(curves.names)
    layers = [
        # fillOpacity and not opacity, which would fade the legend too.
        base.mark_area()
        .encode(
            x=x,
            y=alt.Y("low:Q", title=curves.y_title, scale=y_scale, axis=y_axis),
            y2="high:Q",
            color=color,
            fillOpacity=alt.when(choice).then(alt.value(0.15)).otherwise(alt.value(0.03)),
        )
        .properties(name="bands"),
        alt.Chart(alt.NamedData("zero"))
        .mark_rule(color="#555555", strokeWidth=1)
        .encode(y=alt.Y("zero:Q", title=curves.y_title, scale=y_scale, axis=y_axis))
        .properties(name="zero_line"),
        base.mark_line(strokeWidth=2, strokeJoin="round")
        .encode(x=x, y=y, color=color, strokeOpacity=faded(choice, 1.0))
        .properties(name="lines"),
        base.mark_point(filled=True, opacity=1, size=14 if crowded else 42)
        .encode(x=x, y=y, color=color, shape=shape, fillOpacity=faded(choice, 1.0), tooltip=tooltip(curves))
        .properties(name="points")
        .add_params(choice),
    ]
    if any(record["alone"] for record in curves.deltas):
        bars = (
            base.mark_rule(strokeWidth=1.5)
            .transform_filter("datum.alone")
            .encode(
                x=x,
                y=alt.Y("low:Q", title=curves.y_title, scale=y_scale, axis=y_axis),
                y2="high:Q",
                color=color,
                strokeOpacity=faded(choice, 0.4),
            )
            .properties(name="lone_intervals")
        )
        layers.insert(2, bars)
    if curves.published:
        published = (
            alt.Chart(alt.NamedData("published"))
            .mark_line(strokeWidth=1.5, strokeDash=[5, 4])
            .encode(x=x, y=y, color=color, strokeOpacity=faded(choice, 0.6))
            .properties(name="published_lines")
        )
        layers.insert(2, published)
    chart = alt.layer(*layers).properties(
        name="figure", width=settings.width, height=settings.height, title=title(curves, settings)
    )
    spec = styled(chart).to_dict()
    spec["datasets"] = {"deltas": curves.deltas, "zero": [{"zero": 0.0}]}
    if curves.published:
        spec["datasets"]["published"] = curves.published
    spec["usermeta"] = {"embedOptions": {"actions": False}}
    return spec


def faded(choice: alt.Parameter, opacity: float) -> Any:
    """`opacity` for the variants chosen in the legend (at first all), nearly nothing for the others."""
    return alt.when(choice).then(alt.value(opacity)).otherwise(alt.value(0.1 * opacity))


def tooltip(curves: Curves) -> list[alt.Tooltip]:
    """What hovering over a point tells."""
    return [
        alt.Tooltip("variant:N", title="variant"),
        alt.Tooltip("tokens:Q", title=curves.x_title, format=",.4~f"),
        alt.Tooltip("step:Q", title="step", format=","),
        alt.Tooltip("delta:Q", title="loss difference", format=".5f"),
        alt.Tooltip("low:Q", title="interval from", format=".5f"),
        alt.Tooltip("high:Q", title="interval to", format=".5f"),
        alt.Tooltip("seeds:Q", title="seeds"),
    ]


def title(curves: Curves, settings: FigureSettings) -> alt.TitleParams:
    """The title over what the bands mean, wrapped to the plot's width (about 5.2 pixels a small letter)."""
    letters = max(30, int(settings.width / 5.2))
    lines = [line for sentence in curves.subtitle for line in balanced(sentence, letters)]
    placing: dict[str, Any] = {"anchor": "start", "frame": "group", "offset": 12}
    if not settings.title:
        # An empty title would keep its empty line.
        return alt.TitleParams(text=lines, fontSize=11, fontWeight="normal", color="#555555", **placing)
    return alt.TitleParams(
        text=balanced(settings.title, max(20, int(settings.width / 8))),
        subtitle=lines,
        fontSize=15,
        subtitleFontSize=11,
        subtitleColor="#555555",
        subtitlePadding=5,
        **placing,
    )


def balanced(text: str, letters: int) -> list[str]:
    """`text` in as few lines of at most `letters` as it takes, about equally long."""
    fewest = len(textwrap.wrap(text, letters))
    narrowest = next(n for n in range(len(text) // fewest, letters + 1) if len(textwrap.wrap(text, n)) <= fewest)
    return textwrap.wrap(text, narrowest)


def styled(chart: alt.LayerChart) -> alt.LayerChart:
    """Light grid, one font, dark gray text."""
    return (
        chart.configure(font=FONT, background="white", padding=10)
        .configure_view(stroke=GRID)
        .configure_axis(
            gridColor=GRID, domainColor="#888888", tickColor="#888888", labelColor=TEXT, titleColor=TEXT,
            labelFontSize=12, titleFontSize=13, titleFontWeight="normal", titlePadding=10,
        )
        .configure_legend(labelColor=TEXT, orient="right", offset=14, rowPadding=6)
        .configure_title(color=TEXT, fontWeight="bold")
    )  # fmt: skip


def convert(spec: dict[str, Any], format_: str) -> bytes:
    """The file's content in one format."""
    if format_ == "svg":
        return vl_convert.vegalite_to_svg(spec).encode()
    if format_ == "png":
        return vl_convert.vegalite_to_png(spec, scale=PNG_SCALE)
    if format_ == "pdf":
        return vl_convert.vegalite_to_pdf(spec)
    # bundle: the scripts are in the page, nothing is requested. A "<" in a title must not end the page's script:
    # it goes in as a letter of no script, and comes out as JSON's escape.
    page = vl_convert.vegalite_to_html(without_less_than(spec), bundle=True)
    return page.replace(LESS_THAN, "\\u003c").encode()


def without_less_than(value: Any) -> Any:
    """`value` with every "<" in its strings replaced by LESS_THAN."""
    if isinstance(value, dict):
        return {key: without_less_than(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_less_than(item) for item in value]
    return value.replace("<", LESS_THAN) if isinstance(value, str) else value
