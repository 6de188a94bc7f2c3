rule train:
    input:
        dataset=dataset,
    output:
        snapshots=directory("results/runs/{run}/snapshots"),
        metrics="results/runs/{run}/metrics.jsonl",
        deepspeed="results/runs/{run}/deepspeed.json",
        sidecar="results/runs/{run}/run.json",
    log:
        "logs/train/{run}.log",
    threads: study.execution.threads * study.execution.processes
    resources:
        gpu=gpus_a_run(study),
    params:
        study=study_file,
    shell:
        "ablation train --configfile {params.study} --run {wildcards.run} --dataset {input.dataset}"
        " --output results/runs/{wildcards.run} 2> {log}"
