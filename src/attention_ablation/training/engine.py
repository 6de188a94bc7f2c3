"""The DeepSpeed engine of one run: its share of a batch in one process, one optimiser update over all of them.

The process group stands already (`world.py`). Weights and moments are read and set by parameter name, so what is
saved belongs to no ZeRO stage and to no number of processes.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.model.loss import NextTokenLoss
from attention_ablation.model.transformer import LanguageModel
from attention_ablation.training.execution import Resolved
from attention_ablation.training.plan import TrainingPlan
from attention_ablation.training.schedule import learning_rate_at
from attention_ablation.training.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, by PyTorch's names


class Engine:
    """A model under training: one `step` is one optimiser update over a whole global batch."""

    def __init__(self, model: LanguageModel, plan: TrainingPlan, resolved: Resolved, world: World) -> None:
        """`model` has its weights, on the CPU; it is moved to the device and from then on is the engine's."""
        deepspeed = _import_deepspeed(resolved.device, world)
        self.plan = plan
        self.steps_done = 0
        self._world = world
        self._device = resolved.device
        self._micro_batch = resolved.micro_batch
        self._zero_stage = resolved.zero_stage
        self._zero = deepspeed.zero
        self._utilities = deepspeed.utils
        model.activation_checkpointing = resolved.activation_checkpointing
        model.to(resolved.device)
        # The paper decays every parameter, norm weights included: one group.
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=0.0,  # set anew for each step
            betas=plan.betas,
            eps=plan.epsilon,
            weight_decay=plan.weight_decay,
            fused=True,
        )
        module = NextTokenLoss(model, implementation=resolved.loss)
        if resolved.compile:
            module.compile()
        self.config = deepspeed_config(plan, resolved)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=self._optimizer, config=self.config, dist_init_required=False
        )

    def step(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        """One AdamW update; `inputs`, `targets` (sequences, T) int64 are this process's share of the batch.

        Returns the share's mean loss (nats a token) and the whole batch's gradient norm before clipping, as tensors
        on the device (reading them waits for it), and the learning rate of the update.
        """
        learning_rate = learning_rate_at(self.steps_done, self.plan)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        losses = []
        gradient_norm: Tensor | None = None
        for x, y in zip(inputs.split(self._micro_batch), targets.split(self._micro_batch), strict=True):
            loss = self._engine(x.to(self._device), y.to(self._device))
            self._engine.backward(loss)
            losses.append(loss.detach())
            if self._zero_stage == 0 and self._engine.is_gradient_accumulation_boundary():
                # DeepSpeed clips at stage 0 without telling the norm.
                gradient_norm = torch.nn.utils.get_total_norm(
                    [p.grad for p in self._engine.module.parameters() if p.grad is not None]
                )
            self._engine.step()
        if self._zero_stage > 0:
            norm = self._engine.get_global_grad_norm()
            gradient_norm = torch.as_tensor(norm, dtype=torch.float32, device=losses[0].device)
        self.steps_done += 1
        assert gradient_norm is not None
        return {
            "loss": torch.stack(losses).mean(),
            "gradient_norm": gradient_norm,
            "learning_rate": learning_rate,
        }

    @torch.no_grad()
    def loss_of(self, inputs: Tensor, targets: Tensor) -> float:
        """Mean loss (nats a token) of `inputs`, `targets` (sequences, T) int64, without training on them."""
        self._engine.eval()
        try:
            batches = zip(inputs.split(self._micro_batch), targets.split(self._micro_batch), strict=True)
            losses = [self._engine(x.to(self._device), y.to(self._device)).double() * len(x) for x, y in batches]
        finally:
            self._engine.train()
        return float(torch.stack(losses).sum() / len(inputs))

    def weights(self) -> dict[str, Tensor]:
        """The float32 weights by name, the tied embedding once; at stage 3 copies on the CPU. All processes call."""
        if self._zero_stage < 3:
            return {name: parameter.detach() for name, parameter in self._parameters()}
        found = {}
        for name, parameter in self._parameters():
            with self._zero.GatheredParameters(parameter):
                found[name] = parameter.detach().to("cpu", copy=True)
        return found

    def moments(self, moment: str) -> dict[str, Tensor]:
        """One of MOMENTS of every parameter, by name, in float32. All processes call."""
        if self._zero_stage == 0:
            return {name: self._optimizer.state[parameter][moment] for name, parameter in self._parameters()}
        return {
            name: self._utilities.safe_get_full_optimizer_state(parameter, moment).to("cpu")
            for name, parameter in self._parameters()
        }

    def restore(self, steps_done: int, moments: Callable[[str, str], Tensor]) -> None:
        """Go on after `steps_done` updates; `moments(moment, name)` is a saved one. The weights are in already."""
        for held in self._held_by_the_optimizer():
            # What AdamW would make at its first step.
            self._optimizer.state[held] = {
                "step": torch.tensor(float(steps_done), device=held.device),
                **{moment: torch.zeros_like(held, requires_grad=False) for moment in MOMENTS},
            }
        if self._zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        for moment in MOMENTS:
            for name, parameter in self._parameters():
                value = moments(moment, name)
                if self._zero_stage == 0:
                    self._optimizer.state[parameter][moment].copy_(value)
                else:
                    self._utilities.safe_set_full_optimizer_state(parameter, value.to(self._device), moment)
        self.steps_done = steps_done

    def _held_by_the_optimizer(self) -> list[Tensor]:
        """The parameters, or from stage 1 on this process's share of all of them as flat tensors."""
        if self._zero_stage == 0:
            return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if self._zero_stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return list(self._engine.optimizer.single_partition_of_fp32_groups)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self._engine.module.model.named_parameters()


def deepspeed_config(plan: TrainingPlan, resolved: Resolved) -> dict[str, Any]:
    """DeepSpeed's configuration of a run."""
    share = plan.sequences // resolved.processes
    zero: dict[str, Any] = {"stage": resolved.zero_stage}
    if resolved.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": resolved.device == "cuda"}
    config: dict[str, Any] = {
        "train_batch_size": plan.sequences,
        "train_micro_batch_size_per_gpu": resolved.micro_batch,
        "gradient_accumulation_steps": share // resolved.micro_batch,
        "gradient_clipping": plan.gradient_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # PyTorch's AdamW: DeepSpeed's own compiles an extension
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if plan.precision == "bfloat16":
        # Autocast over float32 weights. DeepSpeed's own bf16 mode at stage 0 takes an update too many.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return config


def choose_gpu(world: World) -> None:
    """Take this process's GPU; UserError, with both numbers, where its host shows fewer than it has processes."""
    visible = torch.cuda.device_count()
    if visible < world.local_size:
        raise UserError(
            f"execution.processes: {world.local_size} processes on this host want a GPU each, {visible} are visible"
        )
    torch.cuda.set_device(world.local_rank)


def _import_deepspeed(device: str, world: World) -> Any:
    os.environ["LOCAL_RANK"] = str(world.local_rank)  # which DeepSpeed wants, however the processes have met
    os.environ["DS_ACCELERATOR"] = device
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed
    import deepspeed.ops

    if device == "cpu":
        # Else the first start compiles a shared-memory extension: 68 s, and a compiler that may be absent.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by their older names, and torch says so at each of them.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    return deepspeed
