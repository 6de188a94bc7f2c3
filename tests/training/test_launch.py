"""Several processes of one run under torchrun, with real kills."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attention_ablation.errors import UserError
from attention_ablation.training.launch import launch

# A run in miniature: it meets the others, says that it is there, and then does what its rank is told.
PROCESS = """
import os, signal, sys
from attention_ablation.training import launch
from attention_ablation.training import world as w
from attention_ablation.errors import UserError
from attention_ablation.training.stop import StopRequest
from pathlib import Path

folder, what = Path(sys.argv[1]), sys.argv[2]
world = w.world_of(os.environ, processes=2)
with StopRequest(os.environ) as stop:
    w.start_process_group(world, w.connect(world, os.environ, minutes=1), minutes=0.1 if what == "hang" else 1)
    (folder / f"{world.rank}").write_text(str(os.getpid()))
    try:
        with w.peers_expected(1):
            for step in range(10**9):
                if world.rank == 1 and step == 5:
                    if what == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if what == "hang":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    if what == "error":
                        raise UserError("the corpus is gone")
                if what == "end" and step == 5:
                    sys.exit(0)
                stopping, = world.any(stop.is_asked())
                if stopping:
                    (folder / f"saved{world.rank}").write_text("")
                    sys.exit(128 + max(world.gather(stop.signal_number)))
    except UserError as error:
        launch.tell_launcher(error)
        sys.exit(1)
    finally:
        w.leave_process_group(world)
"""


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    return lambda what: [sys.executable, str(script), str(tmp_path), what]


def launched(command: list[str]) -> int:
    return launch(command, processes=2, nodes=1, launcher="auto", threads=1)


def assert_none_is_left(folder: Path) -> None:
    for rank in ("0", "1"):
        process = int((folder / rank).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_processes_that_end_well_give_0(command, tmp_path):
    assert launched(command("end")) == 0
    assert_none_is_left(tmp_path)


def test_a_killed_process_ends_all_and_is_named(command, tmp_path):
    with pytest.raises(UserError, match=r"process 1 of 2 was killed \(SIGKILL\)"):
        launched(command("kill"))
    assert_none_is_left(tmp_path)


def test_the_reason_of_the_first_failure_is_the_launchers(command, tmp_path):
    with pytest.raises(UserError, match="the corpus is gone"):
        launched(command("error"))
    assert_none_is_left(tmp_path)


@pytest.mark.slow  # the shortest patience that two starting processes do not break by themselves
def test_a_process_that_hangs_ends_all(command, tmp_path):
    with pytest.raises(UserError, match="another process of this run did not answer within 1 minutes"):
        launched(command("hang"))
    assert_none_is_left(tmp_path)


LAUNCHER = """
import sys
from attention_ablation.training.launch import launch
sys.exit(launch(sys.argv[1:], processes=2, nodes=1, launcher="torchrun", threads=1))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_launcher_or_its_death_lets_every_process_save(command, tmp_path, number, code):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, *command("run")], start_new_session=True)
    descriptors = []
    for rank in ("0", "1"):
        while not (tmp_path / rank).exists() or not (tmp_path / rank).read_text():
            assert launcher.poll() is None
            os.sched_yield()
        descriptors.append(os.pidfd_open(int((tmp_path / rank).read_text())))
    launcher.send_signal(number)
    assert launcher.wait() == code
    for descriptor in descriptors:  # readable once its process has ended
        with os.fdopen(descriptor) as process:
            assert select.select([process], [], [], 60)[0]
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_srun_outside_a_slurm_job_is_refused():
    with pytest.raises(UserError, match="reached by srun inside a Slurm job, and this is none"):
        launch(["true"], processes=2, nodes=2, launcher="auto", threads=1, environment={})
