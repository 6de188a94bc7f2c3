"""Score every snapshot of a run on the validation split, window by window.

Window k reads tokens kT .. kT+T-1 and predicts each one's successor; the last window may be short. So the token
counts of a snapshot sum to the tokens of the split minus one.
"""

import logging
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from attention_ablation.data.stream import TokenStream
from attention_ablation.errors import UserError
from attention_ablation.evaluation_schema import EVALUATION_SCHEMA, read_evaluation, write_evaluation
from attention_ablation.files import write_json
from attention_ablation.kernels.latent_attention import choose_implementation
from attention_ablation.model.snapshots import load_snapshot
from attention_ablation.training.execution import choose_device
from attention_ablation.training.state import read_json, read_manifest

Windows = list[tuple[Tensor, Tensor]]  # batches of inputs and their successors, (N, T) int64 each

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scoring:
    """All that decides a score beside the weights and the text; a digest of it is in the table's name."""

    dataset: str  # name of the evaluation set
    tokens: int  # the first of the stream
    precision: Literal["float32", "bfloat16"]
    code: str  # digest of the step's code


def evaluate(
    run: str,
    identity: dict[str, Any],
    scoring: Scoring,
    *,
    snapshots: Path,
    dataset: Path,
    batch: int,
    device: str,
    threads: int,
    attention: str,
    output: Path,
    sidecar: Path,
    report: Callable[[int, int], None],
) -> None:
    """Write one row a (snapshot, window) over the first tokens of the stream; see `evaluation_schema`.

    Raises UserError for a snapshot that is missing or changed, of another run, or scored as NaN, and for the scores
    of a training which kept no weights when they were made otherwise than `scoring`.
    """
    torch.set_num_threads(threads)
    device = choose_device(device)
    attention, reason = choose_implementation(attention, device)
    log.info("attention path: %s (%s)", attention, reason)
    stream = _stream_of(run, dataset, snapshots.parent / "run.json")
    windows = validation_windows(stream, scoring.tokens, context=identity["training"]["context"], batch=batch)
    entries = _snapshots_of(identity, snapshots)
    tables, model = [], None
    for done, entry in enumerate(entries):
        path = snapshots / entry["file"]
        if "scored" in entry:
            tables.append(_scored_in_training(path, entry, scoring))
        else:
            if model is None:
                model = load_snapshot(path, attention=attention, device=device)
            else:
                model.load_state_dict(load_file(path, device=device))  # the model is built once
            losses, counts = score_windows(model, windows, precision=scoring.precision)
            tables.append(rows_of_snapshot(run, identity, entry, losses, counts, dataset=scoring.dataset))
        report(done + 1, len(entries))
    write_evaluation(output, pa.concat_tables(tables))
    write_json(
        sidecar,
        {
            "run": run,
            "identity": identity,
            "code": scoring.code,
            "stream": stream.sha256,
            "evaluation": {key: value for key, value in asdict(scoring).items() if key != "code"},
            "scored_in_training": [entry["step"] for entry in entries if "scored" in entry],
            "execution": {
                "device": device,
                "threads": threads,
                "batch": batch,
                "attention": attention,
                "torch": torch.__version__,
                "host": platform.node(),
            },
        },
    )


def _stream_of(run: str, dataset: Path, sidecar: Path) -> TokenStream:
    """The token stream, checked against its own hashes and against the one that the run was trained on."""
    stream = TokenStream.open(dataset)
    stream.verify()
    trained_on = (read_json(sidecar) or {}).get("stream")
    if trained_on != stream.sha256:
        raise UserError(
            f"run {run} was trained on token stream {trained_on} ({sidecar}), {dataset} is {stream.sha256}: "
            f"remove {sidecar.parent} to make the run again"
        )
    return stream


def _snapshots_of(identity: dict[str, Any], snapshots: Path) -> list[dict[str, Any]]:
    """The manifest's entries: the whole grid, every file as recorded."""
    again = f"remove {snapshots.parent} and run the same command again"
    try:
        entries = read_manifest(snapshots)
    except UserError as error:
        raise UserError(f"{error}; {again}") from error
    found, expected = [entry["step"] for entry in entries], identity["training"]["checkpoint_steps"]
    if found != expected:
        raise UserError(f"{snapshots}: has steps {found}, the run's grid is {expected}; {again}")
    return entries


def _scored_in_training(path: Path, entry: dict[str, Any], scoring: Scoring) -> pa.Table:
    """The rows that the training made of a snapshot before it let it go."""
    if entry["scored"] != asdict(scoring):
        raise UserError(
            f"{path}: training.keep_snapshots: last kept the scores of step {entry['step']} and not its weights, and "
            f"they were made with {entry['scored']}, where {asdict(scoring)} is asked for: ask for the same "
            f"evaluation, or remove {path.parent.parent} and the run's state to train again"
        )
    return read_evaluation(path)


# --- scores of one snapshot: the training uses these as well --------------------------------------------------


def validation_windows(stream: TokenStream, tokens: int, *, context: int, batch: int) -> Windows:
    """All windows over the first `tokens` tokens of the stream, in order, in batches."""
    text = torch.from_numpy(stream.read(0, tokens).astype(np.int64))
    return list(batches_of_windows(text, context=context, batch=batch))


def batches_of_windows(text: Tensor, *, context: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (N, T) of all windows over `text`, in order; a short last window comes alone, unpadded."""
    whole = (len(text) - 1) // context
    inputs = text[: whole * context].view(whole, context)
    targets = text[1 : whole * context + 1].view(whole, context)
    yield from zip(inputs.split(batch), targets.split(batch), strict=True)
    if whole * context < len(text) - 1:
        yield text[None, whole * context : -1], text[None, whole * context + 1 :]


@torch.inference_mode()
def score_windows(
    model: torch.nn.Module, windows: Windows, *, precision: Literal["float32", "bfloat16"]
) -> tuple[list[float], list[int]]:
    """Summed loss (nats, added in float64) and token count of each window."""
    device = next(model.parameters()).device
    losses: list[float] = []
    counts: list[int] = []
    for inputs, targets in windows:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(inputs.to(device))
        each = F.cross_entropy(logits.float().transpose(1, 2), targets.to(device), reduction="none")
        losses += each.double().sum(dim=1).tolist()
        counts += [targets.shape[1]] * len(targets)
    return losses, counts


def rows_of_snapshot(
    run: str,
    identity: dict[str, Any],
    entry: dict[str, Any],
    losses: list[float],
    counts: list[int],
    *,
    dataset: str,
) -> pa.Table:
    """The table's rows of one snapshot; `entry` tells its `step` and `tokens_seen`. UserError for a broken loss."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise UserError(f"run {run}: loss is {losses[bad[0]]} at step {entry['step']}, window {bad[0]}")
    log.info("step %d: %.4f nats a token", entry["step"], math.fsum(losses) / sum(counts))
    n = len(losses)
    columns = {
        "run": [run] * n,
        "variant": [identity["variant"]] * n,
        "arm": [identity["arm"]] * n,
        "seed": [identity["training"]["seed"]] * n,
        "dataset": [dataset] * n,
        "step": [entry["step"]] * n,
        "tokens_seen": [entry["tokens_seen"]] * n,
        "sequence": list(range(n)),
        "token_count": counts,
        "loss_sum": losses,
    }
    return pa.table(columns, schema=EVALUATION_SCHEMA)
