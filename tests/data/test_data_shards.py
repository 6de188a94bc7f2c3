"""Token shards that exist already, and datasets too large to read: used where they lie."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from attention_ablation import files
from attention_ablation.data.dataset import build_dataset
from attention_ablation.data.inspect_data import describe, verify
from attention_ablation.data.stream import TokenStream
from attention_ablation.data.token_files import NARROW, WIDE, TokenFileWriter
from attention_ablation.data.tokenizer import load_tokenizer
from attention_ablation.errors import UserError


@pytest.fixture
def tokenizer(tokenizer_file):
    return load_tokenizer(tokenizer_file, "bpe")


def write_shard(path, ids, token_format=NARROW):
    with TokenFileWriter.create(path, token_format) as writer:
        writer.write(ids)
    return path


def describe_shards(folder, shards, tokenizer_file, tokenizer):
    build_dataset(
        shards, tokenizer_file, tokenizer, counts=None, source_info={"kind": "token_shards", "license": "x"},
        holdout_bytes=None, dataset_output=folder / "dataset.json", stream_output=folder / "stream.json",
    )  # fmt: skip
    return folder / "dataset.json"


def test_shards_are_described_where_they_lie_and_nothing_is_copied(tmp_path, tokenizer_file, tokenizer):
    shards = [
        write_shard(tmp_path / "shards" / "a.bin", [0, 100, 101, 0, 102]),
        write_shard(tmp_path / "shards" / "b.bin", [103, 104, 105, 0, 106]),
    ]
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in shards]
    dataset = describe_shards(tmp_path / "out", shards, tokenizer_file, tokenizer)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dataset.json", "stream.json"]
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in shards] == before
    facts = json.loads(dataset.read_text())
    assert (facts["documents"], facts["tokens"], facts["longest_document_tokens"]) == (3, 10, 5)
    stream = TokenStream.open(dataset)
    assert stream.read(3, 7).tolist() == [0, 102, 103, 104]
    stream.check_validation(9)
    page = describe(dataset, tokenizer)
    assert "documents        3" in page
    assert "longest document 5 tokens" in page


def damaged(path, change):
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path


def header_value(position, value):
    def change(content):
        content[4 * position : 4 * position + 4] = np.int32(value).tobytes()

    return change


def cut(content):
    del content[-2:]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (header_value(0, 20240521), "magic is 20240521, expected 20240520"),
        (header_value(1, 3), "version is 3, expected 1"),
        (header_value(2, 99), "expected 1,222 for the 99 tokens"),
        (header_value(2, -1), "for the -1 tokens"),
        (cut, "1,028 bytes, expected 1,030 for the 3 tokens of its header; it was cut"),
        (lambda content: content.__delitem__(slice(500, None)), "500 bytes, a token file's header alone has 1024"),
    ],
)
def test_a_shard_with_a_wrong_magic_version_or_count_is_named(tmp_path, tokenizer_file, tokenizer, change, told):
    good = write_shard(tmp_path / "a.bin", [0, 1, 2])
    bad = damaged(write_shard(tmp_path / "b.bin", [0, 1, 2]), change)
    with pytest.raises(UserError, match=rf"b\.bin: .*{told}"):
        describe_shards(tmp_path, [good, bad], tokenizer_file, tokenizer)
    assert not (tmp_path / "dataset.json").exists()


def test_an_id_beyond_the_vocabulary_is_told_with_the_shard(tmp_path, tokenizer_file, tokenizer):
    shard = write_shard(tmp_path / "a.bin", [0, 299, 300])
    with pytest.raises(UserError, match=r"a\.bin: token 300 is outside the tokenizer's vocabulary of 300"):
        describe_shards(tmp_path, [shard], tokenizer_file, tokenizer)


def test_shards_of_two_widths_are_no_stream(tmp_path, tokenizer_file, tokenizer):
    shards = [write_shard(tmp_path / "a.bin", [0, 1]), write_shard(tmp_path / "b.bin", [0, 1], WIDE)]
    with pytest.raises(UserError, match=r"b\.bin: uint32 tokens, .*a\.bin has uint16"):
        describe_shards(tmp_path, shards, tokenizer_file, tokenizer)


# --- hashes, once ---


def aged(path):
    """As if written a while ago: what has just changed is not remembered."""
    os.utime(path, ns=(10**18, 10**18))
    return path


def test_a_part_is_hashed_once_and_again_when_it_changes(tmp_path, tokenizer_file, tokenizer, monkeypatch):
    shards = [aged(write_shard(tmp_path / name, [0, 7, 8, 9])) for name in ("a.bin", "b.bin")]
    stream = TokenStream.open(describe_shards(tmp_path, shards, tokenizer_file, tokenizer))
    memory = tmp_path / "memory.json"
    hashed = []
    monkeypatch.setattr(files, "sha256_of", lambda path: hashed.append(path.name) or _sha256(path))
    stream.verify(memory)
    stream.verify(memory)
    assert hashed == ["a.bin", "b.bin"]
    damaged(shards[1], header_value(256, 1))
    with pytest.raises(UserError, match=r"b\.bin: sha256 is"):
        stream.verify(memory)
    assert hashed == ["a.bin", "b.bin", "b.bin"]


def _sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path):
    path = tmp_path / "a"
    path.write_text("new")
    files.remembered_sha256([path], tmp_path / "memory.json")
    assert not (tmp_path / "memory.json").exists()


def test_verify_reads_everything_whatever_the_times_say(tmp_path, tokenizer_file, tokenizer):
    shard = aged(write_shard(tmp_path / "a.bin", [0, 7, 8, 9]))
    dataset = describe_shards(tmp_path, [shard], tokenizer_file, tokenizer)
    assert "4 tokens, every part as it was made" in verify(dataset, tmp_path / "stream.json")
    aged(damaged(shard, header_value(256, 1)))
    with pytest.raises(UserError, match=r"a\.bin: sha256 is"):
        verify(dataset, tmp_path / "stream.json")


# --- large ---


def test_a_dataset_of_100_billion_tokens_opens_at_once_and_takes_no_memory(tmp_path):
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 100_000_000
    parts = []
    for number in range(1000):
        path = tmp_path / f"part-{number:05d}.bin"
        path.write_bytes(header.tobytes())
        os.truncate(path, 1024 + 200_000_000)
        parts.append({"file": path.name, "tokens": 100_000_000, "sha256": "0" * 64})
    facts = {"vocabulary_size": 50_257, "end_of_text": 50_256, "holdout_tokens": 10**11, "stream_sha256": "0" * 64}
    (tmp_path / "dataset.json").write_text(json.dumps(facts | {"parts": parts}))
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from attention_ablation.data.stream import TokenStream\n"
        "before = resource.getrusage(resource.RUSAGE_SELF)\n"
        "stream = TokenStream.open(Path(sys.argv[1]))\n"
        "stream.check_validation(100_000_000)\n"
        "opened = resource.getrusage(resource.RUSAGE_SELF)\n"
        "for start in range(0, stream.length - 3000, stream.length // 200): stream.read(start, start + 2049)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF)\n"
        "spent = opened.ru_utime + opened.ru_stime - before.ru_utime - before.ru_stime\n"
        "print(stream.length, spent, (after.ru_maxrss - before.ru_maxrss) / 1024)\n"
    )
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", script, str(tmp_path / "dataset.json")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    length, seconds, megabytes = (float(value) for value in printed.split())
    assert length == 10**11
    assert seconds < 1, "of processor time"
    assert megabytes < 50
