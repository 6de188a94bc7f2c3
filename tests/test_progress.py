"""Progress: plain lines in a log, few of them; a bar on a terminal."""

import itertools

import pytest

from attention_ablation import progress


@pytest.fixture
def clock(monkeypatch):
    """One second a look at the clock."""
    seconds = itertools.count()
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))


def test_a_log_gets_a_line_every_ten_seconds_and_the_last(clock, capsys):
    shown = progress.Progress("run", "steps")
    for step in range(1, 36):
        shown.update(step, 35, 2.5)
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 6
    assert lines[0].startswith("run: ")
    assert "s left" in lines[0]
    assert lines[-1] == "run: 35/35 steps, loss 2.5000"


def test_the_time_left_counts_from_where_a_resumed_run_began(monkeypatch, capsys):
    now = iter([0.0, 0.0, 100.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    shown = progress.Progress("run", "steps")
    shown.update(900, 1000)
    shown.update(950, 1000)
    assert capsys.readouterr().err.splitlines()[-1] == "run: 950/1000 steps, 0.5 steps/s, 100 s left"


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    shown = progress.Progress("run", "steps")
    shown.update(5, 10, 2.5)
    shown.update(10, 10, 2.4)
    bar = capsys.readouterr().err
    assert "10/10" in bar
    assert "loss 2.400" in bar


def test_bytes_are_told_in_megabytes_with_their_rate(monkeypatch, capsys):
    now = iter([0.0, 0.0, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    shown = progress.Progress("part 3", "bytes")
    shown.update(10_000_000, 100_000_000)
    shown.update(50_000_000, 100_000_000)
    assert capsys.readouterr().err.splitlines()[-1] == "part 3: 50.0/100.0 MB, 2.0 MB/s, 25 s left"
