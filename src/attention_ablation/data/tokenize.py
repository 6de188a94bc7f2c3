"""Step `tokenize`: one part of the corpus as a token file."""

from collections.abc import Iterator
from pathlib import Path

from attention_ablation.data.index_corpus import IndexedDocument, read_index
from attention_ablation.data.sources import Source, read_document
from attention_ablation.data.token_files import TokenFileWriter
from attention_ablation.data.tokenizer import Tokenizer, pieces
from attention_ablation.errors import UserError

# Keeps two cores busy; the library takes about 80 bytes a character while it encodes, so 21 MB.
BATCH_CHARACTERS = 262_144


def tokenize_part(source: Source, corpus: Path, index: Path, tokenizer: Path, *, part: int, output: Path) -> None:
    """Write the tokens of the documents of `part`, an end of text before each of them.

    Raises:
        UserError: the index has no such part, or it is of another corpus.
    """
    documents = [document for document in read_index(index) if document.part == part]
    if not documents:
        raise UserError(f"{index}: has no part {part}; index the corpus again with the parts you mean")
    encoder = Tokenizer(tokenizer)
    with TokenFileWriter.create(output) as writer:
        for batch in _batches(_document_pieces(source, corpus, documents)):
            encoded = encoder.encode([text for _, text in batch])
            for (begins_document, _), ids in zip(batch, encoded, strict=True):
                if begins_document:
                    writer.write([encoder.end_of_text])
                writer.write(ids)


def _document_pieces(source: Source, corpus: Path, documents: list[IndexedDocument]) -> Iterator[tuple[bool, str]]:
    """The text of the documents in pieces, each with whether it begins a document."""
    for document in documents:
        text = read_document(source, corpus, document.name)
        yield True, ""
        for piece in pieces(text):
            yield False, piece


def _batches(document_pieces: Iterator[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    batch: list[tuple[bool, str]] = []
    characters = 0
    for begins_document, text in document_pieces:
        batch.append((begins_document, text))
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch
