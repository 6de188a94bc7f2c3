# The corpus becomes one stream of tokens. Every path carries the digest of all that decides its content, so a changed
# setting or changed code makes new files beside the old ones. The number of parts decides nothing about the stream:
# where it has been made, it stays as it is. Files of this machine are in the digest by their content, so they are no
# inputs: touching one is no reason to run, changing one makes another digest.


localrules:
    fetch_corpus,
    fetch_vocabulary,


rule fetch_corpus:
    output:
        "results/corpus/{corpus}/{file}",
    log:
        "logs/fetch_corpus/{corpus}/{file}.log",
    params:
        study=study_file,
    shell:
        "ablation fetch-corpus --configfile {params.study} --file {wildcards.file:q} --output {output:q} 2> {log}"


rule fetch_vocabulary:
    output:
        "results/corpus/gpt2-vocabulary/encoder.json",
        "results/corpus/gpt2-vocabulary/vocab.bpe",
    log:
        "logs/fetch_vocabulary/gpt2.log",
    params:
        study=study_file,
    shell:
        "ablation fetch-vocabulary --configfile {params.study} --output {output} 2> {log}"


rule index_corpus:
    input:
        corpus=corpus_files,
    output:
        f"results/data/{{data}}/parts-{parts}/index.json",
    log:
        "logs/index_corpus/{data}.log",
    params:
        study=study_file,
    shell:
        "ablation index-corpus --configfile {params.study} --data {wildcards.data} --corpus {input.corpus}"
        " --output {output} 2> {log}"


# A tokenizer that is not trained here needs none of the corpus.
rule train_tokenizer:
    input:
        corpus=corpus_files if trains_tokenizer else [],
        index=(
            [f"results/data/{{data}}/parts-{parts}/index.json"]
            if trains_tokenizer
            else []
        ),
        vocabulary=vocabulary_files(study),
    output:
        "results/data/{data}/tokenizer.json",
    log:
        "logs/train_tokenizer/{data}.log",
    params:
        study=study_file,
    shell:
        "ablation train-tokenizer --configfile {params.study} --data {wildcards.data} --corpus {input.corpus}"
        " --index {input.index} --vocabulary {input.vocabulary} --output {output} 2> {log}"


rule tokenize:
    input:
        corpus=corpus_files,
        index=f"results/data/{{data}}/parts-{parts}/index.json",
        tokenizer="results/data/{data}/tokenizer.json",
    output:
        part=f"results/data/{{data}}/parts-{parts}/part-{{part}}.bin",
        counts=f"results/data/{{data}}/parts-{parts}/part-{{part}}.json",
    log:
        "logs/tokenize/{data}.{part}.log",
    threads: study.execution.tokenize_threads
    params:
        study=study_file,
    shell:
        "ablation tokenize --configfile {params.study} --data {wildcards.data} --corpus {input.corpus}"
        " --index {input.index} --tokenizer {input.tokenizer} --part {wildcards.part} --output {output.part}"
        " --counts {output.counts} 2> {log}"


# Token shards that exist already are described where they lie.
rule dataset:
    input:
        tokenizer="results/data/{data}/tokenizer.json",
        parts=expand(
            "results/data/{{data}}/parts-{parts}/part-{part:05d}.bin",
            parts=parts,
            part=part_numbers,
        ),
        counts=expand(
            "results/data/{{data}}/parts-{parts}/part-{part:05d}.json",
            parts=parts,
            part=part_numbers,
        ),
    output:
        dataset="results/data/{data}/dataset.json",
        stream="results/data/{data}/stream.json",
    log:
        "logs/dataset/{data}.log",
    params:
        study=study_file,
    shell:
        "ablation dataset --configfile {params.study} --data {wildcards.data} --tokenizer {input.tokenizer}"
        " --parts {input.parts} --counts {input.counts} --output {output.dataset} --stream {output.stream} 2> {log}"
