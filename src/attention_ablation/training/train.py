"""Train one run: from its identity to published snapshots, resumable at any moment."""

import logging
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attention_ablation.data.order import read_batch, window_count, windows_of_step
from attention_ablation.data.stream import TokenStream
from attention_ablation.errors import UserError
from attention_ablation.files import write_json, write_text
from attention_ablation.kernels.latent_attention import choose_implementation
from attention_ablation.model.config import ModelConfig, Scaling
from attention_ablation.model.initialization import initialize
from attention_ablation.model.snapshots import save_snapshot
from attention_ablation.model.transformer import LanguageModel
from attention_ablation.training import state
from attention_ablation.training.engine import Engine, choose_device
from attention_ablation.training.metrics import Metrics
from attention_ablation.training.plan import ExecutionPlan, TrainingPlan

METRICS_EVERY = 10  # steps between two reads of the device's results: each read waits for the device
MICRO_BATCH_TOKENS = 4_096  # of an automatic micro-batch

log = logging.getLogger(__name__)

Report = Callable[[int, int, float], None]  # steps done, steps in all, loss


def train(
    name: str,
    identity: dict[str, Any],
    execution: ExecutionPlan,
    *,
    dataset: Path,
    allow_epochs: bool,
    state_folder: Path,
    output: Path,
    report: Report,
) -> None:
    """Train run `name` and publish `snapshots/`, `metrics.jsonl` and `run.json` in `output`.

    Starts from the newest whole autosave in `state_folder`; a run that is finished there is only published.
    Raises UserError for a corpus too short and for a loss that is not finite.
    """
    plan = TrainingPlan(**identity["training"])
    torch.set_num_threads(execution.threads)
    stream = TokenStream.open(dataset)
    with state.locked(state_folder):
        state.keep_only_if_of(state_folder, identity, stream.sha256)
        snapshots = state_folder / "snapshots"
        if _is_finished(snapshots):
            log.info("finished before: publishing its snapshots")
        else:
            stream.verify(memory=state_folder.parent / "hashes" / f"{stream.sha256}.json")
            stream.check_validation(plan.validation_tokens)
            windows = _check_length(stream, plan, allow_epochs=allow_epochs)
            _run_to_the_end(name, identity, plan, execution, stream, windows, state_folder, report)
        output.mkdir(parents=True, exist_ok=True)
        for file in ("metrics.jsonl", "run.json"):
            write_text(output / file, (state_folder / file).read_text(encoding="utf-8"))
        state.publish(snapshots, output / "snapshots")


def _is_finished(snapshots: Path) -> bool:
    """Whether all snapshots are there, as recorded; what was damaged since is said and trained again."""
    if not (snapshots / state.MANIFEST).exists():
        return False
    try:
        state.read_manifest(snapshots)
    except UserError as error:
        log.warning("the finished snapshots are damaged (%s): training again", error)
        shutil.rmtree(snapshots)
        return False
    return True


def _run_to_the_end(
    name: str,
    identity: dict[str, Any],
    plan: TrainingPlan,
    execution: ExecutionPlan,
    stream: TokenStream,
    windows: int,
    folder: Path,
    report: Report,
) -> None:
    device = choose_device(execution.device)
    attention, reason = choose_implementation(execution.attention, device)
    log.info("attention path: %s (%s)", attention, reason)
    micro_batch = choose_micro_batch(execution.micro_batch, plan)
    model = LanguageModel(ModelConfig(**identity["model"]), Scaling(**identity["scaling"]), attention=attention)
    initialize(model, seed=plan.seed, std=plan.initialization_std)
    engine = Engine(model.to(device), plan, device=device, micro_batch=micro_batch)
    resumed_from = _resume(engine, plan, folder)
    sidecar = {
        "run": name,
        "identity": identity,
        "stream": stream.sha256,
        "execution": _facts(execution, device=device, attention=attention, micro_batch=micro_batch),
    }
    write_json(folder / "run.json", sidecar)

    metrics = Metrics(folder / "metrics.jsonl", plan, steps_done=resumed_from)
    autosaver = Autosaver(engine, folder, execution)
    while engine.steps_done < plan.steps:
        numbers = windows_of_step(engine.steps_done, windows=windows, batch=plan.sequences, seed=plan.seed)
        inputs, targets = read_batch(stream, numbers, offset=plan.validation_tokens, context=plan.context)
        metrics.add(engine.steps_done, engine.step(torch.from_numpy(inputs), torch.from_numpy(targets)))
        step = engine.steps_done
        at_checkpoint, due = step in plan.checkpoint_steps, autosaver.is_due()
        if at_checkpoint or due or step % METRICS_EVERY == 0:
            report(step, plan.steps, metrics.flush())
        if at_checkpoint:
            _save_snapshot(name, identity, engine, folder / "snapshots")
        if due and step < plan.steps:
            metrics.sync()  # its rows up to here will not be written again
            autosaver.save()
    _finish(plan, folder)


def _save_snapshot(name: str, identity: dict[str, Any], engine: Engine, folder: Path) -> None:
    metadata = {
        "run": name,
        "model": identity["model"],
        "scaling": identity["scaling"],
        "identity": identity,
        "step": engine.steps_done,
        "tokens_seen": engine.steps_done * engine.plan.batch_tokens,
    }
    save_snapshot(folder / _snapshot_name(engine.steps_done), engine.weights(), metadata)


def _finish(plan: TrainingPlan, folder: Path) -> None:
    """Write the snapshots' manifest, which makes the run finished, and drop what only an unfinished one needs."""
    entries = [
        {"file": _snapshot_name(step), "step": step, "tokens_seen": step * plan.batch_tokens}
        for step in plan.checkpoint_steps
    ]
    state.write_manifest(folder / "snapshots", entries)
    for path in state.autosaves(folder):
        state.remove_autosave(path)


def _snapshot_name(step: int) -> str:
    return f"step-{step:08d}.safetensors"


def _check_length(stream: TokenStream, plan: TrainingPlan, *, allow_epochs: bool) -> int:
    """Windows to train on; refuses a corpus that the run would read more than once."""
    windows = window_count(stream.length - plan.validation_tokens, plan.context)
    wanted = plan.steps * plan.sequences
    if windows < 1 or (wanted > windows and not allow_epochs):
        raise UserError(
            f"training.tokens: {wanted * plan.context:,} asked for, but after {plan.validation_tokens:,} validation "
            f"tokens the corpus has {max(0, windows) * plan.context:,}; ask for fewer, or set training.epochs: allow"
        )
    return windows


def choose_micro_batch(requested: int | str, plan: TrainingPlan) -> int:
    """Sequences a forward pass: as asked, or the largest divisor of the batch within MICRO_BATCH_TOKENS."""
    if requested != "auto":
        return int(requested)
    fitting = [
        n for n in range(1, plan.sequences + 1) if plan.sequences % n == 0 and n * plan.context <= MICRO_BATCH_TOKENS
    ]
    return max(fitting, default=1)


def _resume(engine: Engine, plan: TrainingPlan, folder: Path) -> int:
    """Load the newest whole autosave; returns the step it stood at."""
    found = state.newest_whole_autosave(folder)
    if found is None:
        log.info("starting at step 0 of %d", plan.steps)
        return 0
    step, path = found
    engine.load(str(path.parent), path.name)
    log.info("resuming at step %d of %d", step, plan.steps)
    return step


class Autosaver:
    """Saves the engine's whole state every so many minutes or steps."""

    def __init__(self, engine: Engine, folder: Path, execution: ExecutionPlan) -> None:
        self._engine = engine
        self._folder = folder
        self._execution = execution
        self._saved_at = time.monotonic()

    def is_due(self) -> bool:
        """Whether the interval is over, in minutes or in steps."""
        every = self._execution.autosave_steps
        by_steps = every > 0 and self._engine.steps_done % every == 0
        return by_steps or time.monotonic() - self._saved_at >= 60 * self._execution.autosave_minutes

    def save(self) -> None:
        """Write an autosave, its manifest last, and drop the oldest."""
        step = self._engine.steps_done
        self._engine.save(str(self._folder / "autosave"), f"step-{step}")
        state.write_manifest(self._folder / "autosave" / f"step-{step}")
        state.drop_old_autosaves(self._folder)
        self._saved_at = time.monotonic()
        log.info("autosaved at step %d", step)


def _facts(execution: ExecutionPlan, *, device: str, attention: str, micro_batch: int) -> dict[str, Any]:
    """What the run was executed with, `auto` resolved."""
    import deepspeed

    return asdict(execution) | {
        "device": device,
        "device_name": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "attention": attention,
        "micro_batch": micro_batch,
        "processes": 1,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
    }
