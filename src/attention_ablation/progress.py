"""Progress for people: a bar on a terminal, a plain line now and then in a log."""

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts up to a total that the first `update` tells; bytes are shown as MB."""

    def __init__(self, what: str, unit: str) -> None:
        self._what = what
        self._unit = unit
        self._bar: tqdm | None = None
        self._started = self._said = time.monotonic()
        self._first = 0

    def update(self, done: int, total: int, loss: float | None = None) -> None:
        """Show that `done` of `total` are done; a run that was resumed begins above zero."""
        if sys.stderr.isatty():
            self._draw(done, total, loss)
        else:
            self._say(done, total, loss)

    def _draw(self, done: int, total: int, loss: float | None) -> None:
        if self._bar is None:
            in_bytes = {"unit": "B", "unit_scale": True} if self._unit == "bytes" else {"unit": self._unit}
            self._bar = tqdm(total=total, initial=done, desc=self._what, dynamic_ncols=True, **in_bytes)
        if loss is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()

    def _say(self, done: int, total: int, loss: float | None) -> None:
        now = time.monotonic()
        if self._first == 0:
            self._first, self._started = done, now
        if done < total and now - self._said < SECONDS_BETWEEN_LINES:
            return
        self._said = now
        in_bytes = self._unit == "bytes"
        line = f"{self._what}: {done / 1e6:.1f}/{total / 1e6:.1f} MB" if in_bytes else f"{self._what}: {done}/{total}"
        line += "" if in_bytes else f" {self._unit}"
        if loss is not None:
            line += f", loss {loss:.4f}"
        if self._first < done < total:
            rate = (done - self._first) / (now - self._started)
            line += f", {rate / 1e6:.1f} MB/s" if in_bytes else f", {rate:.3g} {self._unit}/s"
            line += f", {(total - done) / rate:.0f} s left"
        print(line, file=sys.stderr, flush=True)
