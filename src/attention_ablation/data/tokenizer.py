"""Tokenizers as the steps see them: text to ids without special tokens, ids to text.

All of them are one file in the format of the `tokenizers` library. GPT-2's splitting rule with byte-level tokens,
GPT-2's own and those trained here, allows more: every token is a whole number of bytes, so a count of tokens is an
exact count of bytes, and a text can be cut where no token can cross.
"""

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import tiktoken
import tokenizers

from attention_ablation.errors import UserError

END_OF_TEXT = "<|endoftext|>"
PIECE_CHARACTERS = 32_768
# A stretch this long without a safe cut (no space, no digit beside a letter, ...) is cut all the same.
LONGEST_PIECE_CHARACTERS = 1_048_576

# GPT-2's splitting rule looks behind nowhere, and no token of its goes on into whitespace, from a letter into a
# digit, or from these marks into a letter: cutting there changes no token. Only characters of an undoubted class.
_SAFE_CUT = re.compile(
    r"(?<=\S)(?=[ \n\r\t])|(?<=[A-Za-z])(?=[0-9.,;:!?(])|(?<=[0-9])(?=[A-Za-z.,;:!?(])|(?<=[.,;:!?)])(?=[A-Za-z0-9])"
    r"|(?<=[\u4e00-\u9fa5])(?=[\u3001\u3002\uff0c])|(?<=[\u3001\u3002\uff0c])(?=[\u4e00-\u9fa5])"
)
# Other rules may join marks and newlines; before a lone space hardly any rule goes on.
_SPACE_CUT = re.compile(r"(?<=\S)(?= \S)")

# GPT-2's rule as the library of its makers has it.
_GPT2_RULE = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        end_of_text: the id before each document; `encode` never gives it.
        vocabulary_size: ids are below it.
    """

    end_of_text: int
    vocabulary_size: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, on one core; threads may share the tokenizer."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; the inverse of `encode`."""
        ...

    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text each id stands for, `(vocabulary_size,)` int64, 0 for the end of text; None: not whole."""
        ...

    def pieces(self, chunks: Iterable[str]) -> Iterator[str]:
        """A document's text in pieces that are encoded one by one."""
        ...


def load_tokenizer(path: Path, kind: Literal["bpe", "gpt2", "file"], end_of_text: str = END_OF_TEXT) -> Tokenizer:
    """The tokenizer in a file that the step `train_tokenizer` made.

    Raises:
        UserError: the file is no tokenizer, or has no `end_of_text` token.
    """
    return Gpt2Tokenizer(path) if kind == "gpt2" else JsonTokenizer(path, end_of_text)


class JsonTokenizer:
    """Any tokenizer of the `tokenizers` library."""

    def __init__(self, path: Path, end_of_text: str = END_OF_TEXT) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise UserError(f"{path}: not a tokenizer ({error}); make or copy it again") from None
        # Without this, "<|endoftext|>" written by an author would become the mark between documents.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        number = self._tokenizer.token_to_id(end_of_text)
        if number is None:
            raise UserError(
                f"{path}: the tokenizer has no token {end_of_text!r}; name its end of text in "
                "data.tokenizer.end_of_text"
            )
        self.end_of_text: int = number
        vocabulary = self._tokenizer.get_vocab()
        self.vocabulary_size: int = max(vocabulary.values()) + 1
        self._is_byte_level = _is_byte_level(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        # An array of C integers in between: three times as fast as from the list itself.
        return [np.frombuffer(array("I", encoding.ids), dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray | None:
        """Bytes of each token, where tokens are whole bytes."""
        if not self._is_byte_level:
            return None
        # The alphabet of a byte-level BPE writes every byte as one character.
        lengths = np.zeros(self.vocabulary_size, dtype=np.int64)
        for token, number in self._tokenizer.get_vocab().items():
            lengths[number] = len(token)
        lengths[self.end_of_text] = 0
        return lengths

    def pieces(self, chunks: Iterable[str]) -> Iterator[str]:
        """Cut where no token can cross; with an unknown splitting rule, only what is very long, before a space."""
        if self._is_byte_level:
            return pieces(chunks)
        longest = LONGEST_PIECE_CHARACTERS
        return pieces(chunks, size=longest, longest=2 * longest, safe_cut=_SPACE_CUT)


class Gpt2Tokenizer:
    """GPT-2's tokenizer through tiktoken, several times as fast as the general library."""

    def __init__(self, path: Path) -> None:
        try:
            vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
            self.end_of_text: int = vocabulary[END_OF_TEXT]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not GPT-2's tokenizer ({error!r}); make it again") from None
        self.vocabulary_size = len(vocabulary)
        byte_of = {character: byte for byte, character in byte_alphabet().items()}
        self._bytes = {
            bytes(byte_of[character] for character in token): number
            for token, number in vocabulary.items()
            if token != END_OF_TEXT
        }
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=_GPT2_RULE,
            mergeable_ranks=self._bytes,
            special_tokens={END_OF_TEXT: self.end_of_text},
            explicit_n_vocab=self.vocabulary_size,
        )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        # With no special token allowed and none refused, all text is ordinary.
        return [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""
        return self._encoding.decode([int(number) for number in ids])

    def token_bytes(self) -> np.ndarray:
        """Bytes of each token."""
        lengths = np.zeros(self.vocabulary_size, dtype=np.int64)
        for token, number in self._bytes.items():
            lengths[number] = len(token)
        return lengths

    def pieces(self, chunks: Iterable[str]) -> Iterator[str]:
        """Cut where no token can cross."""
        return pieces(chunks)


def byte_alphabet() -> dict[int, str]:
    """How a byte-level BPE writes each byte as a printable character: itself, or the next free one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizer splits by GPT-2's rule, changes no text, and its tokens are whole bytes."""
    described = json.loads(tokenizer.to_str())
    splitting = described["pre_tokenizer"] or {}
    return (
        described["model"].get("type") == "BPE"
        and not described["model"].get("byte_fallback")
        and described["normalizer"] is None
        and splitting.get("type") == "ByteLevel"
        and not splitting.get("add_prefix_space")
        and splitting.get("use_regex", True)
    )


def pieces(
    chunks: Iterable[str],
    size: int = PIECE_CHARACTERS,
    longest: int = LONGEST_PIECE_CHARACTERS,
    safe_cut: re.Pattern[str] = _SAFE_CUT,
) -> Iterator[str]:
    """Cut a text into pieces: at the first safe place after `size` characters, or else after `longest`.

    Where the cuts fall depends on the text alone, not on how it came in chunks. Pieces bound the memory that
    encoding needs, whatever the length of a document, and let one long document use every core.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start > size:
            end = _end_of_piece(held, start, size, longest, safe_cut)
            if end is None:
                break
            yield held[start:end]
            start = end
        held = held[start:]
    if held:
        yield held


def _end_of_piece(text: str, start: int, size: int, longest: int, safe_cut: re.Pattern[str]) -> int | None:
    """Where the piece that begins at `start` ends; None when only more text can tell."""
    # A cut may look at two characters after it, which may not be here yet.
    cut = safe_cut.search(text, start + size, min(len(text), start + longest + 2))
    if cut and cut.end() <= start + longest:
        return cut.end()
    return start + longest if len(text) >= start + longest + 2 else None
