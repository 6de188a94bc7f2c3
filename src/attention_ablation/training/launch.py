"""Start the processes of one run: torchrun on one host, srun on the hosts of a Slurm job."""

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attention_ablation.errors import LostPeerError, UserError, one_line

SECONDS_TO_SAVE = 120  # that processes have after a signal, before they are killed


def launch(
    command: list[str],
    *,
    processes: int,
    nodes: int,
    launcher: Literal["auto", "torchrun", "srun"],
    threads: int,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Run `command` in `processes` processes and return the exit code: the first failed one's, or 0.

    Signals to this process reach them all. Raises UserError with the reason when one of them failed.
    """
    if launcher == "srun" or (launcher == "auto" and nodes > 1):
        return _srun(command, processes=processes, nodes=nodes, threads=threads, environment=environment)
    return _torchrun(command, processes=processes)


def _srun(command: list[str], *, processes: int, nodes: int, threads: int, environment: Mapping[str, str]) -> int:
    if "SLURM_JOB_ID" not in environment or shutil.which("srun") is None:
        raise UserError(
            f"execution.nodes: {nodes} hosts are reached by srun inside a Slurm job, and this is none; "
            "use the Slurm profile, or nodes: 1"
        )
    # --overlap: the workflow's own step holds the job's CPUs. Signals and the exit code pass through srun.
    srun = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={processes}", f"--cpus-per-task={threads}"]
    os.execvp("srun", [*srun, "--kill-on-bad-exit=1", *command])


def _torchrun(command: list[str], *, processes: int) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What a process has to say it says itself; torchrun would add a table and a traceback of its own.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        logs_specs=DefaultLogsSpecs(),
        run_id=f"{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGINT,SIGUSR1",
        shutdown_timeout=SECONDS_TO_SAVE,
    )
    try:
        elastic_launch(config, entrypoint=command[0])(*command[1:])
    except SignalException as signalled:
        return 128 + signalled.sigval
    except ChildFailedError as error:
        return _explained(error.failures, processes)
    return 0


def _explained(failures: Mapping[int, Any], processes: int) -> int:
    """The exit code of processes that saved and stopped; else UserError with the reason that one of them gave.

    One that only lost another gives none; one that was killed cannot.
    """
    for failure in failures.values():
        if Path(failure.error_file).exists():
            raise UserError(failure.message)
    # SIGTERM is how torchrun ends the others.
    rank, first = min(failures.items(), key=lambda item: (item[1].exitcode in (1, -signal.SIGTERM), item[0]))
    if first.exitcode > 128:
        return int(first.exitcode)
    how = f"was killed ({first.signal_name()})" if first.exitcode < 0 else f"ended with exit code {first.exitcode}"
    raise UserError(f"process {rank} of {processes} {how}")


def tell_launcher(error: Exception, environment: Mapping[str, str] = os.environ) -> None:
    """Leave the reason of this process's end for the launcher, whose last line it becomes."""
    path = environment.get("TORCHELASTIC_ERROR_FILE")
    if path and not isinstance(error, LostPeerError):
        Path(path).write_text(
            json.dumps({"message": one_line(error), "timestamp": str(int(time.time()))}), encoding="utf-8"
        )
