"""Small evaluations and loss deltas, made up but shaped like real ones."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from attention_ablation.aggregation import Comparison, Run
from attention_ablation.evaluation_schema import EVALUATION_SCHEMA, write_evaluation
from attention_ablation.loss_delta_schema import LOSS_DELTA_SCHEMA

SQL = Path(__file__).parents[1] / "workflow" / "sql"
SCALING: Comparison = {"name": "scaling", "baseline": "scaled", "treatment": "unscaled"}
COLORS = [("MLA", "#1b5e95"), ("GLA-2", "#8a8a8a"), ("MLRA-2", "#d55e00")]


def run_record(variant: str = "MLA", arm: str = "scaled", seed: int = 0) -> Run:
    return {"run": f"{variant}.{arm}.seed{seed}", "variant": variant, "arm": arm, "seed": seed}


def evaluation_table(
    run: Run,
    losses: np.ndarray,
    token_counts: np.ndarray,
    *,
    steps: Sequence[int] | None = None,
    batch_tokens: int = 1000,
    dataset: str = "plays",
) -> pa.Table:
    """`losses[checkpoint, window]` are sums in nats over `token_counts[window]` tokens."""
    steps = list(steps) if steps is not None else [10 * (i + 1) for i in range(len(losses))]
    rows = [
        {
            **run,
            "dataset": dataset,
            "step": step,
            "tokens_seen": step * batch_tokens,
            "sequence": window,
            "token_count": int(token_counts[window]),
            "loss_sum": float(loss),
        }
        for step, at_step in zip(steps, losses, strict=True)
        for window, loss in enumerate(at_step)
    ]
    return pa.Table.from_pylist(rows, schema=EVALUATION_SCHEMA)


def write_evaluations(folder: Path, tables: Iterable[pa.Table]) -> list[Path]:
    paths = []
    for table in tables:
        path = folder / f"{table['run'][0]}.parquet"
        write_evaluation(path, table)
        paths.append(path)
    return paths


def sample_deltas(
    variants: Sequence[str] = ("MLA", "GLA-2", "MLRA-2"),
    *,
    training_tokens: float = 3.1e6,
    checkpoints: int = 12,
    seeds: int = 1,
    size: float = 1.0,
    comparison: str = "scaling",
) -> pa.Table:
    """Curves that fall from about 0.008, dense early; MLA dips below zero."""
    generator = np.random.Generator(np.random.PCG64(7))
    fractions = np.geomspace(0.01, 1.0, checkpoints)
    final = {"MLA": -0.0006, "GLA-2": 0.0062, "MLRA-2": 0.0049}
    rows = []
    for variant in variants:
        for index, fraction in enumerate(fractions):
            level = final.get(variant, 0.003)
            center = level + (0.009 - level) * np.exp(-12 * fraction) + 0.0004 * generator.standard_normal()
            width = 0.0008 + 0.0006 * np.exp(-5 * fraction)
            for seed in [*range(seeds), *([None] if seeds > 1 else [])]:
                delta = size * (center if seed is None else center + 0.0005 * (seed - (seeds - 1) / 2))
                rows.append(
                    {
                        "comparison": comparison,
                        "variant": variant,
                        "baseline_arm": "scaled",
                        "treatment_arm": "unscaled",
                        "seed": seed,
                        "step": index + 1,
                        "tokens_seen": round(fraction * training_tokens),
                        "delta": float(delta),
                        "standard_error": float(size * width / 2),
                        "ci_low": float(delta - size * width),
                        "ci_high": float(delta + size * width),
                        "interval_kind": "seeds" if seed is None else "blocks",
                        "baseline_loss": 4.0,
                        "treatment_loss": 4.0 + float(delta),
                        "sequences": 512,
                        "seeds": seeds if seed is None else 1,
                    }
                )
    schema = LOSS_DELTA_SCHEMA.with_metadata({"confidence": "0.95", "blocks": "64"})
    return pa.Table.from_pylist(rows, schema=schema)
