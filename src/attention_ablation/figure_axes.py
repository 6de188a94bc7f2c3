"""Domains and ticks of the figure's axes: from the data, so that nothing lies outside."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# The scale is linear within about this many nats of zero, logarithmic beyond.
SYMLOG_CONSTANT = 1e-3
FEWEST_PIXELS_BETWEEN_TICKS = 18


@dataclass(frozen=True)
class Axis:
    """The domain and the ticks within it; `decimals` is how many places the tick labels need."""

    low: float
    high: float
    ticks: tuple[float, ...]
    decimals: int


def tokens_unit(most_tokens: float) -> tuple[float, str]:
    """The unit in which the tokens are told, and its letter."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if most_tokens >= size:
            return size, letter
    return 1.0, ""


def nice_step(span: float, at_most: int) -> tuple[int, int]:
    """The smallest step m * 10^e, m in 1, 2, 5, that makes at most `at_most` steps of `span`."""
    exponent = math.floor(math.log10(span / at_most)) - 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * 10.0**exponent * at_most >= span * (1 - 1e-9):
                return mantissa, exponent
        exponent += 1


def multiples(first: int, last: int, mantissa: int, exponent: int) -> tuple[float, ...]:
    """k * mantissa * 10^exponent for k = first .. last, each the float nearest to its decimal."""
    return tuple(float(f"{k * mantissa}e{exponent}") for k in range(first, last + 1))


def tokens_axis(most: float) -> Axis:
    """From 0 to the last tick, or to the data's end where that tick would leave a tenth empty."""
    mantissa, exponent = nice_step(most, 7)
    step = mantissa * 10.0**exponent
    ticks = multiples(0, math.ceil(most / step - 1e-9), mantissa, exponent)
    if ticks[-1] > 1.1 * most:
        ticks = ticks[:-1]
    return Axis(0.0, max(most, ticks[-1]), ticks, max(0, -exponent))


def linear_axis(values: Sequence[float], at_most: int = 7) -> Axis:
    """Ticks at whole steps, the domain at half steps around the values and zero."""
    low, high = min(0.0, *values), max(0.0, *values)
    if low == high:
        low, high = -SYMLOG_CONSTANT, SYMLOG_CONSTANT
    mantissa, exponent = nice_step(high - low, at_most)
    step = mantissa * 10.0**exponent
    halves = multiples(
        math.floor(2 * low / step + 1e-9), math.ceil(2 * high / step - 1e-9), 5 * mantissa, exponent - 1
    )
    low, high = min(halves[0], low), max(halves[-1], high)
    ticks = multiples(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9), mantissa, exponent)
    return Axis(low, high, ticks, max(0, -exponent))


def symlog_axis(values: Sequence[float], height: int) -> Axis:
    """Ticks at 1, 2, 5 a decade, or at 1 where those stand too close; the domain ends at a 1, 2 or 5."""
    low, high = min(0.0, *values), max(0.0, *values)
    if max(high, -low) <= 2 * SYMLOG_CONSTANT:
        return linear_axis(values)
    decades = range(-3, math.ceil(math.log10(max(high, -low))) + 1)
    sizes = [float(f"{mantissa}e{exponent}") for exponent in decades for mantissa in (1, 2, 5)]
    above, below = upto(sizes, high), upto(sizes, -low)
    ends = [-max(below, default=0.0), max(above, default=0.0)]
    pixels = height / (symlog(ends[1]) - symlog(ends[0]))
    for every in (1, 3):
        ticks = (*(-size for size in reversed(below[::every])), 0.0, *above[::every])
        gaps = [pixels * (symlog(b) - symlog(a)) for a, b in pairwise(ticks)]
        if min(gaps) >= FEWEST_PIXELS_BETWEEN_TICKS:
            break
    return Axis(ends[0], ends[1], ticks, 3)


def symlog(value: float) -> float:
    """Where the symlog scale puts a value."""
    return math.copysign(math.log1p(abs(value) / SYMLOG_CONSTANT), value)


def upto(sizes: Sequence[float], limit: float) -> list[float]:
    """The sizes below `limit` and the first that reaches it; none for a limit of zero."""
    if limit <= 0:
        return []
    reached = next(index for index, size in enumerate(sizes) if size >= limit)
    return list(sizes[: reached + 1])
