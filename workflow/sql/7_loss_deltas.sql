-- The table that is drawn: every seed by itself, then, where there are two or more, the mean over them (seed is null).

SELECT
    comparison,
    variant,
    baseline_arm,
    treatment_arm,
    seed,
    step,
    tokens_seen,
    delta,
    standard_error,
    delta - t * standard_error AS ci_low,
    delta + t * standard_error AS ci_high,
    interval_kind,
    baseline_loss,
    treatment_loss,
    sequences,
    seeds
FROM (
    SELECT
        comparison, variant, baseline_arm, treatment_arm, seed, step, tokens_seen, delta, standard_error, t,
        'blocks' AS interval_kind, baseline_loss, treatment_loss, sequences, 1 AS seeds
    FROM within_seed
    JOIN pair USING (pair)
    UNION ALL
    SELECT
        comparison, variant, baseline_arm, treatment_arm, NULL AS seed, step, tokens_seen, delta, standard_error, t,
        'seeds' AS interval_kind, baseline_loss, treatment_loss, sequences, seeds
    FROM over_seeds
)
ORDER BY comparison, variant, seed NULLS LAST, step;
