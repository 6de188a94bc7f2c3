rule evaluate:
    input:
        stream=f"results/data/{data}/stream.json",
        snapshots="results/runs/{run}/snapshots",
    output:
        table="results/runs/{run}/evaluation-{evaluation}.parquet",
        sidecar="results/runs/{run}/evaluation-{evaluation}.json",
    log:
        "logs/evaluate/{run}.{evaluation}.log",
    threads: study.execution.threads
    resources:
        gpu=gpus_a_run(study),
    params:
        *code("evaluate"),
        study=study_file,
        dataset=untracked(dataset),
    shell:
        "ablation evaluate --configfile {params.study} --run {wildcards.run} --dataset {params.dataset}"
        " --snapshots {input.snapshots} --output {output.table} --sidecar {output.sidecar} 2> {log}"
