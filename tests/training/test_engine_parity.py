"""The DeepSpeed engine against the published implementation and a plain torch loop: stages, processes, resumption."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training.processes import run_in_processes

from attention_ablation.model.published import from_published
from attention_ablation.model.transformer import LanguageModel
from attention_ablation.training import autosave
from attention_ablation.training.engine import Engine
from attention_ablation.training.execution import Resolved
from attention_ablation.training.plan import TrainingPlan
from attention_ablation.training.schedule import learning_rate_at
from attention_ablation.training.world import ALONE, World
from parity.fixtures import NAMES, Fixture, load_fixture

RESOLVED = Resolved(
    device="cpu", processes=1, threads=1, micro_batch=1, zero_stage=0, offload_optimizer=False,
    activation_checkpointing=False, compile=False, deterministic=False, attention="sdpa", loss="logits",
)  # fmt: skip
STAGES = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]


def plan_of(fixture: Fixture, **changes) -> TrainingPlan:
    schedule, tokens = fixture.schedule, fixture.train_tokens.shape[2]
    values = {
        "seed": 0,
        "initialization_std": 0.02,
        "context": tokens,
        "steps": schedule["decay_steps"],
        "batch_tokens": tokens * schedule["micro_batches"],
        "learning_rate": schedule["peak_lr"],
        "final_learning_rate": schedule["min_lr"],
        "warmup_steps": schedule["warmup_steps"],
        "betas": tuple(schedule["betas"]),
        "epsilon": schedule["eps"],
        "weight_decay": schedule["weight_decay"],
        "gradient_clip": schedule["grad_clip"],
        "precision": "float32",
        "checkpoint_steps": (schedule["steps"],),
        "validation_tokens": 0,
    }
    return TrainingPlan(**values | changes)


def engine_of(fixture: Fixture, *, world: World = ALONE, weights=None, plan=None, **execution) -> Engine:
    resolved = replace(RESOLVED, processes=world.size, **execution)
    model = LanguageModel(fixture.config, fixture.scaling, attention=resolved.attention)
    model.load_state_dict(weights or from_published(fixture.weights, fixture.config))
    return Engine(model, plan_of(fixture, **plan or {}), resolved, world)


def results(
    engine: Engine, fixture: Fixture, world: World = ALONE, steps: range = range(16)
) -> dict[str, torch.Tensor]:
    """Loss, gradient norm and learning rate of each step."""
    rows = []
    for step in steps:
        share = world.share_of(len(fixture.train_tokens[step]))
        row = engine.step(fixture.train_tokens[step][share], fixture.train_targets[step][share])
        rows.append(row | {"loss": world.mean(row["loss"])})
    return {name: torch.tensor([float(row[name]) for row in rows], dtype=torch.float64) for name in rows[0]}


def trained(world: World, stage: int, offload: bool, **more) -> dict:
    """Results of 16 steps and the weights after them."""
    fixture = load_fixture("mlra_2")
    engine = engine_of(fixture, world=world, zero_stage=stage, offload_optimizer=offload, **more)
    return results(engine, fixture, world) | {"weights": _copied(engine)}


def saved_after_seven_steps(world: World, folder: Path, stage: int, offload: bool) -> Path:
    fixture = load_fixture("mlra_2")
    engine = engine_of(fixture, world=world, zero_stage=stage, offload_optimizer=offload)
    saver = autosave.Autosaver(engine, world, folder, minutes=60, steps=0)
    results(engine, fixture, world, range(7))
    saver.save()
    return folder / "autosave" / "step-7"


def continued(world: World, saved: Path, stage: int, offload: bool) -> dict:
    """Results of steps 7 to 15 of an engine that goes on from `saved`, and the weights after them."""
    fixture = load_fixture("mlra_2")
    engine = engine_of(
        fixture, world=world, weights=autosave.load_weights(saved), zero_stage=stage, offload_optimizer=offload
    )
    autosave.restore(engine, saved, 7)
    assert engine.steps_done == 7
    return results(engine, fixture, world, range(7, 16)) | {"weights": _copied(engine)}


def _copied(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.weights().items()}


def assert_close(found: dict, expected: dict, *, loss: float, norm: float, weight: float) -> None:
    """Within absolute tolerances, relative for the norm; `expected` may have more steps in front."""
    steps = len(found["loss"])
    torch.testing.assert_close(found["loss"], expected["loss"][-steps:], rtol=0, atol=loss)
    torch.testing.assert_close(found["gradient_norm"], expected["gradient_norm"][-steps:], rtol=norm, atol=0)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(
            found["weights"][name], value, rtol=0, atol=weight, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(found: dict, expected: dict) -> None:
    assert_close(found, expected, loss=0, norm=0, weight=0)


# --- against the published implementation -----------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "loss"), [("reference", "logits"), ("sdpa", "logits"), ("sdpa", "chunked")])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_steps_equal_the_published_implementation(name, attention, loss):
    fixture = load_fixture(name)
    found = results(engine_of(fixture, attention=attention, loss=loss), fixture)
    torch.testing.assert_close(found["loss"], fixture.train_losses.double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(found["learning_rate"], fixture.learning_rates.double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(found["gradient_norm"], fixture.gradient_norms.double(), rtol=1e-4, atol=0)
    # The fixture must exercise what it is to prove: warm-up from 0, clipping, learning.
    assert fixture.learning_rates[0] == 0
    assert fixture.gradient_norms.max() > 1


def test_the_gradient_is_clipped():
    fixture = load_fixture("mla")
    clipped = results(engine_of(fixture), fixture)
    free = results(engine_of(fixture, plan={"gradient_clip": 1e9}), fixture)
    assert (clipped["loss"][2:] - free["loss"][2:]).abs().max() > 1e-4


# --- against a plain torch loop ---------------------------------------------------------------------------------


def plain_loop(precision: str) -> dict:
    fixture = load_fixture("mlra_2")
    plan = plan_of(fixture, precision=precision)
    model = LanguageModel(fixture.config, fixture.scaling, attention="sdpa")
    model.load_state_dict(from_published(fixture.weights, fixture.config))
    # Fused as the engine's: the other form rounds differently, which bf16 blows up to 4e-4 of loss in 12 steps.
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=plan.betas, eps=plan.epsilon, weight_decay=plan.weight_decay, fused=True
    )
    losses, norms = [], []
    for step in range(16):
        total = 0.0
        for x, y in zip(fixture.train_tokens[step].split(1), fixture.train_targets[step].split(1), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                logits = model(x)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten()) / 2
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), plan.gradient_clip)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, plan)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {
        "loss": torch.tensor(losses, dtype=torch.float64),
        "gradient_norm": torch.tensor(norms, dtype=torch.float64),
        "weights": {name: parameter.detach() for name, parameter in model.named_parameters()},
    }


@pytest.fixture(scope="module")
def plain():
    return plain_loop("float32")


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_float32_equals_a_plain_torch_loop(plain, stage, offload):
    assert_close(trained(ALONE, stage, offload), plain, loss=1e-6, norm=1e-6, weight=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_equals_a_plain_torch_loop(stage):
    found = trained(ALONE, stage, False, plan={"precision": "bfloat16"})
    # Bfloat16 products blow up the last bits in which one AdamW rounds unlike another: between PyTorch's own fused
    # and plain forms the loss differs by 5e-5 and the norm by 4e-4; here by up to 5e-4 and 2e-3.
    assert_close(found, plain_loop("bfloat16"), loss=1e-3, norm=5e-3, weight=5e-4)


# --- any split of the batch is the same step --------------------------------------------------------------------


@pytest.mark.parametrize(
    "execution", [{"micro_batch": 2}, {"activation_checkpointing": True}, {"deterministic": True}], ids=str
)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_how_the_batch_is_computed_changes_no_more_than_rounding(plain, stage, execution):
    assert_close(trained(ALONE, stage, False, **execution), plain, loss=1e-6, norm=1e-6, weight=1e-6)


@pytest.mark.slow  # compiling takes most of a minute
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_compiling_changes_no_more_than_rounding(plain, stage):
    assert_close(trained(ALONE, stage, False, compile=True), plain, loss=1e-5, norm=1e-5, weight=1e-5)


def in_two_processes(world: World, folder: Path) -> dict:
    """All that two processes have to show, in one start of them."""
    found = {}
    for number, (stage, offload) in enumerate(STAGES):
        place = folder / str(number)
        saved = saved_after_seven_steps(world, place, stage, offload)
        found[stage, offload] = {
            "trained": trained(world, stage, offload),
            "continued": continued(world, saved, stage, offload),
            "continued from one process": continued(world, folder / "one" / "autosave" / "step-7", stage, offload),
        }
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    saved_after_seven_steps(ALONE, folder / "one", 1, False)
    first, second = run_in_processes(2, folder, in_two_processes, folder)
    return folder, first, second


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_two_processes_equal_a_plain_torch_loop(plain, two, stage, offload):
    _, first, second = two
    assert_close(first[stage, offload]["trained"], plain, loss=1e-6, norm=1e-6, weight=1e-6)
    assert_equal(second[stage, offload]["trained"], first[stage, offload]["trained"])


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_two_processes_continue_bit_equal(two, stage, offload):
    for process in two[1:]:
        assert_equal(process[stage, offload]["continued"], process[stage, offload]["trained"])


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_one_process_continues_bit_equal(tmp_path, stage, offload):
    saved = saved_after_seven_steps(ALONE, tmp_path, stage, offload)
    assert_equal(continued(ALONE, saved, stage, offload), trained(ALONE, stage, offload))


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_another_number_of_processes_and_another_stage_continue(plain, two, stage, offload):
    folder, first, _ = two
    tolerances = {"loss": 1e-6, "norm": 1e-6, "weight": 1e-6}
    assert_close(first[stage, offload]["continued from one process"], plain, **tolerances)
    saved = folder / str(STAGES.index((stage, offload))) / "autosave" / "step-7"
    assert_close(continued(ALONE, saved, 0, False), plain, **tolerances)
