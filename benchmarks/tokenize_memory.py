"""Peak memory of one tokenising job: a synthetic corpus against one of a tenth, a document of 100 MB in both.

    python benchmarks/tokenize_memory.py [--json] [--megabytes 2000] [--document 100] [--format jsonl parquet txt]
                                         [--tokenizer gpt2]

The limits are 600 MB at any size, and 1.1 times the peak of the small corpus. `tests/data/test_data_memory.py` runs
the same with little text.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attention_ablation.memory import return_large_blocks

LIMIT_MEGABYTES = 600
LIMIT_GROWTH = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--megabytes", type=int, default=2000, help="of the large corpus")
    parser.add_argument("--shrink", type=int, default=10, help="by which the small corpus is smaller")
    parser.add_argument("--document", type=int, default=100, help="megabytes of the one long document")
    parser.add_argument("--format", nargs="+", default=["jsonl", "parquet", "txt"])
    parser.add_argument("--tokenizer", choices=["gpt2", "bpe"], default="gpt2")
    parser.add_argument("--child", nargs=3, metavar=("CORPUS", "TOKENIZER", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return_large_blocks()  # as `ablation tokenize` does
        tokenize(*map(Path, options.child), kind=options.tokenizer)
        return
    for file_format in options.format:
        peaks = [
            peak_of(file_format, size, options.document, options.tokenizer)
            for size in (options.megabytes // options.shrink, options.megabytes)
        ]
        name = f"tokenize {options.tokenizer} {file_format} {options.megabytes} MB"
        growth = peaks[1] / peaks[0]
        for line in (
            {"name": f"{name}: peak memory", "ours": peaks[1], "baseline": LIMIT_MEGABYTES, "unit": "MB",
             "ratio": LIMIT_MEGABYTES / peaks[1]},
            {"name": f"{name}: growth from 1/{options.shrink}", "ours": growth, "baseline": LIMIT_GROWTH,
             "unit": "times", "ratio": LIMIT_GROWTH / growth},
        ):  # fmt: skip
            text = f"{line['name']:48} {line['ours']:8.3f} {line['unit']}, limit {line['baseline']}"
            print(json.dumps(line) if options.json else text, flush=True)


def peak_of(file_format: str, megabytes: int, document: int, kind: str) -> float:
    """Peak memory, in MB, of a process of its own that tokenises a corpus of this size."""
    from attention_ablation.data.fetch_corpus import fetch_vocabulary
    from attention_ablation.data.index_corpus import index_corpus
    from attention_ablation.data.sources import FilesSource, open_corpus
    from attention_ablation.data.train_tokenizer import GPT2_SHA256, assemble_gpt2, train_bpe

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / f"corpus.{file_format}"
        write_corpus(corpus, texts(megabytes * 10**6, document * 10**6))
        if kind == "gpt2":
            fetch_vocabulary([folder / file for file in GPT2_SHA256])
            assemble_gpt2(folder, folder / "tokenizer.json")
        else:
            opened = open_corpus(FilesSource((str(corpus),)), [])
            index_corpus(opened, order="listed", parts=1, output=folder / "index.json")
            train_bpe(
                opened, folder / "index.json", vocabulary_size=1000, holdout_bytes=0, sample_bytes=10**6,
                output=folder / "tokenizer.json",
            )  # fmt: skip
        # A child's peak starts at the size of the process it was forked from, so a small one is in between.
        command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, __file__, "--tokenizer", kind]
        command += ["--child", str(corpus), str(folder / "tokenizer.json"), str(folder)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def tokenize(corpus: Path, tokenizer: Path, folder: Path, kind: str) -> None:
    """One job, with the defaults of the study; prints its peak memory in MB."""
    import resource

    from attention_ablation.data.index_corpus import index_corpus
    from attention_ablation.data.sources import FilesSource, open_corpus
    from attention_ablation.data.tokenize import tokenize_part
    from attention_ablation.data.tokenizer import load_tokenizer

    opened = open_corpus(FilesSource((str(corpus),)), [])
    index_corpus(opened, order="listed", parts=1, output=folder / "index.json")
    tokenize_part(
        opened, folder / "index.json", load_tokenizer(tokenizer, kind), part=0, output=folder / "part.bin",
        counts_output=folder / "part.json", threads=1, batch_bytes=262_144,
    )  # fmt: skip
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def texts(size: int, document: int) -> Iterator[str]:
    """Documents of about 5 kB and, in their middle, one long one."""
    words = random.Random(0)
    vocabulary = ["".join(words.choices("etaoinshrdlucmfwypé", k=words.randint(1, 9))) for _ in range(5000)]
    made, long_one_is_due = 0, True
    while made < size - document:
        if long_one_is_due and made >= (size - document) // 2:
            block = " ".join(words.choices(vocabulary, k=20_000))
            yield " ".join([block] * (document // len(block.encode())))
            long_one_is_due = False
        text = " ".join(words.choices(vocabulary, k=900))
        made += len(text.encode())
        yield text


def write_corpus(path: Path, documents: Iterator[str]) -> None:
    """One file of the format that its name tells."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema([("text", pa.string())])
        with pq.ParquetWriter(path, schema) as writer:
            rows: list[str] = []
            for document in documents:
                rows.append(document)
                if len(rows) == 1000:
                    writer.write_table(pa.table({"text": rows}, schema))
                    rows = []
            if rows:
                writer.write_table(pa.table({"text": rows}, schema))
        return
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(document + "\n" if path.suffix == ".txt" else json.dumps({"text": document}) + "\n")


if __name__ == "__main__":
    main()
