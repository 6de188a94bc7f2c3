"""Tile sizes of the Triton kernels, by a table: tuning at run time would change the sums from run to run.

Shapes: J branches; Dn nope head dim, Dr rope head dim, both padded to what a dot takes (`padded`).
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of its software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """A tile for each kernel."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile


# What `ablation kernels` measured: the largest tiles without spills. (architecture, bytes an element, Dn, Dr, J)
TABLE: dict[tuple[str, int, int, int, int], Tiles] = {}

# For every other shape and device, by the bytes of an element.
FALLBACK = {
    2: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
    4: Tiles(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
}


def padded(dim: int) -> int:
    """The power of two, 16 or more, that holds `dim`: what a dot product of tensor cores takes."""
    return max(16, 1 << (dim - 1).bit_length())


def tiles_for(architecture: str, *, element_bytes: int, nope_dim: int, rope_dim: int, branches: int) -> Tiles:
    """The table's entry, or the fallback; `architecture` is like "sm_90", or "interpreter"."""
    key = (architecture, element_bytes, padded(nope_dim), padded(rope_dim), branches)
    return TABLE.get(key, FALLBACK[element_bytes])
