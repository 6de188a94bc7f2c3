"""The Hugging Face source, against a folder with the hub's layout."""

import hashlib
from pathlib import Path

import pytest
from data.test_data_documents import write_parquet
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from attention_ablation.config import HuggingFaceSource as Settings
from attention_ablation.config import expand_ranges
from attention_ablation.data import fetch_corpus
from attention_ablation.data.fetch_corpus import fetch_hub_file
from attention_ablation.data.sources import HuggingFaceSource, open_corpus
from attention_ablation.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = "sample/10/000_00000.parquet"


class Hub(DirFileSystem):
    """Local files that fail when told, and know hashes when told."""

    def __init__(self, folder: Path) -> None:
        super().__init__(path=str(folder), fs=LocalFileSystem(), skip_instance_cache=True)
        self.fails_after = None
        self.sha256 = None
        self.read_from = []

    def info(self, path, **options):
        found = super().info(path, **options)
        return found | {"lfs": {"sha256": self.sha256, "size": found["size"]}} if self.sha256 else found

    def open(self, path, *modes, **options):
        file, hub = super().open(path, *modes), self

        class Remote:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

            def seek(self, position):
                hub.read_from.append(position)
                file.seek(position)

            def read(self, size):
                if hub.fails_after is not None and file.tell() >= hub.fails_after:
                    raise ConnectionResetError(104, "Connection reset by peer")
                return file.read(size)

        return Remote()


@pytest.fixture
def source():
    return HuggingFaceSource("owner/texts", COMMIT, (FILE, "sample/10/001_00000.parquet"))


@pytest.fixture
def hub(tmp_path, source, monkeypatch):
    monkeypatch.setattr(fetch_corpus, "BLOCK_BYTES", 1000)
    folder = tmp_path / "hub" / "datasets" / f"owner/texts@{COMMIT}"
    for number, file in enumerate(source.files):
        write_parquet(folder / file, [f"{number} {row} " * 100 for row in range(20)])
    return Hub(tmp_path / "hub")


def fetch(source, hub, tmp_path, file=FILE):
    fetch_hub_file(source, file, tmp_path / "out" / file, downloads=tmp_path / "downloads", hub=hub)
    return tmp_path / "out" / file


def test_files_are_fetched_whole_and_read_in_the_order_of_the_study(tmp_path, source, hub):
    fetched = [fetch(source, hub, tmp_path, file) for file in source.files]
    corpus = open_corpus(source, fetched)
    texts = ["".join(document.chunks)[:4].split() for unit in corpus.units() for document in corpus.documents(unit)]
    assert texts == [[str(number), str(row)] for number in range(2) for row in range(20)]
    assert list((tmp_path / "downloads").iterdir()) == []


def test_a_download_that_was_cut_goes_on_where_it_stood(tmp_path, source, hub):
    hub.fails_after = 2000
    with pytest.raises(UserError, match=r"000_00000\.parquet: could not be downloaded \(Connection reset by peer\)"):
        fetch(source, hub, tmp_path)
    assert not (tmp_path / "out").exists()
    hub.fails_after = None
    fetched = fetch(source, hub, tmp_path)
    assert hub.read_from == [0, 2000]
    assert fetched.read_bytes() == next((tmp_path / "hub").rglob("000_00000.parquet")).read_bytes()


def test_a_file_with_another_hash_than_the_hubs_is_refused_and_not_kept(tmp_path, source, hub):
    hub.sha256 = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(UserError, match=f"sha256 is [0-9a-f]{{64}}, the hub's is {hub.sha256}"):
        fetch(source, hub, tmp_path)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "downloads").iterdir()) == []


def test_a_file_that_the_hub_does_not_have_is_told(tmp_path, source, hub):
    with pytest.raises(UserError, match=r"datasets/owner/texts@0123.*/none\.parquet: not on the hub; check"):
        fetch(source, hub, tmp_path, "none.parquet")


def test_no_network_is_one_line(tmp_path, source, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    import huggingface_hub

    unreachable = huggingface_hub.HfFileSystem(endpoint="http://127.0.0.1:9", skip_instance_cache=True)
    with pytest.raises(UserError, match=r"could not be downloaded \(.*\); check the network") as caught:
        fetch_hub_file(source, FILE, tmp_path / "a", downloads=tmp_path / "downloads", hub=unreachable)
    assert "\n" not in str(caught.value)


def settings_of(**changes):
    fields = {"kind": "hugging_face", "repository": "a/b", "revision": COMMIT, "files": ["{00..01}.parquet"]}
    return Settings.model_validate(fields | changes)


def test_ranges_stand_for_every_number_as_wide_as_the_first():
    assert expand_ranges(["a{08..11}_{0..1}.parquet", "b"]) == [
        *(f"a{number}_{minor}.parquet" for number in ("08", "09", "10", "11") for minor in (0, 1)), "b",
    ]  # fmt: skip
    assert settings_of(path="/x/").file_names == ["x/00.parquet", "x/01.parquet"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"revision": "main"}, "a commit of 40 hex digits is wanted"),
        ({"files": ["../a.parquet"]}, "no name of a Parquet file"),
        ({"files": ["a b.parquet"]}, "no name of a Parquet file"),
        ({"files": ["a.csv"]}, "no name of a Parquet file"),
        ({"repository": "a"}, "should match pattern"),
    ],
)
def test_a_branch_and_a_strange_name_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        settings_of(**changes)
