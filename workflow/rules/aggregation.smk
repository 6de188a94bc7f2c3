rule loss_deltas:
    input:
        expand(
            "results/runs/{run}/evaluation-{evaluation}.parquet",
            run=runs,
            evaluation=evaluation,
        ),
    output:
        "results/{study}/loss_deltas.parquet",
    log:
        "logs/loss_deltas/{study}.log",
    params:
        *code("loss_deltas"),
        code=identity.code_digest("loss_deltas"),
        settings=identity.aggregation_settings(study),
        study=study_file,
    shell:
        "ablation loss-deltas --configfile {params.study} --evaluations {input} --output {output} --code {params.code} 2> {log}"
