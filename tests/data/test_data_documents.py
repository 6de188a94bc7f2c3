"""Documents out of local files: formats, boundaries, and every way in which a file can be wrong."""

import gzip
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ablation.data import documents, json_text, sources, tokenize
from attention_ablation.data.documents import read_json_lines, read_separated_text
from attention_ablation.data.index_corpus import IndexedUnit, index_corpus, read_index
from attention_ablation.data.sources import FilesSource, open_corpus
from attention_ablation.data.stream import TokenStream
from attention_ablation.data.token_files import TokenFileWriter
from attention_ablation.data.tokenizer import load_tokenizer
from attention_ablation.errors import UserError

RUNS = settings(max_examples=40, deadline=None)
any_text = st.text(max_size=40) | st.sampled_from(["", "a <|endoftext|> b", "\r\n", "\ufeff", 'say "\\n"', "🜁é" * 9])


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    return pa.compress(content, codec="zstd", asbytes=True) if suffix == ".zst" else content


def write_jsonl(path: Path, texts, *, ascii_only=True) -> Path:
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=ascii_only) for text in texts]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compressed("\n".join(lines).encode(), path.suffix))
    return path


def write_parquet(path: Path, texts, *, rows: int = 3, kind=None, name="text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(len(texts)), name: pa.array(texts, kind)}), path, row_group_size=rows)
    return path


def texts_of(*paths, **options) -> list[str | None]:
    """Text of every document, None for a null row, in listed order."""
    corpus = open_corpus(FilesSource(tuple(map(str, paths)), **options), [])
    return [
        None if document is None else "".join(document.chunks)
        for unit in corpus.units()
        for document in corpus.documents(unit)
    ]


# --- any documents, any cut, the same documents ---


@RUNS
@given(st.lists(any_text, min_size=1, max_size=12), st.integers(1, 200), st.booleans())
def test_any_byte_ranges_give_each_json_line_once(texts, unit, ascii_only):
    with TemporaryDirectory() as folder:
        path = write_jsonl(Path(folder) / "a.jsonl", texts, ascii_only=ascii_only)
        size = path.stat().st_size
        found = []
        for start in range(0, size, unit):
            stop = min(size, start + unit)
            found += read_json_lines(path, None, start, stop, field="text", errors="strict")
        assert ["".join(document.chunks) for document in found] == texts


@RUNS
@given(
    st.lists(st.sampled_from(["---\n", "---\r\n", "--\n", "a\n", "é\r\n", "\n", "----\n"]), max_size=30),
    st.integers(1, 40),
)
def test_any_byte_ranges_give_each_separated_document_once(lines, unit):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_bytes("".join(lines).encode())
        size = path.stat().st_size
        found = []
        for start in range(0, size, unit):
            for document in read_separated_text(
                path, None, start, min(size, start + unit), separator="---", errors="strict"
            ):
                found.append("".join(document.chunks))
        expected = [[]]
        for line in lines:
            if line.rstrip("\r\n") == "---":
                expected.append([])
            else:
                expected[-1].append(line)
        assert found == ["".join(document) for document in expected if document]


@RUNS
@given(st.data())
def test_any_number_of_parts_of_any_files_gives_the_same_stream(make_of, tokenizer_file, data):
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "UNIT_BYTES", 50)
        folder = Path(name)
        suffix = data.draw(st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".md"]))
        files = data.draw(st.lists(st.lists(any_text, min_size=1, max_size=6), min_size=1, max_size=3))
        files.append(["so that there is some text"])
        for number, texts in enumerate(files):
            path = folder / f"{number}{suffix}"
            if suffix == ".parquet":
                write_parquet(path, texts)
            elif suffix == ".md":
                files[number] = [texts[0].removeprefix("\ufeff")]
                path.write_bytes(texts[0].encode())
            else:
                write_jsonl(path, texts)
        corpus = open_corpus(FilesSource((f"{folder}/*{suffix}",)), [])
        parts = data.draw(st.integers(1, len(corpus.units())))
        order = data.draw(st.sampled_from(["listed", "shuffled"]))
        one = make_of(corpus, folder / "out", parts=1, order=order)
        several = make_of(
            corpus, folder / "out", parts=parts, order=order, threads=2, batch_bytes=data.draw(st.integers(1, 99))
        )
        streams = [TokenStream.open(made.dataset) for made in (one, several)]
        tokens = streams[0].read(0, streams[0].length)
        assert streams[0].sha256 == streams[1].sha256
        assert (tokens == streams[1].read(0, streams[1].length)).all()
        tokenizer = load_tokenizer(tokenizer_file, "bpe")
        cuts = [*np.flatnonzero(tokens == tokenizer.end_of_text), len(tokens)]
        decoded = [tokenizer.decode(tokens[start + 1 : stop]) for start, stop in pairwise(cuts)]
        expected = [text for texts in files for text in texts]
        if order == "listed":
            assert decoded == expected
        assert sorted(decoded) == sorted(expected)
        facts = json.loads(one.dataset.read_text())
        assert (facts["documents"], facts["bytes"]) == (len(expected), len("".join(expected).encode()))
        assert facts["longest_document_bytes"] == max(len(text.encode()) for text in expected)


@RUNS
@given(any_text, st.text(max_size=5), st.integers(24, 60), st.booleans())
def test_a_long_json_line_is_read_like_a_short_one(text, other, chunk, ascii_only):
    value = {"a": [{"text": other}, 1.5], other: other, "text": text, "z": {"text": None, "b": [other]}}
    line = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_text, "CHUNK_BYTES", max(chunk, len(json.dumps(other)) + 2))
        start, stop = json_text.find_string(line, "text")
        assert "".join(json_text.string_chunks(line, start, stop, "strict")) == value["text"]


def test_a_document_longer_than_any_buffer_comes_back(tmp_path, monkeypatch, make_of, tokenizer_file):
    monkeypatch.setattr(documents, "LONG_LINE_BYTES", 1000)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(json_text, "CHUNK_BYTES", 5000)
    text = "".join(chr(97 + i % 26) if i % 7 else "é🜁 \n"[i % 4] for i in range(200_000)) + "\U0001f600" * 3000
    write_jsonl(tmp_path / "a.jsonl", ["before", text, "after"])
    write_parquet(tmp_path / "b.parquet", ["before", text, "after"])
    (tmp_path / "c.txt").write_text(text)
    assert texts_of(tmp_path / "*") == ["before", text, "after"] * 2 + [text]
    corpus = open_corpus(FilesSource((f"{tmp_path}/c.txt",)), [])
    stream = TokenStream.open(make_of(corpus, tmp_path / "out", batch_bytes=1000, threads=2).dataset)
    assert load_tokenizer(tokenizer_file, "bpe").decode(stream.read(1, stream.length)) == text


# --- boundaries and stated treatments ---


def test_line_ends_marks_and_empty_documents(tmp_path, make_of):
    (tmp_path / "crlf.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "a\\r\\nb"}\r\n\r\n{"text": ""}\r\n  \n{"text": "no newline"}'
    )
    (tmp_path / "crlf.txt").write_bytes(b"\xef\xbb\xbfa\r\nb")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert texts_of(tmp_path / "*") == ["a\r\nb", "", "no newline", "a\r\nb", ""]
    facts = json.loads(
        make_of(open_corpus(FilesSource((f"{tmp_path}/*",)), []), tmp_path / "out").dataset.read_text()
    )
    assert facts["documents"] == 5


def test_null_rows_are_no_documents_and_are_counted(tmp_path, make_of):
    write_parquet(tmp_path / "a.parquet", ["a", None, "b", None])
    (tmp_path / "b.jsonl").write_text('{"text": null}\n{"text": "c"}\n')
    assert texts_of(tmp_path / "*") == ["a", None, "b", None, None, "c"]
    made = make_of(open_corpus(FilesSource((f"{tmp_path}/*",)), []), tmp_path / "out")
    facts = json.loads(made.dataset.read_text())
    assert (facts["documents"], facts["null_rows"]) == (3, 3)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_kind_of_text_column_is_read(tmp_path, kind):
    texts = ["é", "", None, "b" * 3000]
    write_parquet(
        tmp_path / "a.parquet", texts if kind != pa.binary() else [t and t.encode() for t in texts], kind=kind
    )
    assert texts_of(tmp_path / "a.parquet") == texts


def test_a_path_with_spaces_and_other_letters(tmp_path):
    folder = tmp_path / "mein Körper 語"
    write_jsonl(folder / "a b.jsonl", ["x"])
    (folder / "é.md").write_text("y")
    assert texts_of(folder / "*") == ["x", "y"]


def test_a_large_file_is_cut_and_its_parts_are_about_equal(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [f"{i:080}" for i in range(1000)])
    write_parquet(tmp_path / "b.parquet", [f"{i:080}" for i in range(1000)], rows=10)
    monkeypatch.setattr(sources, "UNIT_BYTES", 1000)
    for name in ("a.jsonl", "b.parquet"):
        corpus = open_corpus(FilesSource((f"{tmp_path}/{name}",)), [])
        index_corpus(corpus, order="listed", parts=4, output=tmp_path / "index.json")
        held = [0] * 4
        for indexed in read_index(tmp_path / "index.json"):
            held[indexed.part] += indexed.unit.bytes
        assert max(held) < 1.1 * min(held)


def test_the_index_of_a_large_corpus_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "size_of", lambda path: 10**12)
    (tmp_path / "a.jsonl").write_bytes(b"")
    index_corpus(
        open_corpus(FilesSource((f"{tmp_path}/*",)), []), order="shuffled", parts=64, output=tmp_path / "i.json"
    )
    assert (tmp_path / "i.json").stat().st_size < 4_000_000


# --- what is wrong, told in one line ---


GZIP = gzip.compress(b'{"text": "abc"}\n' * 1000)
ZSTD = pa.compress(b'{"text": "abc"}\n' * 1000, codec="zstd", asbytes=True)
GOOD = b'{"text": "a"}\n'
MISTAKES = [
    ("a.txt", b"abc\xffd", r"a\.txt: not UTF-8 at byte 3 \(invalid start byte\); .*errors: replace"),
    ("a.txt", b"x" * 2_000_000 + b"\xe4\xb8", r"a\.txt: not UTF-8 at byte 2000000 \(unexpected end"),
    ("a.jsonl", GOOD + b'{"text": "b\xff"}\n', r"a\.jsonl: line 2: not UTF-8 at byte 25"),
    ("a.jsonl", GOOD * 2 + b"{'text': 1}\n", r"a\.jsonl: line 3: not JSON \(Expecting property name"),
    ("a.jsonl", GOOD + b'{"text": "cut', r"a\.jsonl: line 2: not JSON \(Unterminated string"),
    ("a.jsonl", GOOD + b'{"content": "b", "id": 1}\n', r"a\.jsonl: line 2: no field 'text'; it has content, id"),
    ("a.jsonl", GOOD + b'{"text": ["b"]}\n', r"a\.jsonl: line 2: field 'text' is of type list, text is wanted"),
    ("a.jsonl", GOOD + b'"text"\n', r"a\.jsonl: line 2: a JSON object is wanted, found str"),
    ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', r"a\.jsonl: line 2: character 0 of the text is half of one"),
    ("a.jsonl", b"[" * 100_000 + b"\n", r"a\.jsonl: line 1: "),
    ("a.jsonl.gz", GZIP[:-9], r"a\.jsonl\.gz: the gzip file ends early or is damaged"),
    ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz: the gzip file ends early or is damaged"),
    ("a.jsonl.zst", ZSTD[:-5], r"a\.jsonl\.zst: the zstd file ends early or is damaged"),
    ("a.txt.gz", GZIP[: len(GZIP) // 2], r"a\.txt\.gz: the gzip file ends early or is damaged"),
    ("a.parquet", b"PAR1 and no more", r"a\.parquet: not a whole Parquet file"),
    ("a.parquet", b"", r"a\.parquet: not a whole Parquet file"),
    ("a.json", b"{}", r"a\.json: \.json is no known format; known are \.txt"),
    ("a.parquet.gz", b"", r"a\.parquet\.gz: \.parquet\.gz is no known format"),
]


@pytest.mark.parametrize(("name", "content", "told"), MISTAKES, ids=[f"{n} {t[-40:]}" for n, _, t in MISTAKES])
def test_what_is_wrong_with_a_file_is_told_with_its_place(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told) as caught:
        texts_of(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        (b'", "id": 1', "not JSON"),
        (b'\\q"}', r"not JSON \(Invalid .escape"),
        (b'\xff"}', "not UTF-8 at byte"),
        (b'\\udc00"}', "half of one"),
        (b'", "text": 3}', "is of type int"),
    ],
)
def test_what_is_wrong_with_a_long_line_is_told_before_any_of_it_is_used(tmp_path, monkeypatch, tail, told):
    monkeypatch.setattr(documents, "LONG_LINE_BYTES", 50)
    monkeypatch.setattr(json_text, "CHUNK_BYTES", 20)
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"text": "' + b"long " * 100 + tail + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl: line 2: .*{told}"):
        texts_of(tmp_path / "a.jsonl")


def test_bytes_that_are_not_utf8_are_replaced_when_asked(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\xff\xe4")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "b\xff\\ud800"}\n')
    write_parquet(tmp_path / "c.parquet", [b"c\xff"], kind=pa.binary())
    assert texts_of(tmp_path / "*", errors="replace") == ["a\ufffd\ufffd", "b\ufffd\ufffd", "c\ufffd"]
    with pytest.raises(UserError, match=r"c\.parquet: row 0 .*: not UTF-8 at byte 1"):
        texts_of(tmp_path / "c.parquet")


def test_a_parquet_file_without_the_column_or_with_another_type_in_it(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"], name="content")
    with pytest.raises(
        UserError, match=r"a\.parquet: no column 'text'; it has id, content: set data\.source\.text_field"
    ):
        texts_of(tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet", text_field="content") == ["x"]
    with pytest.raises(UserError, match=r"column 'id' is of type int64, text is wanted"):
        texts_of(tmp_path / "a.parquet", text_field="id")


def test_a_parquet_file_cut_in_its_data_is_told(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [str(i) * 500 for i in range(50)])
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: not a whole Parquet file"):
        texts_of(path)


def test_a_pattern_without_a_file_is_told_with_the_folder_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"no file matches 'corpus/\*\.jsonl' in {tmp_path}"):
        texts_of("corpus/*.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.jsonl.gz"])
def test_a_file_that_vanished_after_it_was_indexed_is_told(tmp_path, name, make_of):
    path = tmp_path / name
    write_parquet(path, ["x"]) if name.endswith("parquet") else write_jsonl(path, ["x"])
    corpus = open_corpus(FilesSource((f"{tmp_path}/a.*",)), [])
    units = corpus.units()
    path.unlink()
    with pytest.raises(UserError, match=rf"{name}: the file is gone"):
        list(corpus.documents(units[0]))
    (tmp_path / "a.md").write_text("another")
    with pytest.raises(UserError, match=rf"{name}: in the index, but no longer"):
        list(open_corpus(FilesSource((f"{tmp_path}/a.*",)), []).documents(units[0]))


def test_an_empty_corpus_is_told(tmp_path, make_of):
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="the corpus is empty, its files hold no document"):
        make_of(open_corpus(FilesSource((f"{tmp_path}/*.jsonl",)), []), tmp_path / "out")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": ""}\n\n{"text": null}')
    with pytest.raises(UserError, match="the corpus is empty, 1 documents without text"):
        make_of(open_corpus(FilesSource((f"{tmp_path}/*.jsonl",)), []), tmp_path / "out")


def test_a_disk_that_fills_is_told_and_leaves_nothing(tmp_path):
    script = (
        "import resource, signal, sys; from pathlib import Path; import numpy as np\n"
        "from attention_ablation.data.token_files import TokenFileWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "with TokenFileWriter.create(Path(sys.argv[1])) as writer:\n"
        "    for _ in range(100): writer.write(np.ones(10_000, np.uint16))\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.bin")], capture_output=True, text=True)
    assert "UserError" in run.stderr.splitlines()[-1]
    assert f"{tmp_path / 'a.bin'}: could not be written (File too large); free some space" in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_space_left_is_told(tmp_path):
    with (
        pytest.raises(UserError, match=r"a\.bin: could not be written \(No space left on device\)"),
        TokenFileWriter.create(tmp_path / "a.bin"),
    ):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_a_run_of_bytes_that_are_no_characters_ends(monkeypatch, errors):
    monkeypatch.setattr(json_text, "CHUNK_BYTES", 64)
    line = b'"' + b"a" * 100 + b"\x80" * 200 + b'"'
    chunks = json_text.string_chunks(line, 1, len(line) - 1, errors)
    if errors == "strict":
        with pytest.raises(UnicodeDecodeError):
            list(chunks)
    else:
        assert "".join(chunks) == "a" * 100 + "\ufffd" * 200


@pytest.mark.parametrize("unit_bytes", [1, 3, 6, 12, 1000])
def test_a_separator_at_the_edge_of_a_unit_loses_no_document(tmp_path, unit_bytes):
    path = tmp_path / "a.txt"
    path.write_bytes(b"aaaa\n---\r\nbbbb\n---\r\r\r\nmore\n---\ncccc\n")
    size = path.stat().st_size
    found = []
    for start in range(0, size, unit_bytes):
        stop = start + unit_bytes if start + unit_bytes < size else None
        read = documents.read_separated_text(path, None, start, stop, separator="---", errors="strict")
        found += ["".join(document.chunks) for document in read]
    assert found == ["aaaa\n", "bbbb\n---\r\r\r\nmore\n", "cccc\n"]


def test_a_batch_of_empty_documents_is_bounded(tmp_path, tokenizer_file):
    write_jsonl(tmp_path / "a.jsonl", [""] * 1000)
    source = FilesSource((str(tmp_path / "a.jsonl"),), "text", None, "strict")
    corpus = open_corpus(source, [])
    units = [IndexedUnit(unit, 0) for unit in corpus.units()]
    counts = tokenize.Counts()
    batches = list(tokenize._batches(corpus, load_tokenizer(tokenizer_file, "bpe"), units, counts, 2000, None))
    assert counts.documents == sum(map(len, batches)) == 1000
    assert max(map(len, batches)) <= 2000 // tokenize.PIECE_BYTES
