"""Step `train_tokenizer`: a byte-level BPE learned from the part of the stream that no validation reads."""

from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from attention_ablation.data.index_corpus import IndexedDocument, read_index
from attention_ablation.data.sources import Source, read_document
from attention_ablation.data.tokenizer import END_OF_TEXT, pieces
from attention_ablation.errors import UserError
from attention_ablation.files import write_text

# A pair seen once in the whole corpus says nothing about language.
MINIMUM_FREQUENCY = 2


def train_tokenizer(
    source: Source, corpus: Path, index: Path, *, vocabulary_size: int, holdout_bytes: int, output: Path
) -> None:
    """Train on the stream's text after its first `holdout_bytes` bytes and write the tokenizer as JSON.

    The end of text has id 0, the 256 bytes follow, then the merges. The same text gives the same
    bytes of JSON, whatever the number of parts, threads or processes.

    Raises:
        UserError: the text is too little for the vocabulary, or the vocabulary too small for the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary_size < len(alphabet) + 1:
        raise UserError(
            f"data.tokenizer.vocabulary_size is {vocabulary_size}, "
            f"but the bytes and {END_OF_TEXT} alone take {len(alphabet) + 1}"
        )
    documents = read_index(index)
    total = sum(document.bytes for document in documents)
    if not 0 <= holdout_bytes < total:
        raise UserError(
            f"data.tokenizer.holdout_bytes is {holdout_bytes:,}, but the corpus has {total:,} bytes; "
            "leave some text to train the tokenizer on"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=MINIMUM_FREQUENCY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text_after(source, corpus, documents, holdout_bytes), trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise UserError(
            f"data.tokenizer.vocabulary_size is {vocabulary_size}, but the text after the first "
            f"{holdout_bytes:,} bytes only gives {tokenizer.get_vocab_size()} tokens; "
            "ask for fewer or add text"
        )
    write_text(output, tokenizer.to_str(pretty=True) + "\n")


def _text_after(source: Source, corpus: Path, documents: list[IndexedDocument], skipped_bytes: int) -> Iterator[str]:
    """The stream's text from the first whole character at or after `skipped_bytes`."""
    remaining = skipped_bytes
    for document in documents:
        if remaining >= document.bytes:
            remaining -= document.bytes
            continue
        content = read_document(source, corpus, document.name).encode()[remaining:]
        remaining = 0
        # A cut inside a character leaves up to three continuation bytes at the start; they are held out too.
        start = next((i for i, byte in enumerate(content[:4]) if byte & 0xC0 != 0x80), len(content))
        yield from pieces(content[start:].decode())
