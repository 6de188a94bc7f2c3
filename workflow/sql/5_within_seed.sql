-- The delta of one pair of trained models at one checkpoint, with the uncertainty that comes from the text alone.
--
-- delta = (sum of the differences) / (sum of the tokens), a ratio of two sums over B blocks. Its standard error is that of
-- a ratio estimator: with the residuals e_b = difference_b - delta * tokens_b and T tokens in all,
--     standard_error = sqrt(B / (B - 1) * sum(e_b^2)) / T,
-- and the interval is Student's t with B - 1 degrees of freedom. It says "these two trained models, on this text":
-- the noise of training is not in it.

CREATE TABLE within_seed AS
WITH total AS (
    SELECT
        pair,
        step,
        tokens_seen,
        CAST(sum(windows) AS BIGINT) AS sequences,
        sum(tokens) AS tokens,
        fsum(difference ORDER BY block) / sum(tokens) AS delta,
        fsum(baseline_loss_sum ORDER BY block) / sum(tokens) AS baseline_loss,
        fsum(treatment_loss_sum ORDER BY block) / sum(tokens) AS treatment_loss
    FROM block
    GROUP BY pair, step, tokens_seen
),
spread AS (
    SELECT
        pair,
        step,
        count(*) AS blocks,
        fsum((block.difference - total.delta * block.tokens) ** 2 ORDER BY block.block) AS squares
    FROM block
    JOIN total USING (pair, step)
    GROUP BY pair, step
)
SELECT
    total.*,
    sqrt(blocks / (blocks - 1) * squares) / tokens AS standard_error,
    student_t.t AS t
FROM total
JOIN spread USING (pair, step)
JOIN student_t
    ON student_t.confidence = getvariable('confidence')
    AND student_t.degrees_of_freedom = spread.blocks - 1
ORDER BY pair, step;
