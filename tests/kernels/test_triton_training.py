"""Twenty training steps through the interpreted Triton kernels, by way of the DeepSpeed engine."""

from dataclasses import replace

import torch
from torch.distributed import HashStore
from training.test_engine_parity import RESOLVED

from attention_ablation.training.engine import Engine
from attention_ablation.training.plan import TrainingPlan
from attention_ablation.training.world import ALONE, start_process_group
from model.sizes import VARIANTS, random_model, random_tokens

STEPS, B, T = 20, 1, 33
PLAN = TrainingPlan(
    seed=0,
    initialization_std=0.02,
    context=T,
    steps=STEPS,
    batch_tokens=B * T,
    learning_rate=1e-2,
    final_learning_rate=1e-3,
    warmup_steps=3,
    betas=(0.9, 0.95),
    epsilon=1e-8,
    weight_decay=0.1,
    gradient_clip=1.0,
    precision="float32",
    checkpoint_steps=(STEPS,),
    validation_tokens=0,
)


def losses_and_weights(attention: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    start_process_group(ALONE, HashStore(), minutes=1)
    config = replace(VARIANTS["MLRA-2"], layers=1, heads=2)
    resolved = replace(RESOLVED, attention=attention)
    engine = Engine(random_model(config, attention=attention), PLAN, resolved, ALONE)
    losses = []
    for step in range(STEPS):
        tokens = random_tokens(B, T + 1, seed=step % 2)  # two batches in turn, which can be learnt
        losses.append(float(engine.step(tokens[:, :-1], tokens[:, 1:])["loss"]))
    return torch.tensor(losses), engine.weights()


def test_training_through_the_kernels_departs_from_the_reference(launched):
    found, found_weights = losses_and_weights("triton")
    assert launched == ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"] * STEPS
    expected, expected_weights = losses_and_weights("reference")
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    for name, weight in expected_weights.items():
        torch.testing.assert_close(found_weights[name], weight, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert expected[-1] < expected[0] - 0.5
