-- The windows of each pair and checkpoint, summed over contiguous blocks.
--
-- Neighbouring windows read one text and are correlated; sums over long blocks are nearly independent, so the
-- spread of the blocks, not of the windows, tells how much the text decides. Block sizes differ by one window at most.
-- fsum is compensated and its input ordered: the last bit depends on no thread and on no order of files or rows.

CREATE TABLE block AS
WITH window_difference AS (
    SELECT
        pair.pair,
        baseline.step,
        baseline.tokens_seen,
        baseline.sequence,
        baseline.token_count,
        baseline.loss_sum AS baseline_loss_sum,
        treatment.loss_sum AS treatment_loss_sum,
        (row_number() OVER (checkpoint_windows ORDER BY baseline.sequence) - 1)
        * getvariable('blocks') // count(*) OVER checkpoint_windows AS block
    FROM pair
    JOIN evaluation AS baseline ON baseline.run = pair.baseline_run
    JOIN evaluation AS treatment
        ON treatment.run = pair.treatment_run
        AND treatment.step = baseline.step
        AND treatment.sequence = baseline.sequence
    WINDOW checkpoint_windows AS (PARTITION BY pair.pair, baseline.step)
)
SELECT
    pair,
    step,
    tokens_seen,
    block,
    count(*) AS windows,
    sum(token_count) AS tokens,
    fsum(treatment_loss_sum - baseline_loss_sum ORDER BY sequence) AS difference,
    fsum(baseline_loss_sum ORDER BY sequence) AS baseline_loss_sum,
    fsum(treatment_loss_sum ORDER BY sequence) AS treatment_loss_sum
FROM window_difference
GROUP BY pair, step, tokens_seen, block
ORDER BY pair, step, block;
