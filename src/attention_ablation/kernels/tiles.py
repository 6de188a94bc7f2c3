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


# At the paper's head dims, 128 and 64, in bfloat16 or float16, by (architecture, branches): the largest tiles that
# `ablation kernels` found free of spills and in the architecture's own matrix instructions. Never timed: no GPU.
_PAPER = {
    ("sm_80", 1): Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("sm_80", 2): Tiles(Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    ("sm_80", 4): Tiles(Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    ("sm_90", 1): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("sm_90", 2): Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
    ("sm_90", 4): Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
    ("sm_100", 1): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("sm_100", 2): Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("sm_100", 4): Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
}

# (architecture, bytes an element, Dn, Dr, J)
TABLE: dict[tuple[str, int, int, int, int], Tiles] = {
    (architecture, 2, 128, 64, branches): tiles for (architecture, branches), tiles in _PAPER.items()
}

# For every other shape and device, by the bytes of an element. With 2 free of spills up to head dims of 128 and 128;
# with 4 the query's gradient spills 300 bytes there: float32 has no matrix instructions of full precision.
FALLBACK = {
    2: Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    4: Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}

# In Triton's interpreter, where the number of tiles is what costs time; uneven, so that tests see what that breaks.
INTERPRETER = Tiles(Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1))


def padded(dim: int) -> int:
    """The power of two, 16 or more, that holds `dim`: what a dot product of tensor cores takes."""
    return max(16, 1 << (dim - 1).bit_length())


def tiles_for(architecture: str, *, element_bytes: int, nope_dim: int, rope_dim: int, branches: int) -> Tiles:
    """The table's entry, or the fallback; `architecture` is like "sm_90", or "interpreter"."""
    if architecture == "interpreter":
        return INTERPRETER
    key = (architecture, element_bytes, padded(nope_dim), padded(rope_dim), branches)
    return TABLE.get(key, FALLBACK[element_bytes])
