"""The paper's schedule, at the paper's numbers and in general."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training.test_engine_parity import plan_of

from attention_ablation.training.schedule import learning_rate_at
from parity.fixtures import load_fixture

PLAN = replace(
    plan_of(load_fixture("mla")), steps=100_000, warmup_steps=2_000, learning_rate=1.6e-4, final_learning_rate=1.6e-5
)


def test_the_papers_schedule_at_its_corners():
    assert learning_rate_at(0, PLAN) == 0
    assert learning_rate_at(1_000, PLAN) == pytest.approx(0.8e-4)
    assert learning_rate_at(2_000, PLAN) == 1.6e-4
    assert learning_rate_at(51_000, PLAN) == pytest.approx((1.6e-4 + 1.6e-5) / 2)
    assert learning_rate_at(100_000, PLAN) == pytest.approx(1.6e-5)


@given(st.integers(1, 500), st.integers(0, 499))
def test_the_rate_rises_to_the_peak_then_falls_to_the_final_rate(steps, warmup_steps):
    plan = replace(PLAN, steps=steps, warmup_steps=min(warmup_steps, steps - 1))
    rates = [learning_rate_at(step, plan) for step in range(steps + 1)]
    peak = rates[plan.warmup_steps]
    assert peak == max(rates) == plan.learning_rate
    assert rates[: plan.warmup_steps + 1] == sorted(rates[: plan.warmup_steps + 1])
    assert rates[plan.warmup_steps :] == sorted(rates[plan.warmup_steps :], reverse=True)
    assert rates[-1] == pytest.approx(plan.final_learning_rate)
