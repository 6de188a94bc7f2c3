-- What would make the deltas wrong, as sentences for the user. The first by (check_order, message) is told; an empty
-- table means that every pair is complete and comparable.

CREATE TABLE refusal (check_order INTEGER, message VARCHAR);

INSERT INTO refusal
SELECT 1, format('{}: has run {}, which is not a run of this study; leave the file out', file, run)
FROM checkpoint
WHERE run NOT IN (SELECT run FROM run);

INSERT INTO refusal
SELECT
    2,
    format(
        '{}: run {} is written as variant {}, arm {}, seed {}; expected {}, {}, {}: evaluate the run again',
        file, run, checkpoint.variant, checkpoint.arm, checkpoint.seed, run.variant, run.arm, run.seed
    )
FROM checkpoint
JOIN run USING (run)
WHERE (checkpoint.variant, checkpoint.arm, checkpoint.seed) <> (run.variant, run.arm, run.seed);

INSERT INTO refusal
SELECT 3, format('{}: has rows of {} runs ({} and {}); expected one run a file', file, count(DISTINCT run), min(run), max(run))
FROM checkpoint
GROUP BY file
HAVING count(DISTINCT run) > 1;

INSERT INTO refusal
SELECT 4, format('run {}: duplicate rows, it is in {} and in {}; give one of them', run, min(file), max(file))
FROM checkpoint
GROUP BY run
HAVING count(DISTINCT file) > 1;

INSERT INTO refusal
SELECT 5, format('run {}: no rows in any of the {} evaluation files; evaluate the run', run, len(getvariable('evaluations')))
FROM run
WHERE run NOT IN (SELECT run FROM checkpoint);

INSERT INTO refusal
SELECT 6, format('{}: run {} is evaluated on more than one dataset ({} and {}); expected one', file, run, min(dataset), max(dataset))
FROM checkpoint
GROUP BY file, run
HAVING count(DISTINCT dataset) > 1;

INSERT INTO refusal
SELECT 7, format('{}: run {}, step {}: duplicate rows, {} rows for {} windows; evaluate the run again', file, run, step, rows_found, windows)
FROM checkpoint
WHERE rows_found <> windows;

INSERT INTO refusal
SELECT
    8,
    format(
        '{}: run {}, step {} has two values of tokens_seen, {} and {}; evaluate the run again',
        file, run, step, tokens_seen, highest_tokens_seen
    )
FROM checkpoint
WHERE tokens_seen <> highest_tokens_seen;

INSERT INTO refusal
SELECT 9, format('{}: run {}, step {}, window {} has no tokens; expected at least 1', file, run, step, empty_window)
FROM checkpoint
WHERE empty_window IS NOT NULL;

INSERT INTO refusal
SELECT
    10,
    format(
        '{}: run {}, step {}, window {}: the loss is {}, not a finite number; the training diverged or the evaluation is broken',
        checkpoint.file, checkpoint.run, checkpoint.step, broken_window, loss_sum
    )
FROM checkpoint
JOIN evaluation
    ON evaluation.run = checkpoint.run
    AND evaluation.step = checkpoint.step
    AND evaluation.sequence = checkpoint.broken_window
WHERE checkpoint.step = (
    SELECT min(earlier.step) FROM checkpoint AS earlier
    WHERE earlier.run = checkpoint.run AND earlier.broken_window IS NOT NULL
);

INSERT INTO refusal
SELECT
    11,
    format(
        'comparison {}: no variant has both arms, {} and {}, at a common seed; name arms that the runs have',
        name, baseline, treatment
    )
FROM comparison
WHERE name NOT IN (SELECT comparison FROM pair);

INSERT INTO refusal
SELECT
    12,
    format(
        'run {} ({}) is evaluated on dataset {}, run {} ({}) on {}; expected one dataset',
        one.run, one.file, one.dataset, other.run, other.file, other.dataset
    )
FROM must_agree
JOIN checkpoint AS one ON one.run = one_run
JOIN checkpoint AS other ON other.run = other_run
WHERE one.dataset <> other.dataset;

-- A step that one run has and the other has not, told for both directions, the earliest of each.
INSERT INTO refusal
SELECT
    13,
    format(
        'run {} ({}) has a checkpoint at step {}, run {} ({}) has none; evaluate the same steps in both',
        has.run, any_value(has.file), min(has.step), lacks.run, lacks.file
    )
FROM (
    SELECT one_run AS has_run, other_run AS lacks_run FROM must_agree
    UNION
    SELECT other_run, one_run FROM must_agree
)
JOIN checkpoint AS has ON has.run = has_run
JOIN (SELECT DISTINCT run, file FROM checkpoint) AS lacks ON lacks.run = lacks_run
WHERE has.step NOT IN (SELECT step FROM checkpoint WHERE run = lacks_run)
GROUP BY has.run, lacks.run, lacks.file;

INSERT INTO refusal
SELECT
    14,
    format(
        'step {} is {} tokens in run {} ({}) and {} tokens in run {} ({}); expected equal batches',
        one.step, one.tokens_seen, one.run, one.file, other.tokens_seen, other.run, other.file
    )
FROM must_agree
JOIN checkpoint AS one ON one.run = one_run
JOIN checkpoint AS other ON other.run = other_run AND other.step = one.step
WHERE one.tokens_seen <> other.tokens_seen;

-- Window by window for the arms of a pair, since the difference is taken window by window.
INSERT INTO refusal
SELECT
    15,
    format(
        'step {}, window {} has {} tokens in run {} and {} in run {}; both need the same windows: evaluate them again ({} and {})',
        coalesce(baseline.step, treatment.step),
        coalesce(baseline.sequence, treatment.sequence),
        coalesce(baseline.token_count, 0),
        coalesce(baseline.baseline_run, treatment.baseline_run),
        coalesce(treatment.token_count, 0),
        coalesce(baseline.treatment_run, treatment.treatment_run),
        (SELECT min(file) FROM checkpoint WHERE run = coalesce(baseline.baseline_run, treatment.baseline_run)),
        (SELECT min(file) FROM checkpoint WHERE run = coalesce(baseline.treatment_run, treatment.treatment_run))
    )
FROM (SELECT * FROM pair JOIN evaluation ON run = baseline_run) AS baseline
FULL JOIN (SELECT * FROM pair JOIN evaluation ON run = treatment_run) AS treatment
    ON treatment.pair = baseline.pair
    AND treatment.step = baseline.step
    AND treatment.sequence = baseline.sequence
WHERE baseline.token_count IS DISTINCT FROM treatment.token_count
ORDER BY
    coalesce(baseline.pair, treatment.pair),
    coalesce(baseline.step, treatment.step),
    coalesce(baseline.sequence, treatment.sequence)
LIMIT 1;

-- Other seeds, and the checkpoints of one run among themselves: the counts must agree.
INSERT INTO refusal
SELECT
    16,
    format(
        'run {} ({}) has {} windows, {} tokens at step {}; run {} ({}) has {} windows, {} tokens at step {}: evaluate the same windows',
        one.run, one.file, one.windows, one.tokens, one.step, other.run, other.file, other.windows, other.tokens, other.step
    )
FROM (SELECT * FROM must_agree UNION SELECT run, run FROM run)
JOIN checkpoint AS one ON one.run = one_run
JOIN checkpoint AS other ON other.run = other_run
WHERE (one.windows, one.tokens) <> (other.windows, other.tokens);

INSERT INTO refusal
SELECT
    17,
    format(
        '{}: run {}, step {} has {} windows; {} blocks need at least as many: evaluate more tokens or take fewer blocks',
        file, run, step, windows, getvariable('blocks')
    )
FROM checkpoint
WHERE windows < getvariable('blocks');
