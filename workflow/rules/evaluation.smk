rule evaluate:
    input:
        dataset=dataset,
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
        code=identity.code_digest("evaluate"),
        study=study_file,
    shell:
        "ablation evaluate --configfile {params.study} --run {wildcards.run} --dataset {input.dataset}"
        " --snapshots {input.snapshots} --output {output.table} --sidecar {output.sidecar} --code {params.code} 2> {log}"
