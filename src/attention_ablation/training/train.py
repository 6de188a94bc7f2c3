"""Train one run: from its identity to published snapshots, resumable at any moment, in any number of processes."""

import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from attention_ablation.data.order import read_batch, window_count, windows_of_step
from attention_ablation.data.stream import TokenStream
from attention_ablation.errors import UserError
from attention_ablation.files import write_json, write_text
from attention_ablation.model.config import ModelConfig, Scaling
from attention_ablation.model.initialization import initialize
from attention_ablation.model.snapshots import save_snapshot
from attention_ablation.model.transformer import LanguageModel
from attention_ablation.training import autosave, state
from attention_ablation.training.engine import Engine, choose_gpu
from attention_ablation.training.execution import resolve, versions
from attention_ablation.training.metrics import DivergedError, Metrics, count_rows
from attention_ablation.training.plan import ExecutionPlan, TrainingPlan
from attention_ablation.training.stop import Stopped, StopRequest
from attention_ablation.training.world import (
    LOCKED,
    World,
    connect,
    leave_process_group,
    peers_expected,
    start_process_group,
    wait_for_the_lock,
)

METRICS_EVERY = 10  # steps between two reads of the device's results: each read waits for the device
METRICS, SIDECAR, DEEPSPEED = "metrics.jsonl", "run.json", "deepspeed.json"
NAMED_WINDOWS = 8  # of a batch in which the training broke down

log = logging.getLogger(__name__)


class Score(Protocol):
    """Scores a snapshot's weights and writes the rows to `path` in place of them; all processes call.

    Returns what the scores were made with, for the manifest.
    """

    def __call__(
        self, weights: dict[str, Tensor], entry: dict[str, Any], path: Path, device: str
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Hooks:
    """What a training does beside training; none of it has a say in the weights, so it is handed in."""

    report: Callable[[list[dict[str, Any]], int], None]  # rows of the metrics, steps in all
    peak_tokens_per_second: Callable[[str, str], float]  # of one process, by device and precision
    score: Score | None = None  # keeps the scores alone of every snapshot but the last


def train(
    name: str,
    identity: dict[str, Any],
    execution: ExecutionPlan,
    hooks: Hooks,
    *,
    world: World,
    dataset: Path,
    allow_epochs: bool,
    state_folder: Path,
    output: Path,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Train run `name` and publish `snapshots/`, `metrics.jsonl`, `deepspeed.json` and `run.json` in `output`.

    Starts from the newest whole autosave in `state_folder`; a run that is finished there is only published.
    Every process of the run calls it; files are the first one's. Raises UserError for a corpus too short, a loss
    that is not finite and a process that is lost, Stopped when it was asked to stop and has saved.
    """
    started = time.monotonic()
    plan = TrainingPlan(**identity["training"])
    stream = TokenStream.open(dataset)
    minutes = execution.collective_minutes
    with ExitStack() as held:
        stop = held.enter_context(StopRequest(environment))
        store = connect(world, environment, minutes=minutes)
        if world.is_first:
            held.enter_context(state.locked(state_folder))
            store.set(LOCKED, "")
        else:
            wait_for_the_lock(store)
        start_process_group(world, store, minutes=minutes)
        held.callback(leave_process_group, world)
        held.enter_context(peers_expected(minutes))
        if world.first(lambda: _is_finished(state_folder, identity, stream.sha256)):
            log.info("finished before: publishing its snapshots")
        else:
            windows = world.first(lambda: _check_data(stream, plan, state_folder, allow_epochs=allow_epochs))
            run = Run(name, identity, plan, execution, hooks, world, stream, windows, state_folder)
            run.to_the_end(stop)
            log.info("%s in %.0f s", run.totals(), time.monotonic() - started)
        world.first(lambda: _publish(state_folder, output))


def _is_finished(folder: Path, identity: dict[str, Any], stream_sha256: str) -> bool:
    """Whether all snapshots are there, as recorded; what was damaged since is said and trained again.

    Raises the failure again of a run that failed by its own nature.
    """
    state.keep_only_if_of(folder, identity, stream_sha256)
    snapshots = folder / state.SNAPSHOTS
    if not (snapshots / state.MANIFEST).exists():
        state.check_not_failed(folder)
        return False
    try:
        state.read_manifest(snapshots)
    except UserError as error:
        log.warning("the finished snapshots are damaged (%s): training again", error)
        shutil.rmtree(snapshots)
        return False
    return True


def _check_data(stream: TokenStream, plan: TrainingPlan, folder: Path, *, allow_epochs: bool) -> int:
    """Windows to train on; refuses a corpus that is damaged, or that the run would read more than once."""
    stream.verify(memory=folder.parent / "hashes" / f"{stream.sha256}.json")
    stream.check_validation(plan.validation_tokens)
    windows = window_count(stream.length - plan.validation_tokens, plan.context)
    wanted = plan.steps * plan.sequences
    if windows < 1 or (wanted > windows and not allow_epochs):
        raise UserError(
            f"training.tokens: {wanted * plan.context:,} asked for, but after {plan.validation_tokens:,} validation "
            f"tokens the corpus has {max(0, windows) * plan.context:,}; ask for fewer, or set training.epochs: allow"
        )
    return windows


def _publish(folder: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for file in (METRICS, DEEPSPEED, SIDECAR):
        write_text(output / file, (folder / file).read_text(encoding="utf-8"))
    state.publish(folder / state.SNAPSHOTS, output / "snapshots")


class Run:
    """One run in training, in one of its processes."""

    def __init__(
        self,
        name: str,
        identity: dict[str, Any],
        plan: TrainingPlan,
        execution: ExecutionPlan,
        hooks: Hooks,
        world: World,
        stream: TokenStream,
        windows: int,
        folder: Path,
    ) -> None:
        """Build the engine, where the run's newest whole autosave left off if there is one."""
        self._name, self._identity, self._plan = name, identity, plan
        self._hooks, self._world, self._stream, self._windows = hooks, world, stream, windows
        self._folder = folder
        start = world.first(
            lambda: state.newest_whole_autosave(folder, lambda step: _missing_up_to(step, plan, folder))
        )
        begun = world.first(lambda: _begun(folder) if start else {})
        self._resolved, changes = resolve(
            execution,
            plan,
            vocabulary_size=identity["model"]["vocabulary_size"],
            begun=begun.get("execution"),
            folder=folder,
        )
        log.info("execution: %s", json.dumps(dataclasses.asdict(self._resolved)))
        self._engine = self._build(start)
        steps_done = self._engine.steps_done
        changes = [*begun.get("changes", []), *({"step": steps_done} | change for change in changes)]
        world.first(lambda: self._write_sidecar(changes))
        self._metrics = Metrics(
            folder / METRICS,
            plan,
            world,
            steps_done=steps_done,
            peak_tokens_per_second=world.size * world.first(self._peak),
        )
        self._autosaver = autosave.Autosaver(
            self._engine, world, folder, minutes=execution.autosave_minutes, steps=execution.autosave_steps
        )
        self._validation = self._windows_of_validation(execution.validation_sequences)
        self._started, self._first_step = time.monotonic(), steps_done

    def _build(self, start: tuple[int, Path] | None) -> Engine:
        resolved, plan = self._resolved, self._plan
        torch.set_num_threads(resolved.threads)
        # A GPU's matrix products want CUBLAS_WORKSPACE_CONFIG for it, which the command sets before CUDA starts.
        torch.use_deterministic_algorithms(resolved.deterministic)
        if resolved.device == "cuda":
            choose_gpu(self._world)
        model = LanguageModel(
            ModelConfig(**self._identity["model"]),
            Scaling(**self._identity["scaling"]),
            attention=resolved.attention,
        )
        if start is None:
            initialize(model, seed=plan.seed, std=plan.initialization_std)
        else:
            model.load_state_dict(autosave.load_weights(start[1]))
        engine = Engine(model, plan, resolved, self._world)
        if start is not None:
            autosave.restore(engine, start[1], start[0])
        log.info("%s at step %d of %d", "resuming" if start else "starting", engine.steps_done, plan.steps)
        return engine

    def _peak(self) -> float:
        return self._hooks.peak_tokens_per_second(self._resolved.device, self._plan.precision)

    def _write_sidecar(self, changes: list[dict[str, Any]]) -> None:
        state.keep_snapshots_up_to(self._folder, self._engine.steps_done)
        sidecar = {
            "run": self._name,
            "identity": self._identity,
            "stream": self._stream.sha256,
            "execution": dataclasses.asdict(self._resolved) | versions(self._resolved.device),
            "changes": changes,  # of the execution on the way, by step
        }
        write_json(self._folder / SIDECAR, sidecar)
        write_json(self._folder / DEEPSPEED, self._engine.config)

    def to_the_end(self, stop: StopRequest) -> None:
        """Train what is left. Raises Stopped, after saving, when `stop` asks for it in any process."""
        plan, engine = self._plan, self._engine
        while engine.steps_done < plan.steps:
            numbers = self._windows_of(engine.steps_done)[self._world.share_of(plan.sequences)]
            result = engine.step(*self._read(numbers))
            step = engine.steps_done
            at_checkpoint = step in plan.checkpoint_steps
            due, stopping = self._world.any(self._autosaver.is_due(), stop.is_asked())
            if at_checkpoint and self._validation is not None:
                result["validation_loss"] = engine.loss_of(*self._validation)
            self._metrics.add(step - 1, result)
            if at_checkpoint or due or stopping or step % METRICS_EVERY == 0:
                self._report()
            if at_checkpoint:
                self._save_snapshot()
            if (due or stopping) and step < plan.steps:
                self._metrics.sync()  # its rows up to here will not be written again
                self._autosaver.save()
            if stopping and step < plan.steps:
                raise Stopped(step, max(self._world.gather(stop.signal_number)))
        self._world.first(lambda: _finish(plan, self._folder))

    def _report(self) -> None:
        try:
            rows = self._metrics.flush()
        except DivergedError as error:
            windows = self._windows_of(error.step)
            named = ", ".join(map(str, windows[:NAMED_WINDOWS])) + (", ..." if len(windows) > NAMED_WINDOWS else "")
            message = (
                f"{error}, whose batch is windows {named} of the training split. The same run fails again: lower "
                "training.learning_rate, or look at that batch; after a fault of the machine, `ablation clean "
                "--failed` lets it go on from its last autosave"
            )
            self._world.first(lambda: state.record_failure(self._folder, message))
            raise UserError(message) from error
        if self._world.is_first:
            self._hooks.report(rows, self._plan.steps)

    def _windows_of(self, step: int) -> np.ndarray:
        plan = self._plan
        return windows_of_step(step, windows=self._windows, batch=plan.sequences, seed=plan.seed)

    def _read(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        inputs, targets = read_batch(
            self._stream, numbers, offset=self._plan.validation_tokens, context=self._plan.context
        )
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _windows_of_validation(self, sequences: int) -> tuple[Tensor, Tensor] | None:
        """The first whole windows of the validation split, at most `sequences`."""
        fitting = min(sequences, window_count(self._plan.validation_tokens, self._plan.context))
        if fitting == 0:
            return None
        inputs, targets = read_batch(self._stream, np.arange(fitting), offset=0, context=self._plan.context)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _save_snapshot(self) -> None:
        step = self._engine.steps_done
        entry: dict[str, Any] = {"step": step, "tokens_seen": step * self._plan.batch_tokens}
        weights = self._engine.weights()
        path = self._folder / state.SNAPSHOTS / f"step-{step:08d}.safetensors"
        if self._hooks.score is not None and step < self._plan.steps:
            path = path.with_suffix(".parquet")
            entry["scored"] = self._hooks.score(weights, entry, path, self._resolved.device)
        else:
            metadata = {
                "run": self._name,
                "model": self._identity["model"],
                "scaling": self._identity["scaling"],
                "identity": self._identity,
                **entry,
            }
            self._world.first(lambda: save_snapshot(path, weights, metadata))
        self._world.first(lambda: state.record_snapshot(self._folder, path, entry))

    def totals(self) -> str:
        """What this process has done, in a line."""
        steps, seconds = self._engine.steps_done - self._first_step, time.monotonic() - self._started
        tokens = steps * self._plan.batch_tokens
        return f"{self._name}: {steps:,} steps, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"


def _begun(folder: Path) -> dict[str, Any]:
    """The sidecar of the run that goes on."""
    sidecar = state.read_json(folder / SIDECAR)
    if not isinstance(sidecar, dict) or not isinstance(sidecar.get("execution"), dict):
        log.warning("%s is damaged: what the run began with is not known", folder / SIDECAR)
        return {}
    return sidecar


def _missing_up_to(step: int, plan: TrainingPlan, folder: Path) -> str | None:
    """What a run that goes on from `step` would lack at its end, or None."""
    rows = count_rows(folder / METRICS)
    if rows < step:
        return f"{folder / METRICS}: {rows} steps, {step} are done"
    whole = set()
    for entry in state.recorded_snapshots(folder):
        if entry["step"] <= step:
            state.check_file(folder / state.SNAPSHOTS, entry)
            whole.add(entry["step"])
    missing = [wanted for wanted in plan.checkpoint_steps if wanted <= step and wanted not in whole]
    return f"no snapshot of step {missing[0]}" if missing else None


def _finish(plan: TrainingPlan, folder: Path) -> None:
    """Write the snapshots' manifest, which makes the run finished, and drop what only an unfinished one needs.

    Raises UserError when a snapshot was damaged since it was saved; the next start goes back to before it.
    """
    snapshots, entries = folder / state.SNAPSHOTS, state.recorded_snapshots(folder)
    for entry in entries:
        state.check_file(snapshots, entry)
    assert [entry["step"] for entry in entries] == list(plan.checkpoint_steps)
    state.write_manifest(snapshots, entries)
    for path in state.autosaves(folder):
        state.remove_autosave(path)
