"""Step `index_corpus`: the order of the corpus's units in the stream, and which part each goes to."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from attention_ablation.data.sources import Corpus, Unit
from attention_ablation.errors import UserError
from attention_ablation.files import write_text


@dataclass(frozen=True)
class IndexedUnit:
    """A unit of the stream; `part` counts from 0."""

    unit: Unit
    part: int


def index_corpus(corpus: Corpus, *, order: Literal["shuffled", "listed"], parts: int, output: Path) -> None:
    """Write the units in stream order as JSON, each with its size and its part.

    `shuffled` sorts by a hash of the name (and of where in the file, if not the whole of it is the unit), so that
    any stretch of the stream mixes what the source keeps apart; `listed` keeps the source's order. Parts are
    contiguous stretches of the stream, so they never change what the stream is.

    Raises:
        UserError: there is no unit, or there are fewer units than parts.
    """
    units = corpus.units()
    if not units:
        raise UserError("data.source: the corpus is empty, its files hold no document; check data.source.paths")
    if not 1 <= parts <= len(units):
        raise UserError(
            f"data.parts is {parts}, but the corpus can be cut into {len(units)} pieces (documents, or stretches "
            f"of a larger file); set data.parts between 1 and {len(units)}"
        )
    if order == "shuffled":
        units = sorted(units, key=_shuffle_key)
    files = list(dict.fromkeys(unit.name for unit in units))
    numbers = {name: number for number, name in enumerate(files)}
    lines = [
        json.dumps([numbers[unit.name], unit.start, unit.stop, unit.bytes, part])
        for unit, part in zip(units, part_numbers([unit.bytes for unit in units], parts), strict=True)
    ]
    names = ",\n".join(json.dumps(name, ensure_ascii=False) for name in files)
    write_text(output, '{"files": [\n' + names + '\n],\n"units": [\n' + ",\n".join(lines) + "\n]}\n")


def read_index(index: Path) -> list[IndexedUnit]:
    """The units in stream order."""
    try:
        read = json.loads(index.read_bytes())
        return [
            IndexedUnit(Unit(read["files"][file], start, stop, size), part)
            for file, start, stop, size, part in read["units"]
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{index}: not a corpus index ({error!r}); index the corpus again") from None


def _shuffle_key(unit: Unit) -> tuple[bytes, int]:
    name = unit.name if unit.start == 0 else f"{unit.name}:{unit.start}"
    return hashlib.sha256(name.encode()).digest(), unit.start


def part_numbers(sizes: Sequence[int], parts: int) -> list[int]:
    """The part of each unit: cut at the edge nearest to each equal share of the bytes, leaving no part empty.

    No part is larger than an equal share and one unit.
    """
    cuts = [0, *_cuts([0, *accumulate(sizes)], parts), len(sizes)]
    return [part for part in range(parts) for _ in range(cuts[part], cuts[part + 1])]


def _cuts(edges: list[int], parts: int) -> Iterator[int]:
    previous = 0
    for cut in range(1, parts):
        share = edges[-1] * cut / parts
        first, last = previous + 1, len(edges) - 1 - (parts - cut)
        after = min(max(bisect_left(edges, share), first), last)
        before = max(after - 1, first)
        previous = before if share - edges[before] <= edges[after] - share else after
        yield previous
