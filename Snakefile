import re
import sys

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

from attention_ablation import identity
from attention_ablation.study import load_study
from attention_ablation.errors import UserError
from attention_ablation.workflow import (
    code,
    fetched_files,
    gpus_a_run,
    hold_lock,
    parts_of,
    run_environment,
    store_study,
    untracked,
    vocabulary_files,
)

min_version("9.27")

# One study, one file: config.yaml, or the one that --configfile names; --config lays single values over it.
try:
    study = load_study(
        workflow.config_settings.configfiles, workflow.config_settings.config
    )
    study_file = untracked(store_study(study))
    corpus = identity.corpus_name(study)
    corpus_files = [f"results/corpus/{corpus}/{file}" for file in fetched_files(study)]
    trains_tokenizer = study.data.tokenizer.kind == "bpe"
    data = identity.data_name(study)
    dataset = f"results/data/{data}/dataset.json"
    parts = parts_of(study, dataset)
    part_numbers = [] if study.data.source.kind == "token_shards" else range(parts)
    runs = list(identity.runs(study))
    evaluation = identity.evaluation_digest(study)
except (UserError, OSError) as error:
    raise WorkflowError(str(error)) from None

run_environment()


# For `--sdm apptainer` alone; built from envs/Containerfile. Without that flag the steps run in this environment.
container: "envs/attention-ablation.sif"


wildcard_constraints:
    corpus=corpus,
    file="|".join(map(re.escape, fetched_files(study))),
    data=data,
    part=r"\d{5}",
    run="|".join(map(re.escape, runs)),
    evaluation=evaluation,
    study=study.study,


include: "workflow/rules/data.smk"
include: "workflow/rules/training.smk"
include: "workflow/rules/evaluation.smk"
include: "workflow/rules/aggregation.smk"
include: "workflow/rules/figures.smk"


rule all:
    default_target: True
    input:
        rules.figure.output,


onstart:
    hold_lock()


onsuccess:
    print(
        f"figure: figures/{study.study}.*  table: figures/{study.study}.md",
        file=sys.stderr,
    )
