"""An autosave: weights and AdamW's moments of a run by parameter name, in safetensors.

It belongs to no ZeRO stage and to no number of processes, so a run goes on with another of either. Never a pickle.
"""

import functools
import logging
import time
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.training import state
from attention_ablation.training.engine import MOMENTS, Engine
from attention_ablation.training.world import World

WEIGHTS = "weights"

log = logging.getLogger(__name__)


class Autosaver:
    """Saves the engine's whole state every so many minutes or steps, and keeps the last two."""

    def __init__(self, engine: Engine, world: World, folder: Path, *, minutes: float, steps: int) -> None:
        self._engine = engine
        self._world = world
        self._folder = folder
        self._minutes = minutes
        self._steps = steps
        self._saved_at = time.monotonic()
        self._saved_step = engine.steps_done

    def is_due(self) -> bool:
        """Whether the interval is over, in minutes or in steps; processes may disagree about the minutes."""
        by_steps = self._steps > 0 and self._engine.steps_done % self._steps == 0
        return by_steps or time.monotonic() - self._saved_at >= 60 * self._minutes

    def save(self) -> None:
        """Write an autosave, its manifest last, and drop the oldest. All processes call; the first one writes.

        Raises UserError when it cannot be written; what was saved before stays.
        """
        step = self._engine.steps_done
        if step == self._saved_step:
            return
        started = time.monotonic()
        folder = self._world.first(lambda: str(state.begin_autosave(self._folder, step)))
        for kind in (WEIGHTS, *MOMENTS):
            tensors = self._engine.weights() if kind == WEIGHTS else self._engine.moments(kind)
            write = functools.partial(_write, Path(folder) / f"{kind}.safetensors", tensors)
            self._world.first(write)
        self._world.first(lambda: state.finish_autosave(self._folder, Path(folder)))
        self._saved_at, self._saved_step = time.monotonic(), step
        log.info("autosaved at step %d in %.1f s", step, self._saved_at - started)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of an autosave by name."""
    path = folder / f"{WEIGHTS}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); run the same command again") from error


def restore(engine: Engine, folder: Path, step: int) -> None:
    """Give an engine that has the autosave's weights its moments and its step."""
    opened = {}
    for moment in MOMENTS:
        path = folder / f"{moment}.safetensors"
        try:
            opened[moment] = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error}); run the same command again") from error
    engine.restore(step, lambda moment, name: opened[moment].get_tensor(name))


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file({name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}, path)
    except (OSError, SafetensorError) as error:  # SafetensorError stands for a full disk as well
        raise UserError(
            f"{path}: the autosave cannot be written ({error}); the state that was saved before is whole: "
            "make room or give the right to write, and run the same command again"
        ) from error
