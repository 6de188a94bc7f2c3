-- The pairs of runs that are compared: one variant, one seed, two arms.
--
-- In: tables run(run, variant, arm, seed) and comparison(name, baseline, treatment).
-- A comparison applies to each variant that has both arms at a common seed.

CREATE TABLE pair AS
SELECT
    row_number() OVER (ORDER BY comparison.name, baseline_run.variant, baseline_run.seed) AS pair,
    comparison.name AS comparison,
    baseline_run.variant AS variant,
    comparison.baseline AS baseline_arm,
    comparison.treatment AS treatment_arm,
    baseline_run.seed AS seed,
    baseline_run.run AS baseline_run,
    treatment_run.run AS treatment_run
FROM comparison
JOIN run AS baseline_run ON baseline_run.arm = comparison.baseline
JOIN run AS treatment_run
    ON treatment_run.arm = comparison.treatment
    AND treatment_run.variant = baseline_run.variant
    AND treatment_run.seed = baseline_run.seed
ORDER BY pair;

-- Runs that must have been evaluated on the same checkpoints and the same data: the two arms of a pair, and each
-- seed's baseline with the first seed's, since a mean over seeds is taken checkpoint by checkpoint.
CREATE TABLE must_agree AS
SELECT baseline_run AS one_run, treatment_run AS other_run FROM pair
UNION
SELECT first(baseline_run) OVER seeds AS one_run, baseline_run AS other_run FROM pair
WINDOW seeds AS (PARTITION BY comparison, variant ORDER BY seed)
ORDER BY one_run, other_run;
