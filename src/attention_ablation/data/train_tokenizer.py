"""Step `train_tokenizer`: the tokenizer of a study, as one file.

A byte-level BPE is learned from the part of the stream that no validation reads; GPT-2's is put together from its
two vocabulary files; one that is given as a file is copied.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from attention_ablation.data.index_corpus import read_index
from attention_ablation.data.sources import Corpus, Unit
from attention_ablation.data.tokenizer import END_OF_TEXT, JsonTokenizer, pieces
from attention_ablation.errors import UserError
from attention_ablation.files import sha256_of, write_text

# A pair seen once in the whole corpus says nothing about language.
MINIMUM_FREQUENCY = 2

# The two files that GPT-2's makers publish; every copy of them is the same to the byte.
GPT2_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def train_bpe(
    corpus: Corpus, index: Path, *, vocabulary_size: int, holdout_bytes: int, sample_bytes: int, output: Path
) -> None:
    """Train on the stream's text after its first `holdout_bytes` bytes and write the tokenizer as JSON.

    Reads at most `sample_bytes` of text; of a longer corpus, units spread evenly over it. The end of text has id 0,
    the 256 bytes follow, then the merges. The same text gives the same bytes of JSON, whatever the number of parts,
    threads or processes.

    Raises:
        UserError: the text is too little for the vocabulary, or the vocabulary too small for the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary_size < len(alphabet) + 1:
        raise UserError(
            f"data.tokenizer.vocabulary_size is {vocabulary_size}, "
            f"but the bytes and {END_OF_TEXT} alone take {len(alphabet) + 1}"
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
    units = [indexed.unit for indexed in read_index(index)]
    tokenizer.train_from_iterator(_sample(corpus, units, holdout_bytes, sample_bytes), trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise UserError(
            f"data.tokenizer.vocabulary_size is {vocabulary_size}, but the text after the first "
            f"{holdout_bytes:,} bytes only gives {tokenizer.get_vocab_size()} tokens; "
            "ask for fewer or add text"
        )
    write_text(output, tokenizer.to_str(pretty=True) + "\n")


def assemble_gpt2(vocabulary: Path, output: Path) -> None:
    """Write GPT-2's tokenizer from `vocab.bpe` and `encoder.json` in the folder `vocabulary`.

    Raises:
        UserError: a file is missing, or is not GPT-2's.
    """
    for name, expected in GPT2_SHA256.items():
        try:
            found = sha256_of(vocabulary / name)
        except OSError as error:
            raise UserError(
                f"{vocabulary / name}: {error.strerror}; the folder that data.tokenizer.folder names must "
                f"hold GPT-2's {' and '.join(GPT2_SHA256)}"
            ) from None
        if found != expected:
            raise UserError(f"{vocabulary / name}: sha256 is {found}, GPT-2's is {expected}; get the file again")
    numbers = json.loads((vocabulary / "encoder.json").read_text(encoding="utf-8"))
    lines = (vocabulary / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(" ") for line in lines[1:] if line]
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=numbers, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    write_text(output, tokenizer.to_str() + "\n")


def copy_tokenizer(path: Path, *, vocabulary_size: int, end_of_text: str, output: Path) -> None:
    """Copy a `tokenizer.json`.

    Raises:
        UserError: it is none, or does not have the vocabulary that the study says.
    """
    found = JsonTokenizer(path, end_of_text).vocabulary_size
    if found != vocabulary_size:
        raise UserError(
            f"data.tokenizer.vocabulary_size is {vocabulary_size}, but {path} has ids up to {found - 1}; "
            f"set it to {found}"
        )
    write_text(output, path.read_text(encoding="utf-8"))


def _sample(corpus: Corpus, units: list[Unit], holdout_bytes: int, sample_bytes: int) -> Iterator[str]:
    """The stream's text from the first whole character at or after `holdout_bytes`, at most `sample_bytes` of it."""
    remaining, taken, edge = holdout_bytes, 0, 0
    while edge == 0 or (remaining > 0 and edge < len(units)):  # unit by unit, until the held-out text is passed
        for document in corpus.documents(units[edge]):
            for piece in pieces(document.chunks if document else ()):
                after = _after(piece, remaining)
                remaining -= min(remaining, len(piece.encode()))
                if after and taken < sample_bytes:
                    taken += len(after.encode())
                    yield after
        edge += 1
    for unit in _spread(units[edge:], sample_bytes - taken):
        for document in corpus.documents(unit):
            for piece in pieces(document.chunks if document else ()):
                if taken >= sample_bytes:
                    return
                taken += len(piece.encode())
                yield piece
    if taken == 0:
        raise UserError(
            f"data.tokenizer.holdout_bytes is {holdout_bytes:,}, but the corpus has {holdout_bytes - remaining:,} "
            "bytes; leave some text to train the tokenizer on"
        )


def _after(text: str, skipped_bytes: int) -> str:
    """The text from the first whole character at or after a number of bytes."""
    if skipped_bytes == 0:
        return text
    content = text.encode()[skipped_bytes:]
    # A cut inside a character leaves up to three continuation bytes at the start; they are held out too.
    start = next((i for i, byte in enumerate(content[:4]) if byte & 0xC0 != 0x80), len(content))
    return content[start:].decode()


def _spread(units: list[Unit], wanted_bytes: int) -> Iterator[Unit]:
    """All units, or so many of them, evenly spread, that they hold about `wanted_bytes`."""
    total = sum(unit.bytes for unit in units)
    if total <= wanted_bytes:
        yield from units
        return
    credit = total * units[0].bytes  # the first is taken
    for unit in units:
        credit += wanted_bytes * unit.bytes
        if credit >= total * unit.bytes:
            credit -= total * unit.bytes
            yield unit
