"""Asking a training to save and stop: by a signal, or because what it works for is gone."""

import logging
import os
import select
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# "<host> <process>" of the Snakemake that a job works for; the workflow sets it.
SNAKEMAKE = "ATTENTION_ABLATION_SNAKEMAKE"

log = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818
    """The training was asked to stop and has saved: no error. `exit_code` is what a shell shows for the signal."""

    def __init__(self, step: int, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        name = signal.Signals(signal_number).name
        super().__init__(f"stopped at step {step} ({name}); the same command goes on from there")


class StopRequest:
    """A context in which SIGTERM, SIGUSR1 (a cluster's warning) and Ctrl-C ask for a stop at the next step.

    So does the death of Snakemake, whose orphan would work on unseen, or of the launcher that started this process.
    A second Ctrl-C stops at once.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.signal_number = 0  # that asked first; 0: nothing did
        self._watched: dict[int, str] = {}  # file descriptor of a process, what it is
        self._before: dict[int, object] = {}
        host, _, snakemake = environment.get(SNAKEMAKE, "").partition(" ")
        if snakemake and host == os.uname().nodename:
            self._watch(int(snakemake), "its Snakemake")
        if "TORCHELASTIC_RUN_ID" in environment:
            self._watch(os.getppid(), "its launcher")

    def _watch(self, process: int, what: str) -> None:
        try:
            self._watched[os.pidfd_open(process)] = what
        except OSError as error:  # another container's processes cannot be seen
            log.info("%s (process %d) cannot be watched: %s", what, process, error.strerror)

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = self.signal_number or number

    def is_asked(self) -> bool:
        """Whether this process was asked to stop."""
        if not self.signal_number and self._watched:
            gone, _, _ = select.select(list(self._watched), [], [], 0)
            if gone:
                log.warning("%s has ended: saving and stopping", self._watched[gone[0]])
                self.signal_number = signal.SIGTERM
        return bool(self.signal_number)
