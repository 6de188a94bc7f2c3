"""The figure shows every number, in the legend's order, inside the axes; its bytes depend on nothing else."""

import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from evidence_samples import COLORS, sample_deltas
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ablation.errors import UserError
from attention_ablation.figure_axes import linear_axis, symlog_axis, tokens_axis, tokens_unit
from attention_ablation.figure_tables import write_tables
from attention_ablation.figures import FigureSettings, curves, draw, specification
from attention_ablation.loss_delta_schema import Intervals, write_loss_deltas

SVG = "{http://www.w3.org/2000/svg}"
SETTINGS = FigureSettings(title="Scaling", y="linear", reference="none", width=560, height=340)


def drawn_svg(folder: Path, deltas, variants=COLORS, **options) -> ElementTree.Element:
    figure_settings = replace(SETTINGS, **{key: options.pop(key) for key in ("y", "reference") if key in options})
    path = folder / "figure.svg"
    draw(
        deltas, comparison="scaling", variants=variants, settings=figure_settings,
        confidence=0.95, outputs={"svg": path}, **options,
    )  # fmt: skip
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def marks(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """The shapes of the layer `name`."""
    for group in svg.iter(f"{SVG}g"):
        if f"{name}_marks" in group.get("class", "").split():
            return list(group)
    return []


def place(mark: ElementTree.Element) -> tuple[float, float]:
    x, y = re.match(r"translate\(([-\d.]+),([-\d.]+)\)", mark.get("transform", "")).groups()
    return float(x), float(y)


def without(deltas: pa.Table, *places: tuple[str, int]) -> pa.Table:
    rows = deltas.to_pylist()
    return deltas.take([i for i, row in enumerate(rows) if (row["variant"], row["step"]) not in places])


def changed(deltas: pa.Table, row: int, **values) -> pa.Table:
    rows = deltas.to_pylist()
    rows[row].update(values)
    return pa.Table.from_pylist(rows, schema=deltas.schema)


def texts(svg: ElementTree.Element, role: str) -> list[str]:
    return [
        "".join(text.itertext())
        for group in svg.iter(f"{SVG}g")
        if role in group.get("class", "").split()
        for text in group.iter(f"{SVG}text")
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_legend_keeps_the_given_order_and_colours(tmp_path, order):
    variants = [COLORS[index] for index in order]
    svg = drawn_svg(tmp_path, sample_deltas(), variants)
    assert texts(svg, "role-legend-label") == [name for name, _ in variants]
    symbols = [
        path.get("fill")
        for group in svg.iter(f"{SVG}g")
        if "role-legend-symbol" in group.get("class", "").split()
        for path in group.iter(f"{SVG}path")
    ]
    assert symbols == [color for _, color in variants]
    strokes = {path.get("stroke") for path in svg.iter(f"{SVG}path")}
    assert {color for _, color in variants} <= strokes


def test_points_drawn_equal_rows_and_lie_inside(tmp_path):
    deltas = sample_deltas()
    svg = drawn_svg(tmp_path, deltas)
    points = marks(svg, "points")
    assert len(points) == len(deltas) == 36
    assert all(0 <= x <= 560 and 0 <= y <= 340 for x, y in map(place, points))
    (zero,) = marks(svg, "zero_line")
    zero_height = place(zero)[1]
    below = [point for point in points if place(point)[1] > zero_height]
    assert len(below) == pc.sum(pc.less(deltas["delta"], 0)).as_py() > 0


def test_missing_checkpoints_break_the_line_and_are_counted(tmp_path):
    deltas = without(sample_deltas(), ("MLA", 9), ("MLA", 11), ("MLRA-2", 12))
    svg = drawn_svg(tmp_path, deltas)
    assert len(marks(svg, "points")) == len(deltas) == 33
    lines = {
        path.get("stroke"): path.get("d")
        for group in svg.iter(f"{SVG}g")
        if "lines_marks" in group.get("class", "").split()
        for path in group
    }
    assert lines["#1b5e95"].count("M") == 3
    assert lines["#8a8a8a"].count("M") == 1
    assert len(marks(svg, "lone_intervals")) == 2
    assert "Gaps: checkpoints without a value (MLA 2, MLRA-2 1)." in words(svg)


def words(svg: ElementTree.Element) -> str:
    lines = ["".join(part.itertext()) for text in svg.iter(f"{SVG}text") for part in (list(text) or [text])]
    return " ".join(lines)


def test_subtitle_says_what_the_interval_means(tmp_path):
    one = words(drawn_svg(tmp_path, sample_deltas()))
    assert (
        "95 % interval over 64 blocks of validation windows: the two trained models of each pair, on this text; "
        "training noise not measured." in one
    )
    several = words(drawn_svg(tmp_path, sample_deltas(seeds=3)))
    assert "95 % t interval over 3 seeds." in several
    assert "not measured" not in several
    mixed = pa.concat_tables([sample_deltas(["MLA"]), sample_deltas(["GLA-2"], seeds=2)])
    both = words(drawn_svg(tmp_path, mixed))
    assert "MLA: 95 % interval over 64 blocks" in both
    assert "GLA-2: 95 % t interval over 2 seeds." in both
    assert "loss difference (unscaled \N{MINUS SIGN} scaled), nats per token" in one


def test_rows_over_all_seeds_are_drawn_alone(tmp_path):
    assert len(marks(drawn_svg(tmp_path, sample_deltas(seeds=3)), "points")) == 36


def test_published_curve_is_stretched_to_this_training(tmp_path):
    svg = drawn_svg(
        tmp_path, sample_deltas(["GLA-2", "GLA-4"]), [*COLORS, ("GLA-4", "#5a3d8a")], reference="published"
    )
    dashed = [path for path in svg.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    assert [path.get("stroke") for path in dashed] == ["#8a8a8a"]
    points = [tuple(map(float, point.split(","))) for point in re.split("[ML]", dashed[0].get("d"))[1:]]
    assert [round(x) for x, _ in points] == [0, 224, 560]
    assert "Dashed: the published curves" in words(svg)
    assert "Dashed" not in words(drawn_svg(tmp_path, sample_deltas(["GLA-4"]), [("GLA-4", "#5a3d8a")]))


def test_paper_sized_axis_reads_like_the_published_one(tmp_path):
    svg = drawn_svg(tmp_path, sample_deltas(training_tokens=98_304_000_000))
    labels = texts(svg, "role-axis-label")
    assert [label for label in labels if "." not in label] == ["0", "20", "40", "60", "80", "100"]
    assert "training tokens (B)" in words(svg)


def test_symlog_keeps_negative_values(tmp_path):
    svg = drawn_svg(tmp_path, sample_deltas(size=20), y="symlog")
    assert len(marks(svg, "points")) == 36
    assert {"0.000", "0.100", "\N{MINUS SIGN}0.010"} <= set(texts(svg, "role-axis-label"))
    assert all(0 <= place(point)[1] <= 340 for point in marks(svg, "points"))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-1e3, 1e3).map(lambda value: 0.0 if abs(value) < 1e-9 else value), min_size=1, max_size=5),
    st.integers(120, 800),
)
def test_axes_hold_all_values_and_zero(values, height):
    for axis in (linear_axis(values), symlog_axis(values, height)):
        assert axis.low <= min(0.0, *values)
        assert max(0.0, *values) <= axis.high
        assert 0.0 in axis.ticks
        assert list(axis.ticks) == sorted(set(axis.ticks))
        assert axis.low <= axis.ticks[0]
        assert axis.ticks[-1] <= axis.high


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 10**14))
def test_tokens_axis_holds_the_training(tokens):
    unit, _ = tokens_unit(tokens)
    axis = tokens_axis(tokens / unit)
    assert axis.ticks[0] == axis.low == 0
    assert axis.high >= tokens / unit
    assert 3 <= len(axis.ticks) <= 9


@pytest.mark.parametrize(
    ("deltas", "variants", "message"),
    [
        (sample_deltas(), COLORS[:2], "variant MLRA-2 has loss deltas but no colour"),
        (sample_deltas(), [*COLORS, COLORS[0]], "expected each name once"),
        (
            sample_deltas(comparison="query"),
            COLORS,
            "comparison 'scaling' has no loss deltas; there are: query",
        ),
        (changed(sample_deltas(), 4, ci_high=float("nan")), COLORS, "variant MLA, step 5: ci_high is nan"),
        (
            sample_deltas().replace_schema_metadata({"confidence": "0.9", "blocks": "64"}),
            COLORS,
            "confidence 0.9",
        ),
        (sample_deltas().replace_schema_metadata(None), COLORS, "metadata"),
        (pa.concat_tables([sample_deltas(), changed(sample_deltas(), 0, seed=1)]), COLORS, "several seeds"),
    ],
)
def test_what_would_mislead_is_refused(tmp_path, deltas, variants, message):
    with pytest.raises(UserError, match=re.escape(message)):
        drawn_svg(tmp_path, deltas, variants)
    assert not list(tmp_path.iterdir())


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"figure\.formats: found 'gif'"):
        draw(
            sample_deltas(), comparison="scaling", variants=COLORS, settings=SETTINGS,
            confidence=0.95, outputs={"gif": tmp_path / "figure.gif"},
        )  # fmt: skip


# Draws every format in a process of its own and prints the hashes of those that must not change.
DRAW = """
import sys, hashlib, json
from pathlib import Path
from attention_ablation.figures import FigureSettings, draw
folder = Path(sys.argv[1])
outputs = {format_: folder / f"f.{format_}" for format_ in ("html", "svg", "pdf", "png")}
variants = [("MLA", "#1b5e95"), ("GLA-2", "#8a8a8a"), ("MLRA-2", "#d55e00")]
for _ in range(int(sys.argv[2])):
    draw(folder.parent / "deltas.parquet", comparison="scaling", variants=variants, confidence=0.95,
         settings=FigureSettings("Scaling", "linear", "published", 560, 340), outputs=outputs)
print(json.dumps({f: hashlib.sha256(outputs[f].read_bytes()).hexdigest() for f in ("svg", "png", "html")}))
"""


def test_bytes_depend_on_no_process_hash_seed_or_history(tmp_path):
    write_loss_deltas(tmp_path / "deltas.parquet", sample_deltas(), Intervals(0.95, 64))
    hashes = []
    for hash_seed, times in (("1", 1), ("2", 2)):
        folder = tmp_path / hash_seed
        folder.mkdir()
        result = subprocess.run(
            [sys.executable, "-c", DRAW, str(folder), str(times)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        hashes.append(json.loads(result.stdout))
    assert hashes[0] == hashes[1]
    folder = tmp_path / "1"
    assert sorted(path.name for path in folder.iterdir()) == ["f.html", "f.pdf", "f.png", "f.svg"]
    assert (folder / "f.pdf").read_bytes().startswith(b"%PDF")
    assert (folder / "f.png").read_bytes().startswith(b"\x89PNG")
    html = (folder / "f.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|link)[^>]*\s(src|href)=", html)
    assert '"actions":false' in html.replace(" ", "")


def test_a_title_cannot_end_the_script_of_the_page(tmp_path):
    title = "</script><script>alert(1)"
    path = tmp_path / "figure.html"
    draw(
        sample_deltas(), comparison="scaling", variants=COLORS, settings=replace(SETTINGS, title=title),
        confidence=0.95, outputs={"html": path},
    )  # fmt: skip
    html = path.read_text(encoding="utf-8")
    assert title not in html
    assert r"\u003c/script>\u003cscript>alert(1)" in html


def test_row_order_leaves_the_svg(tmp_path):
    deltas = sample_deltas(seeds=2)
    drawn_svg(tmp_path, deltas)
    first = hashlib.sha256((tmp_path / "figure.svg").read_bytes()).hexdigest()
    drawn_svg(tmp_path, deltas.take(list(reversed(range(len(deltas))))))
    assert hashlib.sha256((tmp_path / "figure.svg").read_bytes()).hexdigest() == first


def test_every_name_in_the_specification_is_given():
    figure_settings = replace(SETTINGS, reference="published")
    spec = specification(curves(sample_deltas(), "scaling", COLORS, figure_settings, 0.95, None), figure_settings)
    assert set(spec["datasets"]) == {"deltas", "published", "zero"}
    assert [layer["name"] for layer in spec["layer"]] == [
        "bands",
        "zero_line",
        "published_lines",
        "lines",
        "points",
    ]
    assert [(param["name"], param["bind"], param["views"]) for param in spec["params"]] == [
        ("chosen_variant", "legend", ["points"])
    ]


# The tables ------------------------------------------------------------------------------------------------


def tables(folder: Path, deltas, **options) -> tuple[list[dict[str, str]], str]:
    write_tables(
        deltas, comparison="scaling", variants=COLORS, csv=folder / "t.csv", markdown=folder / "t.md",
        confidence=0.95, **options,
    )  # fmt: skip
    with (folder / "t.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file)), (folder / "t.md").read_text(encoding="utf-8")


def test_csv_holds_every_drawn_number_exactly(tmp_path):
    deltas = pa.concat_tables([sample_deltas(comparison="query"), sample_deltas(seeds=3)])
    rows, _ = tables(tmp_path, deltas)
    assert [row["comparison"] for row in rows] == ["scaling"] * 36 + ["query"] * 36
    drawn = [row for row in deltas.to_pylist() if row["seed"] is None]
    assert [row["variant"] for row in rows[:36:12]] == ["MLA", "GLA-2", "MLRA-2"]
    for found, row in zip(rows[:36], drawn, strict=True):
        assert found["seed"] == ""
        for key in ("delta", "ci_low", "ci_high", "standard_error"):
            assert float(found[key]) == row[key]


def test_summary_says_nothing_about_a_variant_without_three_seeds(tmp_path):
    for seeds, reason in ((1, "training noise was not measured"), (2, "2 seeds are too few, 3 are needed")):
        _, text = tables(tmp_path, sample_deltas(seeds=seeds))
        assert text.count(f"cannot be told: {reason}") == 3
        assert "higher loss than" not in text
    _, text = tables(tmp_path, sample_deltas(seeds=3), notes=["execution differed"])
    assert "- MLA: no difference from zero can be told at the end, over 3 seeds." in text
    assert "- GLA-2: `unscaled` ends with a higher loss than `scaled`, over 3 seeds." in text
    assert "cannot be told: training noise" not in text
    assert text.endswith("## Notes\n\n- execution differed\n")


def test_summary_takes_start_last_fifth_and_end(tmp_path):
    deltas = sample_deltas(["MLA"], checkpoints=4)
    for row, (tokens, delta) in enumerate([(9, 0.5), (10, 0.25), (810, 0.125), (1000, 0.0625)]):
        deltas = changed(deltas, row, tokens_seen=tokens, delta=delta, ci_low=delta - 1, ci_high=delta + 1)
    _, text = tables(tmp_path, deltas)
    cells = (
        "0.25000 at 10 tokens",
        "0.09375 (checkpoints: 2)",
        "0.06250 at 1,000 tokens",
        "-0.93750 to 1.06250",
    )
    assert f"| MLA | {' | '.join(cells)} |" in text
    _, text = tables(tmp_path, deltas, training_tokens=100_000)
    assert "| MLA | 0.06250 at 1,000 tokens | not reached |" in text
