"""The token stream: all parts of a dataset as one sequence of tokens, read where it lies on disk.

Training depends on this file; it imports nothing of the steps that make the parts.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np

from attention_ablation.data.token_files import map_tokens, read_header
from attention_ablation.errors import UserError
from attention_ablation.files import remembered_sha256, sha256_of

# Each map keeps a file descriptor; a dataset can have more parts than the usual limit of 1,024.
MAPPED_PARTS = 64


class TokenStream:
    """The concatenation of a dataset's parts.

    Attributes:
        length: tokens in the stream.
        dtype: of the tokens, uint16 or uint32.
        sha256: hash of the stream's token bytes; does not depend on how the stream is cut into parts.
        vocabulary_size: ids are below it.
        end_of_text: the id before each document.
        holdout_tokens: tokens at the start that the tokenizer was not trained on.
    """

    def __init__(
        self,
        parts: list[tuple[Path, int, str]],
        *,
        dtype: np.dtype,
        sha256: str,
        vocabulary_size: int,
        end_of_text: int,
        holdout_tokens: int,
    ) -> None:
        self.dtype = dtype
        self.sha256 = sha256
        self.vocabulary_size = vocabulary_size
        self.end_of_text = end_of_text
        self.holdout_tokens = holdout_tokens
        self._parts = parts
        self._starts = np.array([0, *accumulate(tokens for _, tokens, _ in parts)], dtype=np.int64)
        self.length = int(self._starts[-1])
        self._map = lru_cache(maxsize=MAPPED_PARTS)(map_tokens)

    @classmethod
    def open(cls, dataset: Path) -> Self:
        """Open the dataset described by a `dataset.json`, checking headers and sizes but not hashes.

        Raises:
            UserError: the description or a part is missing, damaged, or they do not belong together.
        """
        try:
            described = json.loads(dataset.read_bytes())
            parts = [
                (dataset.parent / part["file"], int(part["tokens"]), str(part["sha256"]))
                for part in described["parts"]
            ]
            facts = {name: described[name] for name in ("vocabulary_size", "end_of_text", "holdout_tokens")}
            sha256 = described["stream_sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{dataset}: not a dataset description ({error!r}); make the dataset again") from None
        if not parts:
            raise UserError(f"{dataset}: describes no parts; make the dataset again")
        widths = set()
        for path, tokens, _ in parts:
            header = read_header(path)
            if header.tokens != tokens:
                raise UserError(
                    f"{path}: {header.tokens:,} tokens, {dataset.name} says {tokens:,}; make the dataset again"
                )
            widths.add(header.format.token)
        if len(widths) > 1:
            raise UserError(f"{dataset}: some parts hold uint16 tokens and some uint32; make the dataset again")
        return cls(parts, dtype=widths.pop(), sha256=sha256, **facts)

    def check_validation(self, validation_tokens: int) -> None:
        """Raise UserError unless the stream's first `validation_tokens` are all held out, and some are left."""
        if validation_tokens >= self.length:
            raise UserError(
                f"data.validation_tokens is {validation_tokens:,}, but the stream has {self.length:,} tokens; "
                "leave some to train on"
            )
        if validation_tokens > self.holdout_tokens:
            raise UserError(
                f"data.validation_tokens is {validation_tokens:,}, but the tokenizer was trained on all after the "
                f"first {self.holdout_tokens:,} tokens; raise data.tokenizer.holdout_bytes or lower it"
            )

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens `start` to `stop` (exclusive), `(stop - start,)` of `dtype`; it may straddle parts."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.length}")
        tokens = np.empty(stop - start, dtype=self.dtype)
        part = int(np.searchsorted(self._starts, start, side="right")) - 1
        position = start
        while position < stop:
            begin, end = int(self._starts[part]), min(stop, int(self._starts[part + 1]))
            tokens[position - start : end - start] = self._map(self._parts[part][0])[position - begin : end - begin]
            position = end
            part += 1
        return tokens

    def verify(self, memory: Path | None = None, report: Callable[[int, int], None] | None = None) -> None:
        """Compare each part with the hash its description has.

        Every part is read, but those whose size and time of change are the ones in `memory`, if that is given.

        Raises:
            UserError: a part has changed.
        """
        paths = [path for path, _, _ in self._parts]
        if memory is not None:
            hashes = remembered_sha256(paths, memory, report)
        else:
            hashes, done = [], 0
            total = sum(path.stat().st_size for path in paths)
            for path in paths:
                hashes.append(sha256_of(path))
                done += path.stat().st_size
                if report is not None:
                    report(done, total)
        for (path, _, expected), found in zip(self._parts, hashes, strict=True):
            if found != expected:
                raise UserError(f"{path}: sha256 is {found}, expected {expected}; make or copy it again")
