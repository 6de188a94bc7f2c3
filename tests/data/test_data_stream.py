import hashlib
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ablation.data.dataset import build_dataset
from attention_ablation.data.stream import TokenStream
from attention_ablation.data.token_files import TokenFileWriter, map_tokens, read_header
from attention_ablation.data.tokenizer import load_tokenizer
from attention_ablation.errors import UserError


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=30) | st.just("a <|endoftext|> b"), min_size=1, max_size=6), st.data())
def test_any_number_of_parts_gives_the_same_stream(make, tokenizer_file, texts, data):
    parts = data.draw(st.integers(1, len(texts)))
    with TemporaryDirectory() as folder:
        texts = [*texts, "some text so that there is a token"]
        one = make(Path(folder), texts, parts=1)
        written = one.stream.stat().st_ino
        several = make(Path(folder), texts, parts=parts)
        assert several.stream.stat().st_ino == written, "the same stream was written again"
        streams = [TokenStream.open(made.dataset) for made in (one, several)]
        assert streams[0].length == streams[1].length
        assert streams[0].sha256 == streams[1].sha256 == json.loads(one.stream.read_text())["sha256"]
        tokens = streams[1].read(0, streams[1].length)
        assert (tokens == streams[0].read(0, streams[0].length)).all()
        assert hashlib.sha256(tokens.tobytes()).hexdigest() == streams[0].sha256
        tokenizer = load_tokenizer(tokenizer_file, "bpe")
        assert tokens[0] == tokenizer.end_of_text
        cuts = np.flatnonzero(tokens == tokenizer.end_of_text)
        assert sorted(tokenizer.decode(piece[1:]) for piece in np.split(tokens, cuts)[1:]) == sorted(texts)


def test_a_read_may_straddle_parts(tmp_path, make, prose):
    made = make(tmp_path, [prose[:300], prose[300:310], prose[310:900]], parts=3)
    stream = TokenStream.open(made.dataset)
    whole = np.concatenate([map_tokens(part) for part in made.parts])
    for start in range(0, stream.length, 7):
        for stop in (start, start + 1, min(stream.length, start + 150), stream.length):
            assert (stream.read(start, max(start, stop)) == whole[start : max(start, stop)]).all()
    with pytest.raises(IndexError):
        stream.read(0, stream.length + 1)


def test_a_changed_part_is_found_and_named(tmp_path, make, prose):
    made = make(tmp_path, [prose[:500], prose[500:900]], parts=2)
    TokenStream.open(made.dataset).verify()
    content = bytearray(made.parts[1].read_bytes())
    content[-1] ^= 1
    made.parts[1].write_bytes(content)
    with pytest.raises(UserError, match=r"part-00001\.bin: sha256"):
        TokenStream.open(made.dataset).verify()


def test_a_truncated_missing_or_swapped_part_is_refused_on_opening(tmp_path, make, prose):
    made = make(tmp_path, [prose[:500], prose[500:900]], parts=2)
    content = made.parts[1].read_bytes()
    made.parts[1].write_bytes(content[:-2])
    with pytest.raises(UserError, match=r"part-00001\.bin: [\d,]+ bytes, expected"):
        TokenStream.open(made.dataset)
    made.parts[1].write_bytes(made.parts[0].read_bytes())
    with pytest.raises(UserError, match=r"part-00001\.bin: [\d,]+ tokens, dataset\.json says"):
        TokenStream.open(made.dataset)
    made.parts[1].unlink()
    with pytest.raises(UserError, match=r"part-00001\.bin: no such"):
        TokenStream.open(made.dataset)


def test_token_file_is_the_format_of_the_llm_c_family(tmp_path):
    with TokenFileWriter.create(tmp_path / "a.bin") as writer:
        writer.write([1, 2])
        writer.write(np.array([65_535], dtype=np.int64))
    content = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(content[:1024], "<i4").tolist() == [20240520, 1, 3] + [0] * 253
    assert content[1024:] == b"\x01\x00\x02\x00\xff\xff"


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, 7, r"magic is 7, expected 20240520 \(uint16\) or 20240801 \(uint32\)"),
        (1, 2, "version is 2, expected 1"),
        (2, 9, "expected 1,042 for the 9"),
    ],
)
def test_another_kind_of_token_file_is_refused_with_both_values(tmp_path, position, value, message):
    path = tmp_path / "a.bin"
    with TokenFileWriter.create(path) as writer:
        writer.write([1, 2, 3])
    content = np.frombuffer(path.read_bytes()[:1024], "<i4").copy()
    content[position] = value
    path.write_bytes(content.tobytes() + path.read_bytes()[1024:])
    with pytest.raises(UserError, match=rf"a\.bin: .*{message}"):
        read_header(path)


@pytest.mark.parametrize("number", [65_536, -1])
def test_a_token_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path, number):
    with (
        pytest.raises(UserError, match=f"token id {number:,} does not fit"),
        TokenFileWriter.create(tmp_path / "a.bin") as writer,
    ):
        writer.write([0, number])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("parts", [1, 2])
def test_validation_past_the_holdout_is_refused_with_both_numbers(tmp_path, make, tokenizer_file, prose, parts):
    stream = TokenStream.open(make(tmp_path / "a", [prose[:500], prose[500:900]], parts=1).dataset)
    covered = int(load_tokenizer(tokenizer_file, "bpe").token_bytes()[stream.read(0, 100)].sum())
    for holdout_bytes, holdout_tokens in ((covered, 100), (covered - 1, 99)):
        made = make(
            tmp_path / str(holdout_bytes), [prose[:500], prose[500:900]], holdout_bytes=holdout_bytes, parts=parts
        )
        stream = TokenStream.open(made.dataset)
        assert stream.holdout_tokens == holdout_tokens
        stream.check_validation(holdout_tokens)
        with pytest.raises(UserError, match=rf"is {holdout_tokens + 1}, .* after the first {holdout_tokens} tokens"):
            stream.check_validation(holdout_tokens + 1)


def test_validation_that_leaves_nothing_to_train_on_is_refused(tmp_path, make, prose):
    stream = TokenStream.open(make(tmp_path, [prose[:500]], holdout_bytes=10_000).dataset)
    with pytest.raises(UserError, match="leave some to train on"):
        stream.check_validation(stream.length)


def test_part_of_another_corpus_is_refused(tmp_path, make, tokenizer_file, prose):
    made = make(tmp_path / "a", [prose[:500]])
    other = make(tmp_path / "b", [prose[:600]])
    other.parts[0].replace(made.parts[0])
    with pytest.raises(UserError, match=r"part-00000\.bin: 1 documents of \d+ bytes .* there were 1 of"):
        build_dataset(
            made.parts,
            made.tokenizer,
            load_tokenizer(tokenizer_file, "bpe"),
            counts=made.counts,
            source_info={},
            holdout_bytes=0,
            dataset_output=made.dataset,
            stream_output=made.stream,
        )


def test_memory_of_tokenizing_does_not_grow_with_the_corpus(tmp_path, wheel, source, tokenizer_file, prose):
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from attention_ablation.data.sources import WheelSource, open_corpus\n"
        "from attention_ablation.data.tokenizer import load_tokenizer\n"
        "from attention_ablation.data.index_corpus import index_corpus\n"
        "from attention_ablation.data.tokenize import tokenize_part\n"
        f"folder, tokenizer = Path(sys.argv[1]), load_tokenizer(Path({str(tokenizer_file)!r}), 'bpe')\n"
        f"corpus, index = open_corpus({source!r}, [folder / 'corpus.whl']), folder / 'index.json'\n"
        "index_corpus(corpus, order='listed', parts=1, output=index)\n"
        "tokenize_part(corpus, index, tokenizer, part=0, output=folder / 'part.bin',"
        " counts_output=folder / 'part.json', threads=1, batch_bytes=262144)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    document = (prose * 100)[:300_000].encode()
    peaks = []
    for count in (2, 20):
        folder = tmp_path / str(count)
        wheel(folder / "corpus.whl", [(f"texts/{number}.md", document) for number in range(count)])
        # A child's peak starts at the size of the process it was forked from, so a small one is in between.
        command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", script, str(folder)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks.append(int(printed))
    assert peaks[1] < 1.2 * peaks[0]
