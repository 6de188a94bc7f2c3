-- The evaluations of every run, one row a (checkpoint, validation window), and what each file says it holds.
--
-- In: the variable 'evaluations' (list of Parquet files), table run(run, variant, arm, seed).
-- All files have one schema: that is checked before, because DuckDB would silently cast to the first file's types.
-- hive_partitioning is off: a folder named 'a=b' must not become a column.

CREATE VIEW evaluation AS
SELECT file, run, variant, arm, seed, dataset, step, tokens_seen, sequence, token_count, loss_sum
FROM read_parquet(
    getvariable('evaluations'), filename = 'file', union_by_name = true, hive_partitioning = false
);

-- One row a checkpoint. In good data a (run, step) is found once; 3_refusals.sql says what is wrong where it is not.
CREATE TABLE checkpoint AS
SELECT
    file,
    run,
    variant,
    arm,
    seed,
    dataset,
    step,
    min(tokens_seen) AS tokens_seen,
    max(tokens_seen) AS highest_tokens_seen,
    count(*) AS rows_found,
    count(DISTINCT sequence) AS windows,
    CAST(sum(token_count) AS BIGINT) AS tokens,
    min(sequence) FILTER (WHERE token_count < 1) AS empty_window,
    -- One NaN would turn every mean into NaN: keep the first window that has one, to name it.
    min(sequence) FILTER (WHERE NOT isfinite(loss_sum)) AS broken_window
FROM evaluation
GROUP BY file, run, variant, arm, seed, dataset, step
ORDER BY file, run, variant, arm, seed, dataset, step;
