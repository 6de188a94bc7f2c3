"""The train step as a job: its processes started, its log kept, its progress shown, its snapshots scored.

Nothing here has a say in the weights, so nothing here is part of a run's identity: the training itself is
`training.train`, which is handed what it needs of this.
"""

import logging
import os
from dataclasses import asdict, fields
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_ablation import evaluation
from attention_ablation.config import Execution, Study
from attention_ablation.data.stream import TokenStream
from attention_ablation.evaluation import Scoring
from attention_ablation.evaluation_schema import write_evaluation
from attention_ablation.kernels.latent_attention import choose_implementation
from attention_ablation.model.config import ModelConfig, Scaling
from attention_ablation.model.flops import flops_per_token
from attention_ablation.model.transformer import LanguageModel
from attention_ablation.progress import Progress
from attention_ablation.training.hardware import peak_flops
from attention_ablation.training.launch import launch
from attention_ablation.training.plan import ExecutionPlan
from attention_ablation.training.train import Hooks, Score, train
from attention_ablation.training.watch import Watcher
from attention_ablation.training.world import World, world_of

LOG_BYTES = 10_000_000  # of a run's own log; one older one is kept

log = logging.getLogger(__name__)


def run_job(
    name: str,
    identity: dict[str, Any],
    study: Study,
    scoring: Scoring,
    *,
    command: list[str],
    dataset: Path,
    state_folder: Path,
    output: Path,
) -> int:
    """Train run `name`, in as many processes as the study asks for; returns the exit code.

    `command` is this process's own, for those that have to be started: they come here again.
    """
    execution = study.execution
    world = world_of(os.environ, processes=execution.processes)
    if world is None:
        return launch(
            command,
            processes=execution.processes,
            nodes=execution.nodes,
            launcher=execution.launcher,
            threads=execution.threads,
        )
    if execution.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own condition, before CUDA starts
    if world.is_first:
        _keep_log(state_folder)
    else:
        logging.getLogger().setLevel(logging.WARNING)  # all say the same
    watcher = Watcher(
        Path("logs/watch") / name, name, identity, tensorboard=execution.tensorboard, wandb=execution.wandb
    )
    progress = Progress(name.rpartition("-")[0], "steps")

    def report(rows: list[dict[str, Any]], steps: int) -> None:
        progress.update(rows[-1]["step"], steps, rows[-1]["loss"])
        watcher.add(rows)

    training = study.settings_of(identity["arm"])[1]
    score = None
    if training.keep_snapshots == "last":
        score = _scorer(name, identity, execution, study.evaluation.batch, scoring, world, dataset)
    try:
        train(
            name,
            identity,
            ExecutionPlan(**{field.name: getattr(execution, field.name) for field in fields(ExecutionPlan)}),
            Hooks(report, lambda device, precision: _peak_tokens_per_second(identity, device, precision), score),
            world=world,
            dataset=dataset,
            allow_epochs=training.epochs == "allow",
            state_folder=state_folder,
            output=output,
        )
    finally:
        watcher.close()
    return 0


def _keep_log(folder: Path) -> None:
    """Log to the run's own file as well: Snakemake removes the rule's log before each attempt."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(folder / "train.log", maxBytes=LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(handler)


def _peak_tokens_per_second(identity: dict[str, Any], device: str, precision: Any) -> float:
    """What one process could train at most, if its device did matrix products alone."""
    peak, source = peak_flops(device, precision)
    log.info("utilisation is of %.3g TFLOP/s a process, %s", peak / 1e12, source)
    return peak / flops_per_token(ModelConfig(**identity["model"]), identity["training"]["context"]).total


def _scorer(
    name: str,
    identity: dict[str, Any],
    execution: Execution,
    batch: int,
    scoring: Scoring,
    world: World,
    dataset: Path,
) -> Score:
    """What scores a snapshot inside the training as the evaluation would, its windows shared out among processes."""
    stream = TokenStream.open(dataset)
    context = identity["training"]["context"]
    windows = evaluation.validation_windows(stream, scoring.tokens, context=context, batch=batch)
    share = windows[world.share_of(len(windows))]

    def score(weights: dict[str, Tensor], entry: dict[str, Any], path: Path, device: str) -> dict[str, Any]:
        attention, _ = choose_implementation(execution.attention, device)
        with torch.device("meta"):
            model = LanguageModel(
                ModelConfig(**identity["model"]), Scaling(**identity["scaling"]), attention=attention
            )
        model.load_state_dict({key: value.to(device) for key, value in weights.items()}, assign=True)
        scores = evaluation.score_windows(model.eval(), share, precision=scoring.precision)
        gathered = world.gather(scores)
        losses = [loss for part, _ in gathered for loss in part]
        counts = [count for _, part in gathered for count in part]
        rows = evaluation.rows_of_snapshot(name, identity, entry, losses, counts, dataset=scoring.dataset)
        world.first(lambda: write_evaluation(path, rows))
        return asdict(scoring)

    return score
