"""A training that is asked to stop, by real signals and real deaths."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attention_ablation.training.stop import SNAKEMAKE, Stopped, StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_for_a_stop_and_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with StopRequest({}) as stop:
        assert not stop.is_asked()
        os.kill(os.getpid(), number)
        assert stop.is_asked()
        assert stop.signal_number == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_stops_at_once():
    with StopRequest({}), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_warning_changes_nothing():
    with StopRequest({}) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_number == signal.SIGUSR1


def test_the_death_of_snakemake_asks_for_a_stop():
    snakemake = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with StopRequest({SNAKEMAKE: f"{os.uname().nodename} {snakemake.pid}"}) as stop:
        assert not stop.is_asked()
        snakemake.kill()
        snakemake.wait()
        assert stop.is_asked()
        assert stop.signal_number == signal.SIGTERM


@pytest.mark.parametrize("value", ["elsewhere 1", "", "elsewhere"])
def test_a_snakemake_on_another_host_is_not_watched(value):
    with StopRequest({SNAKEMAKE: value}) as stop:
        assert not stop.is_asked()


def test_no_file_descriptor_is_left():
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with StopRequest({SNAKEMAKE: f"{os.uname().nodename} {os.getpid()}"}):
            pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_exit_code_is_the_shells_for_the_signal():
    assert Stopped(4, signal.SIGTERM).exit_code == 143
    assert str(Stopped(4, signal.SIGUSR1)) == "stopped at step 4 (SIGUSR1); the same command goes on from there"
