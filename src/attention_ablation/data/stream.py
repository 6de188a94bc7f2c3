"""The token stream: all parts of a dataset as one sequence of tokens, read where it lies on disk.

Training depends on this file; it imports nothing of the steps that make the parts.
"""

import json
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np

from attention_ablation.data.token_files import TOKEN, map_tokens, read_header
from attention_ablation.errors import UserError
from attention_ablation.files import sha256_of

# Each map keeps a file descriptor; a dataset can have more parts than the usual limit of 1,024.
MAPPED_PARTS = 64


class TokenStream:
    """The concatenation of a dataset's parts.

    Attributes:
        length: tokens in the stream.
        sha256: hash of the stream's token bytes; does not depend on how the stream is cut into parts.
        vocabulary_size: ids are below it.
        end_of_text: the id before each document.
        holdout_tokens: tokens at the start that the tokenizer was not trained on.
    """

    def __init__(
        self,
        parts: list[tuple[Path, int, str]],
        *,
        sha256: str,
        vocabulary_size: int,
        end_of_text: int,
        holdout_tokens: int,
    ) -> None:
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
            stream = cls(
                parts,
                sha256=described["stream_sha256"],
                vocabulary_size=described["vocabulary_size"],
                end_of_text=described["end_of_text"],
                holdout_tokens=described["holdout_tokens"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{dataset}: not a dataset description ({error!r}); make the dataset again") from None
        for path, tokens, _ in parts:
            found = read_header(path)
            if found != tokens:
                raise UserError(f"{path}: {found:,} tokens, {dataset.name} says {tokens:,}; make the dataset again")
        return stream

    def check_validation(self, validation_tokens: int) -> None:
        """Raise UserError unless the stream's first `validation_tokens` are all held out, and some are left."""
        if validation_tokens > self.holdout_tokens:
            raise UserError(
                f"data.validation_tokens is {validation_tokens:,}, but the tokenizer was trained on all after the "
                f"first {self.holdout_tokens:,} tokens; raise data.tokenizer.holdout_bytes or lower it"
            )
        if validation_tokens >= self.length:
            raise UserError(
                f"data.validation_tokens is {validation_tokens:,}, but the stream has {self.length:,} tokens; "
                "leave some to train on"
            )

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens `start` to `stop` (exclusive), `(stop - start,)` uint16; it may straddle parts."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.length}")
        tokens = np.empty(stop - start, dtype=TOKEN)
        part = int(np.searchsorted(self._starts, start, side="right")) - 1
        position = start
        while position < stop:
            begin, end = int(self._starts[part]), min(stop, int(self._starts[part + 1]))
            tokens[position - start : end - start] = self._map(self._parts[part][0])[position - begin : end - begin]
            position = end
            part += 1
        return tokens

    def verify(self) -> None:
        """Read everything and compare each part with the hash its description has.

        Raises:
            UserError: a part has changed.
        """
        for path, _, expected in self._parts:
            found = sha256_of(path)
            if found != expected:
                raise UserError(f"{path}: sha256 is {found}, expected {expected}; tokenize it again")
