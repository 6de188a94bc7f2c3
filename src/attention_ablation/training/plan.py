"""The numbers of one run's training, resolved from the study. No defaults here."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainingPlan:
    """All that decides a run's weights beside the model and the data; part of the run's identity."""

    seed: int  # of initial weights and data order
    initialization_std: float
    context: int  # tokens a sequence
    steps: int  # optimiser updates
    batch_tokens: int  # tokens a step
    learning_rate: float  # peak
    final_learning_rate: float  # at the last step
    warmup_steps: int
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    gradient_clip: float  # global norm
    precision: Literal["float32", "bfloat16"]
    checkpoint_steps: tuple[int, ...]  # ascending; the last is `steps`
    validation_tokens: int  # at the start of the stream, never trained on

    @property
    def sequences(self) -> int:
        """Sequences a step, over all processes."""
        return self.batch_tokens // self.context


@dataclass(frozen=True)
class ExecutionPlan:
    """How the run is executed here; never part of its identity, written beside its results."""

    device: Literal["auto", "cpu", "cuda"]
    processes: int
    threads: int  # of the CPU, a process
    micro_batch: int | Literal["auto"]  # sequences a forward pass of a process
    zero_stage: int
    offload_optimizer: bool
    activation_checkpointing: bool
    compile: bool
    deterministic: bool
    attention: str
    loss: str
    collective_minutes: float  # that processes wait for one another
    autosave_minutes: float
    autosave_steps: int  # 0: by time alone
    validation_sequences: int  # scored at each checkpoint; 0: none
