"""The rows of a run's metrics for people to watch: TensorBoard and Weights & Biases, by switch, through one writer.

Watching never ends a training: whatever those libraries raise is said once, and that one is switched off.
"""

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from attention_ablation.errors import UserError

NOT_SHOWN = ("step",)  # it is the x axis

log = logging.getLogger(__name__)

Row = dict[str, Any]


class Writer(Protocol):
    """One of the libraries; opened by its first rows."""

    def add(self, rows: Sequence[Row]) -> None:
        """Show rows of the metrics, ascending by step."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in `folder`; what an attempt that was killed wrote beyond the first row is purged by its step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def add(self, rows: Sequence[Row]) -> None:
        """See `Writer`."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=rows[0]["step"])
        for row in rows:
            for name, value in row.items():
                if name not in NOT_SHOWN:
                    self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """See `Writer`."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One run of theirs for a run of ours, whose name is its id, so that a resumed run goes on in it."""

    def __init__(self, folder: Path, run: str, settings: dict[str, Any], mode: Literal["offline", "online"]) -> None:
        self._folder, self._name, self._settings, self._mode = folder, run, settings, mode
        self._run: Any = None

    def add(self, rows: Sequence[Row]) -> None:
        """See `Writer`. Steps that an attempt which was killed has shown are passed over by the library."""
        if self._run is None:
            import wandb

            self._folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project="attention-ablation",
                id=self._name,
                name=self._name,
                resume="allow" if self._mode == "online" else None,
                mode=self._mode,
                dir=str(self._folder),
                config=self._settings,
                # The console is the log's; neither code nor git state is theirs to send.
                settings=wandb.Settings(console="off", silent=True, quiet=True, disable_git=True, disable_code=True),
            )
        for row in rows:
            self._run.log({name: value for name, value in row.items() if name not in NOT_SHOWN}, step=row["step"])

    def close(self) -> None:
        """See `Writer`."""
        if self._run is not None:
            self._run.finish()


class Watcher:
    """All writers that are switched on. Raises UserError for one whose package is not installed."""

    def __init__(
        self,
        folder: Path,
        run: str,
        settings: dict[str, Any],
        *,
        tensorboard: bool,
        wandb: Literal["none", "offline", "online"],
    ) -> None:
        self._writers: dict[str, Writer] = {}
        if tensorboard:
            _require("tensorboard")
            self._writers["tensorboard"] = TensorBoard(folder / "tensorboard")
        if wandb != "none":
            _require("wandb")
            self._writers["wandb"] = WeightsAndBiases(folder, run, settings, wandb)

    def add(self, rows: Sequence[Row]) -> None:
        """Show rows of the metrics, ascending by step."""
        if rows:
            for name, writer in list(self._writers.items()):
                self._try(name, lambda writer=writer: writer.add(rows))

    def close(self) -> None:
        """Write what is left and let go."""
        for name, writer in list(self._writers.items()):
            self._try(name, writer.close)

    def _try(self, name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            log.warning("%s: %s: %s; switched off, the training goes on", name, type(error).__name__, error)
            self._writers.pop(name, None)


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"execution.{package}: the package {package} is not installed; pip install 'attention-ablation[watch]', "
            "or switch it off"
        )
