"""The processes of one run: who they are, how they meet, and the few words that they exchange.

One process alone needs no launcher, no port and no MPI: its process group lives in a `HashStore` of its own memory.
Several are started by torchrun on one host, or by srun on the hosts of a Slurm job (`launch.py`).
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from attention_ablation.errors import LostPeerError, UserError

T = TypeVar("T")

FIRST_PORT, PORTS = 20_000, 12_000  # of a Slurm job's processes; Linux hands out those from 32,768 on by itself
LOCK_PATIENCE = timedelta(days=30)  # of the others, while the first process waits for the run's lock
LOCKED = "locked"


@dataclass(frozen=True)
class World:
    """This process among those of its run. `local_*` counts those on this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def share_of(self, count: int) -> slice:
        """This process's contiguous share of `count` things, as equal as can be."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag: whether it is set in any process."""
        if self.size == 1:
            return flags
        found = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in found)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the processes, float64 on the CPU."""
        mean = values.detach().to("cpu", torch.float64)
        if self.size > 1:
            dist.all_reduce(mean)
            mean /= self.size
        return mean

    def first(self, function: Callable[[], T]) -> T:
        """What `function` returns in the first process, for all; a UserError there is one everywhere."""
        if self.size == 1:
            return function()
        answer: list[tuple[bool, T | str]] = []
        if self.is_first:
            try:
                answer = [(True, function())]
            except UserError as error:
                dist.broadcast_object_list([(False, str(error))])
                raise
            except Exception as error:
                dist.broadcast_object_list([(False, f"the first process failed: {type(error).__name__}: {error}")])
                raise
        else:
            answer = [(False, "")]
        dist.broadcast_object_list(answer)
        done, found = answer[0]
        if not done:
            raise UserError(str(found))
        return found  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every process's `value`, by rank, for all."""
        if self.size == 1:
            return [value]
        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value)
        return found


ALONE = World(rank=0, size=1, local_rank=0, local_size=1)


# --- who is there ---------------------------------------------------------------------------------------------


def world_of(environment: Mapping[str, str], *, processes: int) -> World | None:
    """The process that torchrun or srun made of this one; None while several are still to be launched.

    Raises UserError when a launcher started another number than `processes`.
    """
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environment.keys():
        launcher, world = "torchrun", _of_torchrun(environment)
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        # Inside a job of one task Snakemake's executor starts its command as a step of one: that is no launcher.
        launcher, world = "srun", _of_srun(environment)
    else:
        return ALONE if processes == 1 else None
    if world.size != processes:
        raise UserError(f"execution.processes: {processes} were asked for, {launcher} started {world.size}")
    return world


def _of_torchrun(environment: Mapping[str, str]) -> World:
    size = int(environment["WORLD_SIZE"])
    local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
    return World(int(environment["RANK"]), size, int(environment["LOCAL_RANK"]), local_size)


def _of_srun(environment: Mapping[str, str]) -> World:
    return World(
        rank=int(environment["SLURM_PROCID"]),
        size=int(environment["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        local_size=tasks_on_node(environment["SLURM_STEP_TASKS_PER_NODE"], int(environment["SLURM_NODEID"])),
    )


def tasks_on_node(text: str, node: int) -> int:
    """Tasks on the `node`-th host, of Slurm's `2(x3),1`: two on each of three hosts, one on a fourth."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node]


def first_host(nodes: str) -> str:
    """The first host of Slurm's list, such as `gpu[08-11,20],login`."""
    prefix, numbers, suffix = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^,]*)", nodes).groups()  # type: ignore[union-attr]
    return prefix + (re.split("[-,]", numbers)[0] if numbers else "") + suffix


# --- how they meet ----------------------------------------------------------------------------------------------


def connect(world: World, environment: Mapping[str, str], *, minutes: float) -> dist.Store:
    """The store through which the processes meet."""
    if world.size == 1:
        return dist.HashStore()
    if "TORCHELASTIC_RUN_ID" in environment:
        host, port, serves = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), False
    elif "SLURM_STEP_NODELIST" in environment:
        host, port = first_host(environment["SLURM_STEP_NODELIST"]), _port_of_step(environment)
        serves = world.is_first
    else:
        host, port, serves = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), world.is_first
    with peers_expected(minutes):
        store = dist.TCPStore(host, port, is_master=serves, timeout=timedelta(minutes=minutes))
    return dist.PrefixStore("attention-ablation", store)


def _port_of_step(environment: Mapping[str, str]) -> int:
    """A port that every process of a Slurm step derives alike, and another step hardly ever."""
    step = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    return FIRST_PORT + int.from_bytes(hashlib.sha256(step.encode()).digest()[:4]) % PORTS


def start_process_group(world: World, store: dist.Store, *, minutes: float) -> None:
    """Join the others; `minutes` is how long one waits for them, here and in every collective.

    In one process, what an earlier run of it started is used again.
    """
    if dist.is_initialized():
        return
    # gloo for the host's tensors, whatever the device: few words that must not wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with peers_expected(minutes):
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(minutes=minutes)
        )


def leave_process_group(world: World) -> None:
    """End what joins this process to others: gloo's threads would abort it when it exits."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def wait_for_the_lock(store: dist.Store) -> None:
    """Wait until the first process has the run's lock, which another job may hold for long."""
    store.wait([LOCKED], LOCK_PATIENCE)


_NO_ANSWER = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_ENDED = re.compile(r"connection (closed|reset|refused)|closed by peer|broken pipe|socket|recv", re.IGNORECASE)


@contextmanager
def peers_expected(minutes: float) -> Iterator[None]:
    """Say in plain words that another process is gone (LostPeerError) or does not answer."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        text = " ".join(str(error).split())
        if _NO_ANSWER.search(text):
            raise UserError(
                f"another process of this run did not answer within {minutes:g} minutes "
                f"(execution.collective_minutes): it hangs, or is slower than that ({text[:160]})"
            ) from error
        if _ENDED.search(text) or isinstance(error, dist.DistError):
            raise LostPeerError(
                f"another process of this run has ended; its own error says why ({text[:160]})"
            ) from error
        raise
