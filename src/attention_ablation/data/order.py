"""The data order: which windows of the training split a step reads, and their tokens.

A window is `context` tokens and their successors. The order is a pure function of the number of windows, the
seed and the step: nothing about machines, micro-batches or restarts enters, and nothing has to be saved.
"""

import hashlib
import math

import numpy as np

from attention_ablation.data.stream import TokenStream
from attention_ablation.errors import UserError

ROUNDS = 8


def window_count(tokens: int, context: int) -> int:
    """Whole windows in `tokens` tokens; the last token is only ever a successor."""
    return max(0, (tokens - 1) // context)


def windows_of_step(step: int, *, windows: int, batch: int, seed: int) -> np.ndarray:
    """The windows that optimiser step `step` (from 0) reads, `(batch,)` int64.

    The windows of successive steps are one sequence; each stretch of `windows` of it, an epoch, holds every
    window once, in an order of its own. So a batch may hold the end of one epoch and the start of the next.
    """
    if windows < 1:
        raise UserError("the training split is shorter than one window; lower model.context or add text")
    positions = step * batch + np.arange(batch, dtype=np.int64)
    epochs = positions // windows
    numbers = np.empty(batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        numbers[here] = permute(positions[here] % windows, windows=windows, seed=seed, epoch=int(epoch))
    return numbers


def permute(positions: np.ndarray, *, windows: int, seed: int, epoch: int) -> np.ndarray:
    """Where a pseudo-random permutation of `range(windows)` sends `positions`, int64.

    A Feistel network over a grid of rows x columns cells, the smallest near-square that holds `windows`: each
    round shifts one coordinate by a keyed hash of the other, which can be undone, so it permutes the grid. A
    cell outside the range is sent on until it falls inside (cycle walking), which permutes the range. Memory
    is that of `positions`, where a shuffled list would be that of the corpus.
    """
    rows = math.isqrt(windows - 1) + 1
    columns = -(-windows // rows)
    keys = np.frombuffer(hashlib.sha512(f"{seed} {epoch}".encode()).digest(), dtype="<u8")
    cells = np.array(positions, dtype=np.int64)
    pending = np.arange(len(cells))
    while len(pending):
        row, column = np.divmod(cells[pending], columns)
        for turn in range(0, ROUNDS, 2):
            row = (row + _hash(column, keys[turn], rows)) % rows
            column = (column + _hash(row, keys[turn + 1], columns)) % columns
        cells[pending] = row * columns + column
        pending = pending[cells[pending] >= windows]
    return cells


def read_batch(
    stream: TokenStream, numbers: np.ndarray, *, offset: int, context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and their successors, two `(len(numbers), context)` int64 arrays.

    Window k begins at token `offset + k * context` of the stream.
    """
    starts = [offset + int(number) * context for number in numbers]
    tokens = np.empty((len(starts), context + 1), dtype=np.int64)
    for row, start in enumerate(starts):
        tokens[row] = stream.read(start, start + context + 1)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _hash(values: np.ndarray, key: np.uint64, size: int) -> np.ndarray:
    """A keyed hash of each value, in `range(size)`: the finaliser of SplitMix64 (Steele et al., 2014)."""
    bits = values.astype(np.uint64) ^ key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return (bits % np.uint64(size)).astype(np.int64)
