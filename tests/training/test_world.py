"""Who the processes of a run are, and what they tell each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training.processes import run_in_processes

from attention_ablation.errors import UserError
from attention_ablation.training.world import ALONE, World, first_host, peers_expected, tasks_on_node, world_of

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_a_launched_process_finds_its_place(environment):
    assert world_of(environment, processes=4) == World(rank=3, size=4, local_rank=1, local_size=2)


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_another_number_of_processes_than_asked_for_is_told_with_both(environment, processes):
    with pytest.raises(UserError, match=rf"{processes} were asked for, \w+ started 4"):
        world_of(environment, processes=processes)


def test_without_a_launcher_one_process_is_alone_and_several_are_still_to_be_started():
    assert world_of({}, processes=1) == ALONE
    assert world_of({}, processes=2) is None


def test_a_slurm_job_of_one_task_is_no_launcher():
    # As Snakemake's executor starts its command: a step of one task in a job of two.
    environment = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    assert world_of(environment, processes=2) is None
    assert world_of(environment, processes=1) == ALONE


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu[08-11,20],login", "gpu08"),
        ("a,b", "a"),
        ("rack[3]-gpu", "rack3-gpu"),
        ("n[1,5-9]", "n1"),
        ("host.example.org,b", "host.example.org"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1, max_size=5))
def test_tasks_on_each_host_of_a_slurm_list(groups):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    expected = [count for count, times in groups for _ in range(times)]
    assert [tasks_on_node(text, node) for node in range(len(expected))] == expected


@given(st.integers(0, 200), st.integers(1, 17))
def test_shares_are_disjoint_whole_and_as_equal_as_can_be(count, size):
    shares = [list(range(count))[World(rank, size, rank, size).share_of(count)] for rank in range(size)]
    assert [thing for share in shares for thing in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def _talk(world: World) -> dict:
    def only_here() -> int:
        assert world.rank == 0
        return 41

    def refused() -> None:
        raise UserError("no such file")

    def broken() -> None:
        raise OSError("disk on fire")

    found: dict = {
        "any": world.any(world.rank == 1, False, world.rank == 0),
        "mean": world.mean(torch.tensor([world.rank, 2.0])).tolist(),
        "first": world.first(only_here),
        "gather": world.gather(world.rank * 10),
    }
    for name, function in (("refused", refused), ("broken", broken)):
        try:
            world.first(function)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_processes_tell_each_other(tmp_path):
    first, second = run_in_processes(2, tmp_path, _talk)
    assert first["broken"] == "OSError: disk on fire"
    assert second["broken"] == "UserError: the first process failed: OSError: disk on fire"
    del first["broken"], second["broken"]
    assert first == second
    assert first == {
        "any": (True, False, True),
        "mean": [0.5, 2.0],
        "first": 41,
        "gather": [0, 10],
        "refused": "UserError: no such file",
    }


def _leave(world: World) -> str | None:
    if world.rank == 1:
        return None  # as a process that was killed: the other one is in the middle of a step
    try:
        with peers_expected(1):
            for _ in range(3):
                world.any(True)
    except UserError as error:
        return str(error)
    return "went on"


def test_a_lost_process_is_told_in_plain_words(tmp_path):
    first, _ = run_in_processes(2, tmp_path, _leave)
    assert first.startswith("another process of this run has ended; its own error says why")


def test_other_errors_are_not_taken_for_a_lost_process():
    with pytest.raises(RuntimeError, match="shape mismatch"), peers_expected(1):
        raise RuntimeError("shape mismatch")
