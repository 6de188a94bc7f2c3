"""What the C allocators do with large blocks that were let go."""

import contextlib
import ctypes
import os

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE_BYTES = 1_048_576


def return_large_blocks() -> None:
    """Give large blocks back to the system when they are freed; wants to be called before Arrow is imported.

    By default Arrow's own allocators keep what a long row of Parquet took, and glibc moves ever larger blocks into
    its heap, which splinters: reading 2 GB then took 60 MB more than reading 200 MB, and 100 MB more for a row of
    100 MB.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
