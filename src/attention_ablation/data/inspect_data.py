"""Commands `data inspect` and `data verify`: what a token stream holds, and whether it is still what it was."""

import json
from collections.abc import Callable
from pathlib import Path

from attention_ablation.data.stream import TokenStream
from attention_ablation.data.tokenizer import Tokenizer
from attention_ablation.errors import UserError

SAMPLE_TOKENS = 60


def describe(dataset: Path, tokenizer: Tokenizer) -> str:
    """A page about a dataset, for people."""
    facts = json.loads(dataset.read_bytes())
    stream = TokenStream.open(dataset)
    lines = [
        f"source           {facts['source']['kind']}, licence {facts['source']['license']}",
        f"documents        {facts['documents']:,}",
        f"tokens           {facts['tokens']:,} ({stream.dtype.name}, {len(facts['parts'])} parts)",
    ]
    if facts["bytes"] is not None:
        text_tokens = facts["tokens"] - facts["documents"]
        lines += [
            f"bytes of text    {facts['bytes']:,}",
            f"bytes a token    {facts['bytes'] / max(1, text_tokens):.3f} (ends of text left out)",
        ]
    longest = f"{facts['longest_document_tokens']:,} tokens"
    if facts["longest_document_bytes"] is not None:
        longest += f", {facts['longest_document_bytes']:,} bytes"
    lines.append(f"longest document {longest}")
    if facts["null_rows"]:
        lines.append(f"null rows        {facts['null_rows']:,} (left out)")
    if stream.holdout_tokens < stream.length:
        lines.append(f"held out         {stream.holdout_tokens:,} tokens that the tokenizer never saw")
    lines.append(f"vocabulary       {stream.vocabulary_size:,}, end of text {stream.end_of_text}")
    for where, start in (("start", 0), ("middle", stream.length // 2)):
        sample = stream.read(start, min(stream.length, start + SAMPLE_TOKENS)).tolist()
        text = tokenizer.decode(sample).encode("utf-8", "replace").decode()
        lines.append(f"sample, {where:8} {text!r}")
    return "\n".join(lines)


def verify(dataset: Path, stream_file: Path, report: Callable[[int, int], None] | None = None) -> str:
    """Read every part and compare it with its hash; returns one line that says so.

    Raises:
        UserError: a part is missing or changed, or the description is not the stream's.
    """
    stream = TokenStream.open(dataset)
    described = json.loads(stream_file.read_bytes())
    if described != {"length": stream.length, "sha256": stream.sha256}:
        raise UserError(f"{stream_file}: does not belong to {dataset.name}; remove both and start the workflow again")
    stream.verify(report=report)
    return f"{dataset}: {stream.length:,} tokens, every part as it was made"
