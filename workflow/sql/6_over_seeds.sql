-- The mean over seeds at one checkpoint, with the uncertainty of training: the spread of the seeds' deltas.
--
-- Student's t with (seeds - 1) degrees of freedom. Two seeds are the least that have a spread at all.

CREATE TABLE over_seeds AS
WITH seed_delta AS (
    SELECT comparison, variant, baseline_arm, treatment_arm, seed, within_seed.*
    FROM within_seed
    JOIN pair USING (pair)
),
average AS (
    SELECT
        comparison,
        variant,
        baseline_arm,
        treatment_arm,
        step,
        tokens_seen,
        count(*) AS seeds,
        fsum(delta ORDER BY seed) / count(*) AS delta,
        fsum(baseline_loss ORDER BY seed) / count(*) AS baseline_loss,
        fsum(treatment_loss ORDER BY seed) / count(*) AS treatment_loss,
        min(sequences) AS sequences
    FROM seed_delta
    GROUP BY comparison, variant, baseline_arm, treatment_arm, step, tokens_seen
    HAVING count(*) >= 2
),
spread AS (
    SELECT
        comparison,
        variant,
        step,
        fsum((seed_delta.delta - average.delta) ** 2 ORDER BY seed) AS squares
    FROM seed_delta
    JOIN average USING (comparison, variant, step)
    GROUP BY comparison, variant, step
)
SELECT
    average.*,
    sqrt(squares / (seeds - 1) / seeds) AS standard_error,
    student_t.t AS t
FROM average
JOIN spread USING (comparison, variant, step)
JOIN student_t
    ON student_t.confidence = getvariable('confidence')
    AND student_t.degrees_of_freedom = average.seeds - 1
ORDER BY comparison, variant, step;
