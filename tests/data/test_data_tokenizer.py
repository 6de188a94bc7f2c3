import json
import os
import subprocess
import sys
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ablation.data.index_corpus import index_corpus
from attention_ablation.data.sources import open_corpus
from attention_ablation.data.tokenizer import load_tokenizer, pieces
from attention_ablation.data.train_tokenizer import train_bpe
from attention_ablation.errors import UserError

# Whitespace, contractions and the end-of-text mark are where splitting rules and special tokens go wrong.
hard_text = st.lists(
    st.one_of(
        st.text(max_size=5),
        st.sampled_from(
            [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2028", "\x1c", "\x85", "a", "'s", "7", "é", "—"]
        ),
        st.sampled_from(["<|endoftext|>", "<|", "Ġ", "🜁"]),
    )
).map("".join)


def train(tmp_path, wheel, source, texts, *, parts=1, holdout_bytes=0, vocabulary_size=280):
    path = wheel(tmp_path / "c.whl", [(f"texts/{i}.md", text.encode()) for i, text in enumerate(texts)])
    corpus = open_corpus(source, [path])
    index_corpus(corpus, order="listed", parts=parts, output=tmp_path / "index.json")
    output = tmp_path / "tokenizer.json"
    train_bpe(
        corpus,
        tmp_path / "index.json",
        vocabulary_size=vocabulary_size,
        holdout_bytes=holdout_bytes,
        sample_bytes=10**9,
        output=output,
    )
    return output.read_bytes()


@settings(deadline=None)
@given(hard_text)
def test_any_text_comes_back_and_its_bytes_are_counted(tokenizer_file, text):
    tokenizer = load_tokenizer(tokenizer_file, "bpe")
    ids = tokenizer.encode([text])[0]
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text not in ids
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


@settings(deadline=None)
@given(hard_text, st.integers(1, 10))
def test_cutting_into_pieces_changes_no_token(tokenizer_file, text, size):
    tokenizer = load_tokenizer(tokenizer_file, "bpe")
    cut = list(pieces([text], size))
    assert "".join(cut) == text
    assert list(chain(*tokenizer.encode(cut))) == list(tokenizer.encode([text])[0])


def test_end_of_text_is_0_and_every_byte_has_a_token(tokenizer_file):
    tokenizer = load_tokenizer(tokenizer_file, "bpe")
    assert (tokenizer.end_of_text, tokenizer.vocabulary_size) == (0, 300)
    assert (tokenizer.token_bytes() == 1).sum() == 256


def test_tokenizer_does_not_depend_on_parts_processes_threads_or_hash_seed(tmp_path, wheel, source, prose):
    texts = [prose[:500], prose[500:2000], prose[2000:]]
    expected = train(tmp_path, wheel, source, texts, parts=1)
    assert train(tmp_path, wheel, source, texts, parts=3) == expected
    script = (
        "import sys; from pathlib import Path\n"
        "from attention_ablation.data.sources import WheelSource, open_corpus\n"
        "from attention_ablation.data.train_tokenizer import train_bpe\n"
        "folder = Path(sys.argv[1])\n"
        f"corpus = open_corpus({source!r}, [folder / 'c.whl'])\n"
        "train_bpe(corpus, folder / 'index.json', vocabulary_size=280,"
        " holdout_bytes=0, sample_bytes=10**9, output=folder / 'again.json')\n"
    )
    for seed, threads in [("0", "1"), ("1", "2"), ("2", "4")]:
        environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=True)
        assert (tmp_path / "again.json").read_bytes() == expected


def test_held_out_text_never_reaches_the_tokenizer(tmp_path, wheel, source, prose):
    secret = "zqzqzq " * 300
    held = train(tmp_path, wheel, source, [secret + "é", prose], holdout_bytes=len(secret) + 1)
    assert held == train(tmp_path, wheel, source, [prose])
    merges = json.loads(held)["model"]["merges"]
    assert ["z", "q"] not in merges
    told = train(tmp_path, wheel, source, [secret, prose], holdout_bytes=0)
    assert ["z", "q"] in json.loads(told)["model"]["merges"], "the test would pass whatever was held out"


def test_too_little_text_for_the_vocabulary_is_told_with_both_numbers(tmp_path, wheel, source):
    with pytest.raises(UserError, match=r"vocabulary_size is 400.* only gives 2\d\d tokens"):
        train(tmp_path, wheel, source, ["to be or not to be"], vocabulary_size=400)
    with pytest.raises(UserError, match=r"is 100, .* 257"):
        train(tmp_path, wheel, source, ["to be"], vocabulary_size=100)
    with pytest.raises(UserError, match=r"holdout_bytes is 9, .* 5 bytes"):
        train(tmp_path, wheel, source, ["to be"], holdout_bytes=9)
