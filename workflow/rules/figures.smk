rule figure:
    input:
        f"results/{study.study}/loss_deltas.parquet",
    output:
        expand("figures/{name}.{format}", name=study.study, format=study.figure.formats),
        csv=f"figures/{study.study}.csv",
        markdown=f"figures/{study.study}.md",
    log:
        f"logs/figure/{study.study}.log",
    params:
        *code("figure"),
        code=identity.code_digest("figure"),
        settings=identity.figure_settings(study),
        study=study_file,
    shell:
        "ablation figure --configfile {params.study} --deltas {input} --output {output} --code {params.code} 2> {log}"
