"""The paper's learning-rate schedule."""

import math

from attention_ablation.training.plan import TrainingPlan


def learning_rate_at(step: int, plan: TrainingPlan) -> float:
    """Rate of the 0-based optimiser step `step`: linear from 0 over the warm-up, then cosine to the final rate.

    Step 0 has rate 0; the final rate is reached at step `plan.steps` (paper, "Training").
    """
    if step < plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    progress = min(1.0, (step - plan.warmup_steps) / (plan.steps - plan.warmup_steps))
    spread = plan.learning_rate - plan.final_learning_rate
    return plan.final_learning_rate + spread * 0.5 * (1 + math.cos(math.pi * progress))
