"""A byte-level BPE tokenizer as the steps see it: text to ids without special tokens, ids to text.

Every token of a byte-level BPE is a whole number of bytes, so a count of tokens is an exact count of bytes.
GPT-2's own tokenizer is of this kind: a file in the same format is all that another one needs.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from attention_ablation.errors import UserError

END_OF_TEXT = "<|endoftext|>"
PIECE_CHARACTERS = 32_768

# A lone space between two printed characters always begins a word of GPT-2's splitting rule, which looks
# neither further back nor, from the word before, further ahead: cutting there changes no token.
_SAFE_CUT = re.compile(r"(?<=\S)(?= \S)")


class Tokenizer:
    """The tokenizer in a JSON file of the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise UserError(f"{path}: not a tokenizer ({error}); train the tokenizer again") from None
        # Without this, "<|endoftext|>" written by an author would become the mark between documents.
        self._tokenizer.encode_special_tokens = True
        end_of_text = self._tokenizer.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise UserError(f"{path}: the tokenizer has no {END_OF_TEXT} token; train the tokenizer again")
        self.end_of_text: int = end_of_text
        self.vocabulary_size: int = self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, never `end_of_text`; on all the cores the library is given."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; the inverse of `encode`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """Bytes of text each id stands for, `(vocabulary_size,)` int64; 0 for the end of text."""
        # The alphabet of a byte-level BPE writes every byte as one character.
        lengths = np.zeros(self.vocabulary_size, dtype=np.int64)
        for token, number in self._tokenizer.get_vocab().items():
            lengths[number] = len(token)
        lengths[self.end_of_text] = 0
        return lengths


def pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text where no token can cross, into pieces of at least `size` characters but the last.

    Pieces bound the memory the library needs while it encodes, whatever the length of a document, and let one
    long document use every core.
    """
    start = 0
    while start < len(text):
        cut = _SAFE_CUT.search(text, start + size)
        end = cut.end() if cut else len(text)
        yield text[start:end]
        start = end
