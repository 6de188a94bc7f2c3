"""The DeepSpeed engine of one run.

One process needs no launcher, no MPI and no port: the process group lives in a `HashStore` of its own memory, so
any number of runs start side by side on one host.
"""

import logging
import os
from typing import Any

import torch
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.model.loss import NextTokenLoss
from attention_ablation.model.transformer import LanguageModel
from attention_ablation.training.plan import TrainingPlan
from attention_ablation.training.schedule import learning_rate_at


class Engine:
    """A model under training: one `step` is one optimiser update over a whole global batch."""

    def __init__(
        self, model: LanguageModel, plan: TrainingPlan, *, device: str, micro_batch: int, loss: str = "logits"
    ) -> None:
        """`loss` is an implementation that `choose_loss` returned."""
        deepspeed = _import_deepspeed(device)
        self.plan = plan
        self.device = device
        self.micro_batch = micro_batch
        self.steps_done = 0
        # The paper decays every parameter, norm weights included: one group.
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=plan.learning_rate,
            betas=plan.betas,
            eps=plan.epsilon,
            weight_decay=plan.weight_decay,
            fused=True,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_at(step, plan) / plan.learning_rate
        )
        self._engine, *_ = deepspeed.initialize(
            model=NextTokenLoss(model, implementation=loss),
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=deepspeed_config(plan, micro_batch=micro_batch),
            dist_init_required=False,
        )

    def step(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        """One AdamW update on `inputs`, `targets` (sequences, T) int64, in micro-batches.

        Returns the batch's mean loss (nats a token) and the gradient's global norm before clipping, as tensors
        on the device (reading them waits for it), and the learning rate of the update.
        """
        losses = []
        learning_rate = float(self._engine.get_lr()[0])
        gradient_norm: Tensor | None = None
        for x, y in zip(inputs.split(self.micro_batch), targets.split(self.micro_batch), strict=True):
            loss = self._engine(x.to(self.device), y.to(self.device))
            self._engine.backward(loss)
            losses.append(loss.detach())
            if self._engine.is_gradient_accumulation_boundary():
                # DeepSpeed clips at stage 0 without telling the norm.
                gradient_norm = torch.nn.utils.get_total_norm(
                    [p.grad for p in self._engine.module.parameters() if p.grad is not None]
                )
            self._engine.step()
        self.steps_done += 1
        assert gradient_norm is not None
        return {
            "loss": torch.stack(losses).mean(),
            "gradient_norm": gradient_norm,
            "learning_rate": learning_rate,
        }

    def weights(self) -> dict[str, Tensor]:
        """The float32 weights by name, the tied embedding once."""
        return {name: parameter.detach() for name, parameter in self._engine.module.model.named_parameters()}

    def save(self, folder: str, tag: str) -> None:
        """Write weights, optimiser and schedule to `folder`/`tag`."""
        # Without DeepSpeed's `latest` file: it is neither synced nor replaced atomically.
        self._engine.save_checkpoint(folder, tag=tag, client_state={"steps_done": self.steps_done}, save_latest=False)

    def load(self, folder: str, tag: str) -> None:
        """Continue from `folder`/`tag`."""
        path, client = self._engine.load_checkpoint(folder, tag=tag)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint {tag} in {folder}")
        self.steps_done = client["steps_done"]


def deepspeed_config(plan: TrainingPlan, *, micro_batch: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a run in one process."""
    config: dict[str, Any] = {
        "train_batch_size": plan.sequences,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": plan.sequences // micro_batch,
        "gradient_clipping": plan.gradient_clip,
        "zero_optimization": {"stage": 0},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if plan.precision == "bfloat16":
        # Autocast over float32 weights. DeepSpeed's own bf16 mode at stage 0 takes an update too many.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return config


def choose_device(requested: str) -> str:
    """`cpu` or `cuda`; `auto` takes a GPU where there is one."""
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError("execution.device: cuda was asked for, torch sees no GPU here; ask for auto or cpu")
    return requested


def _import_deepspeed(device: str) -> Any:
    """Import DeepSpeed for one process on `device` and start the process group that it wants."""
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ["DS_ACCELERATOR"] = device
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed
    import deepspeed.ops

    if device == "cpu":
        # Else the first start compiles a shared-memory extension: 68 s, and a compiler that may be absent.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    return deepspeed
