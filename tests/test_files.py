"""Files are whole or absent."""

import hashlib
import json

import pytest

from attention_ablation.files import replacing, sha256_of, write_json, write_text


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_temporary_file_keeps_the_suffix_and_is_hidden(tmp_path):
    with replacing(tmp_path / "figure.svg") as temporary:
        assert temporary.suffix == ".svg"
        assert temporary.name.startswith(".")
        temporary.write_text("x")


def test_folders_are_made(tmp_path):
    write_text(tmp_path / "a" / "b" / "c.txt", "x")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "x"


def test_json_keeps_order_and_refuses_what_is_not_a_number(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": 1, "a": "é"})
    assert list(json.loads(path.read_text())) == ["b", "a"]
    assert "é" in path.read_text()
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert list(json.loads(path.read_text())) == ["b", "a"]


def test_the_hash_is_of_the_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\0" * 3_000_000)
    assert sha256_of(path) == hashlib.sha256(b"\0" * 3_000_000).hexdigest()
