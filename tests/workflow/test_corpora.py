"""Corpora of the user's own through the real workflow: exactly the work that a change of them implies."""

import gzip
import json
import shutil

import numpy as np
import pytest
import yaml
from workflow.snakemake_runs import ROOT, planned, snakemake, write_study

from attention_ablation.data.token_files import TokenFileWriter

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "naïve", "日本", "don't", "look", "1,024"]


def documents(count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, size=random.integers(1, 300))) + ".\n" for _ in range(count)]


def write_corpus(folder, count: int = 120):
    folder.mkdir(parents=True)
    lines = [json.dumps({"body": text}) + "\n" for text in documents(count, 0)]
    (folder / "a 1.jsonl").write_text("".join(lines[:50]))
    (folder / "é.jsonl").write_text("".join(lines[50:80]))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[80:]).encode()))


FILES = {"kind": "files", "paths": ["my texts/*.jsonl", "my texts/*.gz"], "text_field": "body", "name": "mine"}
BPE = {"kind": "bpe", "vocabulary_size": 280, "holdout_bytes": 20_000}


def study_of(directory, source=FILES, tokenizer=BPE, **changes):
    study = write_study(directory / "study.yaml", **changes)
    tree = yaml.safe_load(study.read_text())
    tree["data"] |= {"source": source, "tokenizer": tokenizer}
    tree["training"] |= {"tokens": 5_120, "epochs": "allow"}
    del tree["variants"]["MLRA-2"]
    study.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    return str(study)


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder, its name with a space, in which a study of JSON lines has run."""
    directory = tmp_path_factory.mktemp("a folder") / "with spaces"
    write_corpus(directory / "my texts")
    result = snakemake(directory, "--configfile", study_of(directory))
    assert result.returncode == 0, result.stdout
    return directory


def plan(directory, **environment):
    return planned(directory, "--configfile", str(directory / "study.yaml"), **environment)


def test_a_study_of_a_folder_of_json_lines_runs_to_its_figure(mine):
    assert (mine / "figures" / "smoke.svg").stat().st_size > 0
    (dataset,) = (mine / "results" / "data").glob("mine-*/dataset.json")
    facts = json.loads(dataset.read_text())
    assert facts["documents"] == 120
    assert facts["bytes"] == sum(len(text.encode()) for text in documents(120, 0))
    assert len(facts["parts"]) == 2
    assert not (mine / "results" / "corpus").exists()


def test_nothing_is_to_do_again_when_files_are_touched_or_the_checkout_is_moved(mine, tmp_path):
    assert plan(mine) == {}
    for path in (mine / "my texts").iterdir():
        path.touch()
    assert plan(mine) == {}
    moved = tmp_path / "elsewhere"
    shutil.copytree(mine, moved)
    assert plan(moved) == {}


def test_a_changed_file_makes_everything_again(mine, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(mine, changed)
    path = changed / "my texts" / "a 1.jsonl"
    path.write_text(path.read_text().replace("fox", "cat"))
    jobs = plan(changed)
    assert {"index_corpus", "train_tokenizer", "tokenize", "dataset", "train", "evaluate"} <= set(jobs)


def test_a_file_that_is_gone_is_told_before_the_dag(tmp_path):
    result = snakemake(tmp_path, "--dry-run", "--configfile", study_of(tmp_path))
    assert result.returncode != 0
    assert "data.source.paths: no file matches 'my texts/*.jsonl' in" in result.stdout
    assert "Job stats" not in result.stdout


def test_a_bad_line_stops_its_part_with_one_line_and_the_rest_is_kept(tmp_path):
    write_corpus(tmp_path / "my texts")
    with (tmp_path / "my texts" / "é.jsonl").open("a") as file:
        file.write("{half a line")
    result = snakemake(tmp_path, "--configfile", study_of(tmp_path, tokenizer=BPE | {"sample_bytes": 1}))
    assert result.returncode != 0
    assert "é.jsonl: line 31: not JSON" in result.stdout


def test_token_shards_are_used_in_place_with_a_tokenizer_from_a_file(tmp_path, mine):
    random = np.random.default_rng(0)
    for number in range(3):
        with TokenFileWriter.create(tmp_path / "shards" / f"shard_{number}.bin") as writer:
            writer.write(np.where(random.random(6000) < 0.01, 0, random.integers(1, 280, 6000)))
    shutil.copy(next((mine / "results" / "data").glob("*/tokenizer.json")), tmp_path / "tokenizer.json")
    study = study_of(
        tmp_path,
        source={"kind": "token_shards", "paths": ["shards/*.bin"]},
        tokenizer={"kind": "file", "path": "tokenizer.json", "vocabulary_size": 280},
    )
    jobs = planned(tmp_path, "--configfile", study)
    assert {"train_tokenizer": 1, "dataset": 1, "train": 2}.items() <= jobs.items()
    assert not {"fetch_corpus", "index_corpus", "tokenize"} & set(jobs)
    result = snakemake(tmp_path, "--configfile", study, "--until", "dataset")
    assert result.returncode == 0, result.stdout
    (dataset,) = (tmp_path / "results" / "data").glob("*/dataset.json")
    assert json.loads(dataset.read_text())["tokens"] == 18_000
    assert list((tmp_path / "results").rglob("*.bin")) == []


def test_the_papers_study_shows_every_job_without_a_network(tmp_path):
    jobs = planned(tmp_path, "--configfile", str(ROOT / "workflow" / "presets" / "paper.yaml"))
    assert (jobs["fetch_corpus"], jobs["fetch_vocabulary"], jobs["tokenize"], jobs["train"]) == (140, 1, 64, 6)
