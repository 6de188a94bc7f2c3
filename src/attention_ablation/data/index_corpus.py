"""Step `index_corpus`: the order of the documents in the stream, and which part each goes to."""

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from attention_ablation.data.sources import Document, Source, list_documents
from attention_ablation.errors import UserError
from attention_ablation.files import write_json


@dataclass(frozen=True)
class IndexedDocument:
    """One document of the stream; `part` counts from 0."""

    name: str
    bytes: int
    part: int


def index_corpus(
    source: Source, corpus: Path, *, order: Literal["shuffled", "listed"], parts: int, output: Path
) -> None:
    """Write the documents in stream order as JSON, each with its size in bytes and its part.

    `shuffled` sorts by a hash of the name, so that any stretch of the stream mixes genres; `listed` keeps the
    source's order. Parts are contiguous stretches of the stream, so they never change what the stream is.

    Raises:
        UserError: there are fewer documents than parts.
    """
    documents = list_documents(source, corpus)
    if not 1 <= parts <= len(documents):
        raise UserError(
            f"data.parts is {parts}, but {corpus} holds {len(documents)} documents; "
            f"set data.parts between 1 and {len(documents)}"
        )
    if order == "shuffled":
        documents.sort(key=lambda document: hashlib.sha256(document.name.encode()).digest())
    indexed = [
        IndexedDocument(document.name, document.bytes, part)
        for document, part in zip(documents, _part_numbers(documents, parts), strict=True)
    ]
    write_json(output, {"documents": [asdict(document) for document in indexed]})


def read_index(index: Path) -> list[IndexedDocument]:
    """The documents in stream order."""
    try:
        return [IndexedDocument(**document) for document in json.loads(index.read_bytes())["documents"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: not a corpus index ({error!r}); index the corpus again") from None


def _part_numbers(documents: list[Document], parts: int) -> list[int]:
    """Cut at the document edge nearest to each equal share of the bytes, leaving no part empty.

    No part is larger than an equal share and one document.
    """
    edges = [0, *accumulate(document.bytes for document in documents)]  # byte position before document i
    cuts = [0]
    for cut in range(1, parts):
        first, last = cuts[-1] + 1, len(documents) - (parts - cut)
        share = edges[-1] * cut
        cuts.append(min(range(first, last + 1), key=lambda i: abs(edges[i] * parts - share)))
    cuts.append(len(documents))
    return [part for part in range(parts) for _ in range(cuts[part], cuts[part + 1])]
