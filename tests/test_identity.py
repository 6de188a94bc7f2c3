"""Digests: what must change them, what must not."""

import ast
import io
import os
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from attention_ablation import identity
from attention_ablation.errors import UserError
from attention_ablation.study import load_study

ROOT = Path(__file__).parent.parent


def study(**overrides):
    return load_study([ROOT / "config.yaml"], overrides)


NO_RUN = [
    {"figure": {"title": "other", "y": "symlog", "formats": ["svg"]}},
    {"variants": {"MLA": {"color": "#000000"}}},
    {"statistics": {"confidence": 0.9, "blocks": 40}},
    {"evaluation": {"tokens": 16_384, "precision": "bfloat16", "batch": 3}},
    {"execution": {"threads": 2, "micro_batch": 1, "device": "cpu", "autosave_minutes": 1, "attention": "reference"}},
    {"comparisons": [{"name": "swapped", "baseline": "unscaled", "treatment": "scaled"}]},
    {"data": {"parts": 5, "source": {"license": "other"}}},
    {"study": "other"},
    {"training": {"epochs": "allow"}},
]


@pytest.mark.parametrize("overrides", NO_RUN, ids=str)
def test_what_does_not_define_a_run_keeps_every_run(overrides):
    assert identity.runs(study(**overrides)) == identity.runs(study())


ALL_RUNS = [
    {"training": {"learning_rate": 1e-3}},
    {"training": {"tokens": 204_800}},
    {"training": {"precision": "bfloat16"}},
    {"training": {"checkpoints": {"even": 7}}},
    {"training": {"final_learning_rate_fraction": 0.2}},
    {"training": {"seeds": [1]}},
    {"model": {"layers": 2}},
    {"model": {"context": 128}},
    {"model": {"initialization": {"kind": "paper"}}},
    {"data": {"validation_tokens": 32_768}},
    {"data": {"order": "listed"}},
    {"data": {"tokenizer": {"vocabulary_size": 1024}}},
    {"data": {"source": {"members": "*.md"}}},
]


@pytest.mark.parametrize("overrides", ALL_RUNS, ids=str)
def test_what_defines_runs_changes_every_run(overrides):
    assert not set(identity.runs(study(**overrides))) & set(identity.runs(study()))


def test_a_variants_rank_changes_its_runs_alone():
    kept = set(identity.runs(study(variants={"MLA": {"query_rank": 80}}))) & set(identity.runs(study()))
    assert {name.split(".")[0] for name in kept} == {"GLA-2", "MLRA-2"}
    assert len(kept) == 4


def test_an_arms_override_changes_its_runs_alone():
    changed = study(arms={"unscaled": {"override": {"training.weight_decay": 0.2}}})
    kept = set(identity.runs(changed)) & set(identity.runs(study()))
    assert {name.split(".")[1] for name in kept} == {"scaled"}


def test_a_new_seed_adds_runs_and_keeps_the_others():
    one, two = identity.runs(study()), identity.runs(study(training={"seeds": [0, 1]}))
    assert set(one) < set(two)
    assert {name.split(".")[2].split("-")[0] for name in set(two) - set(one)} == {"seed1"}


def test_two_spellings_of_one_study_share_their_runs():
    spelled = study(training={"tokens": "716.8e3", "learning_rate": "0.00256"}, model={"vocabulary_size": 2048})
    assert identity.runs(spelled) == identity.runs(study())


def test_the_two_kinds_of_initialisation_share_runs_where_they_are_equal():
    written = {"kind": "paper", "std": 0.08}
    assert identity.runs(study(model={"initialization": written})) == identity.runs(study())


def test_a_pinned_code_stands_for_the_current_one():
    pinned = identity.runs(study(training={"code": "0123456789ab"}))
    assert not set(pinned) & set(identity.runs(study()))
    current = identity.digest(identity.code_of("train"))
    assert identity.runs(study(training={"code": current})) == identity.runs(study())


def test_digests_do_not_depend_on_the_hash_seed():
    program = (
        "from attention_ablation import identity; from attention_ablation.study import load_study;"
        f"print(list(identity.runs(load_study([{str(ROOT / 'config.yaml')!r}]))))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert found == {f"{list(identity.runs(study()))}\n"}


# --- corpora ---


def files_study(**source):
    fields = {"kind": "files", "paths": ["texts/*.txt"], "name": "mine"}
    return study_with_source(fields | source)


def study_with_source(source, tokenizer=None):
    default = study()
    tree = default.model_dump(mode="json")
    tree["data"]["source"] = source
    tree["data"]["tokenizer"] = tokenizer or {"kind": "gpt2"}
    return type(default).model_validate(tree)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder of two files, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "texts" / "b.txt").write_text("b")
    return tmp_path / "texts"


def test_files_count_by_content_and_name_not_by_time_or_place(texts, monkeypatch):
    before = identity.data_digest(files_study())
    (texts / "a.txt").touch()
    assert identity.data_digest(files_study()) == before
    moved = texts.parent / "another place"
    shutil.copytree(texts, moved / "texts")
    assert identity.data_digest(files_study(paths=["another place/texts/*.txt"])) == before
    assert identity.data_digest(files_study(paths=[f"{moved}/texts/*.txt"], license="MIT")) == before
    monkeypatch.chdir(moved)
    assert identity.data_digest(files_study()) == before


@pytest.mark.parametrize("change", ["content", "name", "more", "less"])
def test_a_changed_file_is_another_corpus(texts, change):
    before = identity.data_digest(files_study())
    if change == "content":
        (texts / "a.txt").write_text("c")
    elif change == "name":
        (texts / "a.txt").rename(texts / "c.txt")
    elif change == "more":
        (texts / "c.txt").write_text("c")
    else:
        (texts / "a.txt").unlink()
    assert identity.data_digest(files_study()) != before


@pytest.mark.parametrize("change", [{"separator": ""}, {"errors": "replace"}, {"text_field": "body"}], ids=str)
def test_how_files_are_read_is_part_of_the_corpus(texts, change):
    assert identity.data_digest(files_study(**change)) != identity.data_digest(files_study())


def test_a_tokenizer_file_counts_by_content_and_gpt2_by_name(texts):
    path = texts.parent / "tokenizer.json"
    digests = []
    for content in ("a", "a", "b"):
        path.write_text(content)
        tokenizer = {"kind": "file", "path": "tokenizer.json", "vocabulary_size": 300}
        of_file = study_with_source({"kind": "files", "paths": ["texts/*"]}, tokenizer)
        digests.append(identity.data_digest(of_file))
    assert digests[0] == digests[1] != digests[2]
    source = {"kind": "files", "paths": ["texts/*"]}
    folders = [study_with_source(source, {"kind": "gpt2", "folder": folder}) for folder in (None, "somewhere")]
    assert identity.data_digest(folders[0]) == identity.data_digest(folders[1])
    path.unlink()
    with pytest.raises(UserError, match=r"data\.tokenizer\.path: tokenizer\.json: No such file"):
        identity.data_digest(of_file)


def test_studies_of_one_commit_share_its_downloads():
    source = {"kind": "hugging_face", "repository": "a/b", "revision": "0" * 40}
    two = [study_with_source(source | {"files": files}) for files in (["a.parquet"], ["b.parquet"])]
    assert identity.corpus_name(two[0]) == identity.corpus_name(two[1])
    assert identity.data_digest(two[0]) != identity.data_digest(two[1])


# --- code -----------------------------------------------------------------------------------------------------

SOURCE = '''"""Docstring."""

X = 1  # comment


def f(a):
    """Docstring
    of two lines."""
    return "# no comment" + a  # comment
'''


def test_comments_docstrings_and_blank_lines_are_not_code(tmp_path):
    changed = SOURCE.replace("comment\n", "other\n").replace("Docstring", "Words").replace("\n\n\n", "\n")
    changed = changed.replace("\n    of two lines", "")
    assert changed != SOURCE
    assert lines(identity.without_comments(changed)) == lines(identity.without_comments(SOURCE))


@pytest.mark.parametrize(
    ("old", "new"), [("X = 1", "X = 2"), ("# no comment", "# a comment"), ("return", "return 1 +"), ("(a)", "(b)")]
)
def test_a_change_of_code_is_seen(old, new):
    changed = SOURCE.replace(old, new)
    assert lines(identity.without_comments(changed)) != lines(identity.without_comments(SOURCE))


def test_a_string_that_is_no_docstring_is_code():
    assert "value" in identity.without_comments('def f():\n    """doc"""\n    """value"""\n')
    assert "value" in identity.without_comments('X = """value"""\n')


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: path.stem)
def test_nothing_but_comments_and_docstrings_is_taken_out_of_the_real_modules(path):
    source = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    assert docstrings
    kept = [text for text, start in tokens(source) if start not in docstrings]
    assert [text for text, _ in tokens(identity.without_comments(source))] == kept


def tokens(source: str) -> list[tuple[str, tuple[int, int]]]:
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.string, token.start) for token in found if token.type not in layout]


def lines(source: str) -> list[str]:
    return [line for line in source.splitlines() if line.strip()]


def test_the_code_of_training_is_small_and_knows_no_configuration():
    files = set(identity.code_of("train"))
    assert {"src/attention_ablation/training/train.py", "src/attention_ablation/model/attention.py"} <= files
    assert "src/attention_ablation/kernels/triton_kernels.py" in files  # imported late, and code all the same
    outsiders = ["config", "cli", "identity", "workflow", "figures", "aggregation", "evaluation", "progress"]
    for outside in [*outsiders, "kernels/inspection"]:
        assert f"src/attention_ablation/{outside}.py" not in files


def test_the_code_of_each_step_holds_what_it_runs():
    assert "src/attention_ablation/data/tokenize.py" in identity.code_of("data")
    assert "src/attention_ablation/figures.py" in identity.code_of("figure")
    assert "src/attention_ablation/evaluation.py" in identity.code_of("evaluate")
    deltas = identity.code_of("loss_deltas")
    assert "src/attention_ablation/aggregation.py" in deltas
    assert {path.name for path in identity.SQL.iterdir()} <= {Path(name).name for name in deltas}


def test_package_files_hold_no_code_that_a_digest_would_miss():
    top = ROOT / "src/attention_ablation/__init__.py"
    for path in (ROOT / "src").rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert path == top or len(body) == 1, path
    # The top one: docstring, imports for type checkers, __all__, late exports.
    kinds = [type(node).__name__ for node in ast.parse(top.read_text()).body]
    assert kinds == ["Expr", "ImportFrom", "If", "Assign", "FunctionDef"]


def test_an_edit_to_the_model_changes_runs_and_evaluations_but_no_figure(tmp_path, monkeypatch):
    before = {step: identity.code_of(step) for step in identity.STEPS}
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copytree(ROOT / "workflow", tmp_path / "workflow")
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    monkeypatch.setattr(identity, "PACKAGE", tmp_path / "src" / "attention_ablation")
    monkeypatch.setattr(identity, "SQL", tmp_path / "workflow" / "sql")
    assert {step: identity.code_of(step) for step in identity.STEPS} == before
    edited = tmp_path / "src/attention_ablation/model/attention.py"
    edited.write_text(edited.read_text() + "\nEDITED = True\n")
    identity._code_hash.cache_clear()
    after = {step: identity.code_of(step) for step in identity.STEPS}
    assert {step for step in before if before[step] != after[step]} == {"train", "evaluate"}
    differing = {name for name in before["train"] if before["train"][name] != after["train"][name]}
    assert differing == {"src/attention_ablation/model/attention.py"}
