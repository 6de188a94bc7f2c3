"""The metrics file of one run: loss, learning rate, gradient norm and speed, a line a step."""

import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import torch

from attention_ablation.files import fsync, write_text
from attention_ablation.training.plan import TrainingPlan
from attention_ablation.training.world import World


class DivergedError(Exception):
    """A loss or a gradient that is not finite. `step` counts from 0."""

    def __init__(self, step: int, loss: float, gradient_norm: float, learning_rate: float) -> None:
        self.step = step
        super().__init__(
            f"training broke down: loss {loss}, gradient norm {gradient_norm} at step {step} "
            f"(learning rate {learning_rate:.3g})"
        )


def count_rows(path: Path) -> int:
    """Whole lines of a metrics file; 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Metrics:
    """The run's metrics file: one JSON object a step, appended every few steps by the first process.

    `step` counts updates done; `loss` (nats a token) and `gradient_norm` are of the batch that made the update;
    `tokens_per_second` is over all processes and `model_flop_utilisation` its share of what their hardware could do
    at most; `memory_bytes` is the largest that the first process ever had, on a GPU there; `validation_loss`, at
    checkpoints alone, is of the first windows of the validation split.
    """

    def __init__(
        self, path: Path, plan: TrainingPlan, world: World, *, steps_done: int, peak_tokens_per_second: float
    ) -> None:
        self._path = path
        self._plan = plan
        self._world = world
        self._peak = peak_tokens_per_second
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._since = time.monotonic()
        if world.is_first:
            # What was written after the autosave that this process starts from will be written again.
            rows = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            write_text(path, "".join(rows[:steps_done]))

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Keep one update's results, of the 0-based step `step`; nothing is read from the device yet."""
        self._pending.append((step, values))

    def sync(self) -> None:
        """Force what was flushed to disk."""
        if self._world.is_first:
            fsync(self._path)

    def flush(self) -> list[dict[str, Any]]:
        """Append what was added and return its rows. All processes call. Raises DivergedError."""
        if not self._pending:
            return []
        results = [values for _, values in self._pending]
        losses = self._world.mean(torch.stack([values["loss"].detach() for values in results])).tolist()
        norms = torch.stack([values["gradient_norm"] for values in results]).tolist()
        speed = len(results) * self._plan.batch_tokens / (time.monotonic() - self._since)
        memory = _peak_memory()
        rows: list[dict[str, Any]] = []
        for (step, values), loss, gradient_norm in zip(self._pending, losses, norms, strict=True):
            if not math.isfinite(loss) or not math.isfinite(gradient_norm):
                self._append(rows)
                raise DivergedError(step, loss, gradient_norm, values["learning_rate"])
            row = {
                "step": step + 1,
                "tokens_seen": (step + 1) * self._plan.batch_tokens,
                "loss": loss,
                "learning_rate": values["learning_rate"],
                "gradient_norm": gradient_norm,
                "tokens_per_second": round(speed),
                "model_flop_utilisation": round(speed / self._peak, 4),
                "memory_bytes": memory,
            }
            if "validation_loss" in values:
                row["validation_loss"] = values["validation_loss"]
            rows.append(row)
        self._append(rows)
        self._pending.clear()
        self._since = time.monotonic()
        return rows

    def _append(self, rows: list[dict[str, Any]]) -> None:
        if self._world.is_first:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


def _peak_memory() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
