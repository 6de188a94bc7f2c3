"""Step `tokenize`: one part of the corpus as a token file, and what was counted on the way."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from attention_ablation.data.index_corpus import IndexedUnit, read_index
from attention_ablation.data.sources import Corpus
from attention_ablation.data.token_files import TokenFileWriter, format_for
from attention_ablation.data.tokenizer import Tokenizer
from attention_ablation.errors import UserError
from attention_ablation.files import write_json


@dataclass
class Counts:
    """What a part holds; bytes are of text, in UTF-8."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    longest_document_bytes: int = 0
    null_rows: int = 0  # rows without text, which are no documents


# The pieces of a batch, each with whether a document begins before it.
Batch = list[tuple[bool, str]]


def tokenize_part(
    corpus: Corpus,
    index: Path,
    tokenizer: Tokenizer,
    *,
    part: int,
    output: Path,
    counts_output: Path,
    threads: int,
    batch_bytes: int,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Write the tokens of the documents of `part`, an end of text before each of them, and their counts as JSON.

    Text is encoded in batches of about `batch_bytes`, as many at once as `threads`; the next ones are read meanwhile.
    `report` hears of the bytes of text read, of about how many.

    Raises:
        UserError: the index has no such part, or the corpus is not as it was indexed.
    """
    units = [indexed for indexed in read_index(index) if indexed.part == part]
    if not units:
        raise UserError(f"{index}: has no part {part}; index the corpus again with the parts you mean")
    # The library's own threads would come on top of ours.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    counts = Counts()
    token_format = format_for(tokenizer.vocabulary_size)

    def encode(batch: Batch) -> np.ndarray:
        mark = np.array([tokenizer.end_of_text], dtype=np.uint32)
        arrays = []
        for (begins, _), ids in zip(batch, tokenizer.encode([text for _, text in batch]), strict=True):
            arrays += [mark, ids] if begins else [ids]
        return np.concatenate(arrays)

    with TokenFileWriter.create(output, token_format) as writer, ThreadPoolExecutor(threads) as workers:
        at_work: deque[Future[np.ndarray]] = deque()
        for batch in _batches(corpus, tokenizer, units, counts, batch_bytes, report):
            at_work.append(workers.submit(encode, batch))
            if len(at_work) > threads + 1:
                writer.write(at_work.popleft().result())
        while at_work:
            writer.write(at_work.popleft().result())
        counts.tokens = writer.tokens
    write_json(counts_output, asdict(counts))


PIECE_BYTES = 200  # what a piece costs beside its text: a million empty documents held 985 MB without it


def _batches(
    corpus: Corpus,
    tokenizer: Tokenizer,
    units: list[IndexedUnit],
    counts: Counts,
    batch_bytes: int,
    report: Callable[[int, int], None] | None,
) -> Iterator[Batch]:
    total = sum(indexed.unit.bytes for indexed in units)
    done = 0
    batch: Batch = []
    held = 0
    for indexed in units:
        for document in corpus.documents(indexed.unit):
            if document is None:
                counts.null_rows += 1
                continue
            counts.documents += 1
            begins, size = True, 0
            for piece in tokenizer.pieces(document.chunks):
                batch.append((begins, piece))
                begins = False
                piece_bytes = len(piece) if piece.isascii() else len(piece.encode())
                size += piece_bytes
                held += piece_bytes + PIECE_BYTES
                if held >= batch_bytes:
                    yield batch
                    batch, held = [], 0
            if begins:  # an empty document
                batch.append((True, ""))
                held += PIECE_BYTES
            if held >= batch_bytes:
                yield batch
                batch, held = [], 0
            counts.bytes += size
            counts.longest_document_bytes = max(counts.longest_document_bytes, size)
        done += indexed.unit.bytes
        if report is not None:
            report(done, total)
    if batch:
        yield batch
