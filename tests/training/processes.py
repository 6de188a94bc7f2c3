"""Run a function in several processes that form one process group, without a port."""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attention_ablation.training.world import World, start_process_group


def run_in_processes(count: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(world, *arguments)` returned in each of `count` processes. Raises what it raised in one."""
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=_run, args=(World(rank, count, rank, count), folder, function, arguments))
        for rank in range(count)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


def _run(world: World, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    start_process_group(world, dist.FileStore(str(folder / "store"), world.size), minutes=1)
    try:
        found = function(world, *arguments)
    except Exception as error:
        traceback.print_exc()
        found = error
    torch.save(found, folder / f"{world.rank}.pt")
