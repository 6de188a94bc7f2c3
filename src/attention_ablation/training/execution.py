"""How one run is executed: what the study leaves open decided, and the same again when the run goes on.

Another execution rounds differently, so what was decided is written beside the run.
"""

import dataclasses
import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention_ablation.errors import UserError
from attention_ablation.kernels.latent_attention import choose_implementation
from attention_ablation.model.loss import choose_loss
from attention_ablation.training.plan import ExecutionPlan, TrainingPlan

MICRO_BATCH_TOKENS = 4_096  # of an automatic micro-batch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """All of an execution that has a say in rounding; see `ExecutionPlan`."""

    device: str
    processes: int
    threads: int
    micro_batch: int
    zero_stage: int
    offload_optimizer: bool
    activation_checkpointing: bool
    compile: bool
    deterministic: bool
    attention: str
    loss: str


def resolve(
    execution: ExecutionPlan,
    plan: TrainingPlan,
    *,
    vocabulary_size: int,
    begun: dict[str, Any] | None = None,
    folder: Path | None = None,
) -> tuple[Resolved, list[dict[str, Any]]]:
    """The execution, and what differs in it from `begun`, the one that the run in `folder` goes on from.

    What is left to `auto` stays as it was begun; what is asked for otherwise is done, said and returned. Raises
    UserError for another kind of device, which would make half a run of each.
    """
    begun = begun or {}
    device = _device(execution.device, begun.get("device"), folder)
    attention = begun.get("attention") if execution.attention == "auto" else None
    attention, reason = choose_implementation(attention or execution.attention, device)
    log.info("attention path: %s (%s)", attention, reason)
    share = plan.sequences // execution.processes
    micro_batch = execution.micro_batch
    if micro_batch == "auto" and share % begun.get("micro_batch", share + 1) == 0:
        micro_batch = begun["micro_batch"]
    micro_batch = choose_micro_batch(micro_batch, share, plan.context)
    loss = begun.get("loss") if execution.loss == "auto" else None
    loss, reason = choose_loss(
        loss or execution.loss, tokens=micro_batch * plan.context, vocabulary_size=vocabulary_size
    )
    log.info("loss path: %s (%s)", loss, reason)
    resolved = Resolved(
        device=device,
        processes=execution.processes,
        threads=execution.threads,
        micro_batch=micro_batch,
        zero_stage=execution.zero_stage,
        offload_optimizer=execution.offload_optimizer,
        activation_checkpointing=execution.activation_checkpointing,
        compile=execution.compile,
        deterministic=execution.deterministic,
        attention=attention,
        loss=loss,
    )
    changes = []
    for field in dataclasses.fields(Resolved):
        was, now = begun.get(field.name), getattr(resolved, field.name)
        if field.name in begun and was != now:
            log.warning("execution.%s: the run was begun with %s and goes on with %s", field.name, was, now)
            changes.append({"key": field.name, "from": was, "to": now})
    return resolved, changes


def _device(requested: str, begun: str | None, folder: Path | None) -> str:
    device = begun if requested == "auto" and begun == "cpu" else choose_device(requested)
    if begun not in (None, device):
        raise UserError(
            f"{folder}: the run began on {begun}, this host offers {device}; "
            "go on there, or remove this folder to train again"
        )
    return device


def choose_device(requested: str) -> str:
    """`cpu` or `cuda`; `auto` takes a GPU where there is one."""
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError("execution.device: cuda was asked for, torch sees no GPU here; ask for auto or cpu")
    return requested


def choose_micro_batch(requested: int | str, share: int, context: int) -> int:
    """Sequences a forward pass: as asked, or the largest divisor of a process's `share` of the batch's sequences
    within MICRO_BATCH_TOKENS.
    """
    if requested != "auto":
        return int(requested)
    fitting = [n for n in range(1, share + 1) if share % n == 0 and n * context <= MICRO_BATCH_TOKENS]
    return max(fitting, default=1)


def versions(device: str) -> dict[str, str]:
    """What else has a say in rounding: the device's name, the libraries, the host."""
    import deepspeed

    return {
        "device_name": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
    }
