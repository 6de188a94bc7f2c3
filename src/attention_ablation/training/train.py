"""Train one run: from its identity to published snapshots, resumable at any moment."""

import json
import logging
import platform
import shutil
import time
from collections.abc import Callable
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
from attention_ablation.model.loss import choose_loss
from attention_ablation.model.snapshots import save_snapshot
from attention_ablation.model.transformer import LanguageModel
from attention_ablation.training import state
from attention_ablation.training.engine import Engine, choose_device
from attention_ablation.training.metrics import Metrics, count_rows
from attention_ablation.training.plan import ExecutionPlan, TrainingPlan

METRICS_EVERY = 10  # steps between two reads of the device's results: each read waits for the device
MICRO_BATCH_TOKENS = 4_096  # of an automatic micro-batch
METRICS, SIDECAR = "metrics.jsonl", "run.json"

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
    stream = TokenStream.open(dataset)
    with state.locked(state_folder):
        state.keep_only_if_of(state_folder, identity, stream.sha256)
        snapshots = state_folder / state.SNAPSHOTS
        if _is_finished(snapshots):
            log.info("finished before: publishing its snapshots")
        else:
            stream.verify(memory=state_folder.parent / "hashes" / f"{stream.sha256}.json")
            stream.check_validation(plan.validation_tokens)
            windows = _check_length(stream, plan, allow_epochs=allow_epochs)
            _run_to_the_end(name, identity, plan, execution, stream, windows, state_folder, report)
        output.mkdir(parents=True, exist_ok=True)
        for file in (METRICS, SIDECAR):
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
    start = state.newest_whole_autosave(folder, lambda step: _missing_up_to(step, plan, folder))
    resolved = _resolve(execution, plan, vocabulary_size=identity["model"]["vocabulary_size"])
    if start is not None:
        resolved = _as_begun(resolved, folder)
    log.info("execution: %s", json.dumps(resolved))
    attention, device = resolved["attention"], resolved["device"]
    torch.set_num_threads(resolved["threads"])
    model = LanguageModel(ModelConfig(**identity["model"]), Scaling(**identity["scaling"]), attention=attention)
    initialize(model, seed=plan.seed, std=plan.initialization_std)
    engine = Engine(model.to(device), plan, device=device, micro_batch=resolved["micro_batch"], loss=resolved["loss"])
    if start is not None:
        engine.load(str(start[1].parent), start[1].name)
    log.info("%s at step %d of %d", "resuming" if start else "starting", engine.steps_done, plan.steps)
    state.keep_snapshots_up_to(folder, engine.steps_done)
    sidecar = {"run": name, "identity": identity, "stream": stream.sha256, "execution": resolved | _versions(device)}
    write_json(folder / SIDECAR, sidecar)

    metrics = Metrics(folder / METRICS, plan, steps_done=engine.steps_done)
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
            _save_snapshot(name, identity, engine, folder)
        if due and step < plan.steps:
            metrics.sync()  # its rows up to here will not be written again
            autosaver.save()
    _finish(plan, folder)


def _save_snapshot(name: str, identity: dict[str, Any], engine: Engine, folder: Path) -> None:
    step, tokens_seen = engine.steps_done, engine.steps_done * engine.plan.batch_tokens
    metadata = {
        "run": name,
        "model": identity["model"],
        "scaling": identity["scaling"],
        "identity": identity,
        "step": step,
        "tokens_seen": tokens_seen,
    }
    path = folder / state.SNAPSHOTS / f"step-{step:08d}.safetensors"
    save_snapshot(path, engine.weights(), metadata)
    state.record_snapshot(folder, path, step, tokens_seen)


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
        folder = self._folder / "autosave" / f"step-{step}"
        state.write_manifest(folder, [state.facts_of(path) for path in sorted(folder.iterdir())])
        state.drop_old_autosaves(self._folder)
        self._saved_at = time.monotonic()
        log.info("autosaved at step %d", step)


def _resolve(execution: ExecutionPlan, plan: TrainingPlan, *, vocabulary_size: int) -> dict[str, Any]:
    """What decides the rounding of a run beside its identity, `auto` resolved."""
    device = choose_device(execution.device)
    attention, reason = choose_implementation(execution.attention, device)
    log.info("attention path: %s (%s)", attention, reason)
    micro_batch = choose_micro_batch(execution.micro_batch, plan)
    loss, reason = choose_loss(execution.loss, tokens=micro_batch * plan.context, vocabulary_size=vocabulary_size)
    log.info("loss path: %s (%s)", loss, reason)
    return {
        "device": device,
        "threads": execution.threads,
        "micro_batch": micro_batch,
        "attention": attention,
        "loss": loss,
    }


def _as_begun(resolved: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The execution that the run began with, which it keeps to its end: another one rounds differently."""
    sidecar = state.read_json(folder / SIDECAR)
    if sidecar is None:
        log.warning("%s is damaged: what the run began with is not known", folder / SIDECAR)
        return resolved
    begun = {key: sidecar["execution"][key] for key in resolved}
    for key, value in begun.items():
        if value == resolved[key]:
            continue
        if key == "device":
            raise UserError(
                f"{folder}: the run began on {value}, this host offers {resolved[key]}; "
                "go on there, or remove this folder to train again"
            )
        log.warning("execution.%s: going on with %s, as the run began, not with %s", key, value, resolved[key])
    return begun


def _versions(device: str) -> dict[str, Any]:
    import deepspeed

    return {
        "device_name": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "processes": 1,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
    }
