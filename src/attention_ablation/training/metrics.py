"""The metrics file of one run: loss, learning rate, gradient norm and speed, a line a step."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from attention_ablation.errors import UserError
from attention_ablation.files import fsync, write_text
from attention_ablation.training.plan import TrainingPlan


def count_rows(path: Path) -> int:
    """Whole lines of a metrics file; 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Metrics:
    """The run's metrics file: one JSON object a step, appended every few steps.

    `step` counts updates done; `loss` (nats a token) and `gradient_norm` are of the batch that made the update.
    """

    def __init__(self, path: Path, plan: TrainingPlan, *, steps_done: int) -> None:
        self._path = path
        self._plan = plan
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._since = time.monotonic()
        self._loss = math.nan
        # What was written after the autosave that this process starts from will be written again.
        rows = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        write_text(path, "".join(rows[:steps_done]))

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Keep one update's results, of the 0-based step `step`; nothing is read from the device yet."""
        self._pending.append((step, values))

    def sync(self) -> None:
        """Force what was flushed to disk."""
        fsync(self._path)

    def flush(self) -> float:
        """Append what was added; returns the newest loss. Raises UserError for one that is not finite."""
        if not self._pending:
            return self._loss
        numbers = torch.stack(
            [torch.stack([values["loss"], values["gradient_norm"]]) for _, values in self._pending]
        ).tolist()
        speed = len(self._pending) * self._plan.batch_tokens / (time.monotonic() - self._since)
        with self._path.open("a", encoding="utf-8") as file:
            for (step, values), (loss, gradient_norm) in zip(self._pending, numbers, strict=True):
                if not math.isfinite(loss) or not math.isfinite(gradient_norm):
                    raise UserError(
                        f"training broke down: loss {loss}, gradient norm {gradient_norm} at step {step} "
                        f"(learning rate {values['learning_rate']:.3g}); lower training.learning_rate"
                    )
                row = {
                    "step": step + 1,
                    "tokens_seen": (step + 1) * self._plan.batch_tokens,
                    "loss": loss,
                    "learning_rate": values["learning_rate"],
                    "gradient_norm": gradient_norm,
                    "tokens_per_second": round(speed),
                }
                file.write(json.dumps(row) + "\n")
        self._pending.clear()
        self._since = time.monotonic()
        self._loss = numbers[-1][0]
        return self._loss
