"""Latent attention in Triton, forward and backward, one program a (tile, head), walking over the head's branches.

The split query is read once for all branches, the logits of the shared rope key are added to those of each branch
without a concatenated key, and what a sum over branches wants (the output, the query's and the rope key's gradients)
is summed in registers. Nothing is added by two programs, so the same input gives the same bits.

Causal softmax attention is the online-softmax method of Dao, "FlashAttention-2" (arXiv:2307.08691), algorithms 1 and
2; the logits are those of `reference.py`. Exponents have base 2, as the hardware has: logits are multiplied by
log2(e), and `lse` is the logarithm to base 2.

Shapes: B batch, T tokens, H heads, J branches; DN nope head dim (keys and values), DR rope head dim. Names: `i_` index,
`o_` offsets, `p_` pointer, `b_` block in registers, `m_` mask, CAPITALS known when compiled. A stride is named after
its tensor and the letter of its dimension; the last stride of every tensor is 1. What a kernel writes is contiguous:
`out`, `d_q_nope` (B, T, H, DN), `d_q_rope` (B, T, H, DR), `branch_out`, `d_k_nope`, `d_v` (J, B, T, H, DN), `lse`,
`delta` (J, B, H, T), `d_k_rope` (B, H, T, DR), one a head.

Triton reads TRITON_INTERPRET when it decorates, so whoever wants the interpreter sets it before this is imported.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(p_tile, o_t, o_d, stride_t, T, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK_T: tl.constexpr):
    """Rows `o_t`, columns `o_d` of a (T, D) matrix; zero outside of it. The caller knows if all rows are inside."""
    p_tile += o_t.to(tl.int64)[:, None] * stride_t + o_d[None, :]
    if MASK_T:
        if D == BLOCK_D:
            return tl.load(p_tile, mask=(o_t < T)[:, None], other=0.0)
        return tl.load(p_tile, mask=(o_t < T)[:, None] & (o_d < D)[None, :], other=0.0)
    if D == BLOCK_D:
        return tl.load(p_tile)
    return tl.load(p_tile, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def store_tile(p_tile, b_tile, o_t, o_d, stride_t, T, D: tl.constexpr):
    """Write the rows below T and the columns below D."""
    p_tile += o_t.to(tl.int64)[:, None] * stride_t + o_d[None, :]
    tl.store(p_tile, b_tile.to(p_tile.dtype.element_ty), mask=(o_t < T)[:, None] & (o_d < D)[None, :])


@triton.jit
def logits(b_q_nope, b_q_rope, b_k_nope, b_k_rope, scale, o_q, o_k, MASKED: tl.constexpr):
    """scale log2(e) (q_nope . k_nope + q_rope . k_rope), queries down, keys across; -inf where the key is later.

    No mask for keys beyond T: they are later than every query below T, and queries beyond T are not stored.
    """
    b_s = tl.dot(b_q_nope, tl.trans(b_k_nope), input_precision="ieee")
    b_s = tl.dot(b_q_rope, tl.trans(b_k_rope), acc=b_s, input_precision="ieee")
    b_s *= scale * LOG2_E
    if MASKED:
        b_s = tl.where(o_q[:, None] >= o_k[None, :], b_s, float("-inf"))
    return b_s


@triton.jit
def forward_over_keys(
    b_o, b_sum, b_max, b_q_nope, b_q_rope, o_q, p_k_nope, p_k_rope, p_v,
    k_nope_t, k_rope_t, v_t, scale, T, first, last,
    DN: tl.constexpr, DR: tl.constexpr, BLOCK_DN: tl.constexpr, BLOCK_DR: tl.constexpr,
    BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One query tile against the key tiles from `first` to `last`: online softmax, unnormalised.

    For each tile: max' = max(max, rowmax S), P = 2^(S - max'), a = 2^(max - max'), sum = a sum + rowsum P,
    O = a O + P V.
    """
    o_n, o_r = tl.arange(0, BLOCK_DN), tl.arange(0, BLOCK_DR)
    for start in tl.range(first, last, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        b_k_nope = load_tile(p_k_nope, o_k, o_n, k_nope_t, T, DN, BLOCK_DN, MASKED)
        b_k_rope = load_tile(p_k_rope, o_k, o_r, k_rope_t, T, DR, BLOCK_DR, MASKED)
        b_s = logits(b_q_nope, b_q_rope, b_k_nope, b_k_rope, scale, o_q, o_k, MASKED)
        b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_p = tl.exp2(b_s - b_new_max[:, None])
        b_rescale = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_rescale + tl.sum(b_p, axis=1)
        b_v = load_tile(p_v, o_k, o_n, v_t, T, DN, BLOCK_DN, MASKED)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, acc=b_o * b_rescale[:, None], input_precision="ieee")
        b_max = b_new_max
    return b_o, b_sum, b_max


@triton.jit
def forward_kernel(
    q_nope, q_rope, k_nope, k_rope, v, out, branch_out, lse, scale, B, T, H,
    q_nope_b, q_nope_t, q_nope_h, q_rope_b, q_rope_t, q_rope_h,
    k_nope_j, k_nope_b, k_nope_t, k_nope_h, k_rope_b, k_rope_t, v_j, v_b, v_t, v_h,
    J: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, BLOCK_DN: tl.constexpr, BLOCK_DR: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = sum_j softmax(S_j) V_j; branch_out_j = softmax(S_j) V_j, if J > 1; lse_j = log2 sum_keys 2^(S_j).

    S_j = scale log2(e) (Q_nope K_nope_j^T + Q_rope K_rope^T), causal. FlashAttention-2, algorithm 1, once a branch.
    """
    tiles = tl.cdiv(T, BLOCK_Q)
    i_q = tiles - 1 - tl.program_id(0) % tiles  # the longest first: the last ones to run are then short
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_q = i_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o_n, o_r = tl.arange(0, BLOCK_DN), tl.arange(0, BLOCK_DR)
    b_q_nope = load_tile(q_nope + i_b * q_nope_b + i_h * q_nope_h, o_q, o_n, q_nope_t, T, DN, BLOCK_DN, True)
    b_q_rope = load_tile(q_rope + i_b * q_rope_b + i_h * q_rope_h, o_q, o_r, q_rope_t, T, DR, BLOCK_DR, True)
    p_k_rope = k_rope + i_b * k_rope_b
    diagonal = i_q * BLOCK_Q // BLOCK_K * BLOCK_K  # key tiles before it are earlier than every query
    last = tl.minimum((i_q + 1) * BLOCK_Q, T)
    b_out = tl.zeros([BLOCK_Q, BLOCK_DN], tl.float32)
    for i_j in tl.range(0, J):
        i_j64 = tl.cast(i_j, tl.int64)
        p_k_nope = k_nope + i_j64 * k_nope_j + i_b * k_nope_b + i_h * k_nope_h
        p_v = v + i_j64 * v_j + i_b * v_b + i_h * v_h
        b_o = tl.zeros([BLOCK_Q, BLOCK_DN], tl.float32)
        b_sum = tl.zeros([BLOCK_Q], tl.float32)
        b_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        b_o, b_sum, b_max = forward_over_keys(
            b_o, b_sum, b_max, b_q_nope, b_q_rope, o_q, p_k_nope, p_k_rope, p_v, k_nope_t, k_rope_t, v_t, scale, T,
            0, diagonal, DN, DR, BLOCK_DN, BLOCK_DR, BLOCK_K, False,
        )  # fmt: skip
        b_o, b_sum, b_max = forward_over_keys(
            b_o, b_sum, b_max, b_q_nope, b_q_rope, o_q, p_k_nope, p_k_rope, p_v, k_nope_t, k_rope_t, v_t, scale, T,
            diagonal, last, DN, DR, BLOCK_DN, BLOCK_DR, BLOCK_K, True,
        )  # fmt: skip
        b_o = b_o / b_sum[:, None]
        b_out += b_o
        p_lse = lse + ((i_j64 * B + i_b) * H + i_h) * T + o_q
        tl.store(p_lse, b_max + tl.log2(b_sum), mask=o_q < T)
        if J > 1:
            store_tile(branch_out + ((i_j64 * B + i_b) * T * H + i_h) * DN, b_o, o_q, o_n, H * DN, T, DN)
    store_tile(out + (i_b * T * H + i_h) * DN, b_out, o_q, o_n, H * DN, T, DN)


@triton.jit
def query_gradient_over_keys(
    b_d_q_nope, b_d_q_rope, b_q_nope, b_q_rope, b_d_out, b_lse, b_delta, o_q, p_k_nope, p_k_rope, p_v,
    k_nope_t, k_rope_t, v_t, scale, T, first, last,
    DN: tl.constexpr, DR: tl.constexpr, BLOCK_DN: tl.constexpr, BLOCK_DR: tl.constexpr,
    BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One query tile against the key tiles from `first` to `last`, without the factor `scale`.

    P = 2^(S - lse), dS = P (dO V^T - delta), dQ_nope += dS K_nope, dQ_rope += dS K_rope.
    """
    o_n, o_r = tl.arange(0, BLOCK_DN), tl.arange(0, BLOCK_DR)
    for start in tl.range(first, last, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        b_k_nope = load_tile(p_k_nope, o_k, o_n, k_nope_t, T, DN, BLOCK_DN, MASKED)
        b_k_rope = load_tile(p_k_rope, o_k, o_r, k_rope_t, T, DR, BLOCK_DR, MASKED)
        b_v = load_tile(p_v, o_k, o_n, v_t, T, DN, BLOCK_DN, MASKED)
        b_p = tl.exp2(logits(b_q_nope, b_q_rope, b_k_nope, b_k_rope, scale, o_q, o_k, MASKED) - b_lse[:, None])
        b_d_p = tl.dot(b_d_out, tl.trans(b_v), input_precision="ieee")
        b_d_s = (b_p * (b_d_p - b_delta[:, None])).to(b_k_nope.dtype)
        b_d_q_nope = tl.dot(b_d_s, b_k_nope, acc=b_d_q_nope, input_precision="ieee")
        b_d_q_rope = tl.dot(b_d_s, b_k_rope, acc=b_d_q_rope, input_precision="ieee")
    return b_d_q_nope, b_d_q_rope


@triton.jit
def query_gradient_kernel(
    q_nope, q_rope, k_nope, k_rope, v, d_out, branch_out, lse, delta, d_q_nope, d_q_rope, scale, B, T, H,
    q_nope_b, q_nope_t, q_nope_h, q_rope_b, q_rope_t, q_rope_h,
    k_nope_j, k_nope_b, k_nope_t, k_nope_h, k_rope_b, k_rope_t, v_j, v_b, v_t, v_h, d_out_b, d_out_t, d_out_h,
    J: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, BLOCK_DN: tl.constexpr, BLOCK_DR: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dQ = scale sum_j dS_j K_j, nope and rope; and delta_j = rowsum(dO O_j), which the key kernel reads after it.

    FlashAttention-2, algorithm 2, the part of the query, once a branch.
    """
    tiles = tl.cdiv(T, BLOCK_Q)
    i_q = tiles - 1 - tl.program_id(0) % tiles
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_q = i_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o_n, o_r = tl.arange(0, BLOCK_DN), tl.arange(0, BLOCK_DR)
    b_q_nope = load_tile(q_nope + i_b * q_nope_b + i_h * q_nope_h, o_q, o_n, q_nope_t, T, DN, BLOCK_DN, True)
    b_q_rope = load_tile(q_rope + i_b * q_rope_b + i_h * q_rope_h, o_q, o_r, q_rope_t, T, DR, BLOCK_DR, True)
    b_d_out = load_tile(d_out + i_b * d_out_b + i_h * d_out_h, o_q, o_n, d_out_t, T, DN, BLOCK_DN, True)
    p_k_rope = k_rope + i_b * k_rope_b
    diagonal = i_q * BLOCK_Q // BLOCK_K * BLOCK_K
    last = tl.minimum((i_q + 1) * BLOCK_Q, T)
    b_d_q_nope = tl.zeros([BLOCK_Q, BLOCK_DN], tl.float32)
    b_d_q_rope = tl.zeros([BLOCK_Q, BLOCK_DR], tl.float32)
    for i_j in tl.range(0, J):
        i_j64 = tl.cast(i_j, tl.int64)
        p_k_nope = k_nope + i_j64 * k_nope_j + i_b * k_nope_b + i_h * k_nope_h
        p_v = v + i_j64 * v_j + i_b * v_b + i_h * v_h
        p_branch_out = branch_out + ((i_j64 * B + i_b) * T * H + i_h) * DN
        b_branch_out = load_tile(p_branch_out, o_q, o_n, H * DN, T, DN, BLOCK_DN, True)
        b_delta = tl.sum(b_d_out.to(tl.float32) * b_branch_out.to(tl.float32), axis=1)
        o_row = ((i_j64 * B + i_b) * H + i_h) * T + o_q
        tl.store(delta + o_row, b_delta, mask=o_q < T)
        b_lse = tl.load(lse + o_row, mask=o_q < T, other=0.0)
        b_d_q_nope, b_d_q_rope = query_gradient_over_keys(
            b_d_q_nope, b_d_q_rope, b_q_nope, b_q_rope, b_d_out, b_lse, b_delta, o_q, p_k_nope, p_k_rope, p_v,
            k_nope_t, k_rope_t, v_t, scale, T, 0, diagonal, DN, DR, BLOCK_DN, BLOCK_DR, BLOCK_K, False,
        )  # fmt: skip
        b_d_q_nope, b_d_q_rope = query_gradient_over_keys(
            b_d_q_nope, b_d_q_rope, b_q_nope, b_q_rope, b_d_out, b_lse, b_delta, o_q, p_k_nope, p_k_rope, p_v,
            k_nope_t, k_rope_t, v_t, scale, T, diagonal, last, DN, DR, BLOCK_DN, BLOCK_DR, BLOCK_K, True,
        )  # fmt: skip
    store_tile(d_q_nope + (i_b * T * H + i_h) * DN, b_d_q_nope * scale, o_q, o_n, H * DN, T, DN)
    store_tile(d_q_rope + (i_b * T * H + i_h) * DR, b_d_q_rope * scale, o_q, o_r, H * DR, T, DR)


@triton.jit
def key_gradient_over_queries(
    b_d_k_nope, b_d_k_rope, b_d_v, b_k_nope, b_k_rope, b_v, o_k, p_q_nope, p_q_rope, p_d_out, p_lse, p_delta,
    q_nope_t, q_rope_t, d_out_t, scale, T, first, last,
    DN: tl.constexpr, DR: tl.constexpr, BLOCK_DN: tl.constexpr, BLOCK_DR: tl.constexpr,
    BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One key tile against the query tiles from `first` to `last`, the keys' gradients without the factor `scale`.

    P = 2^(S - lse), dV += P^T dO, dS = P (dO V^T - delta), dK_nope += dS^T Q_nope, dK_rope += dS^T Q_rope.
    Queries beyond T are read as zeros, dO too: they add nothing.
    """
    o_n, o_r = tl.arange(0, BLOCK_DN), tl.arange(0, BLOCK_DR)
    for start in tl.range(first, last, BLOCK_Q):
        o_q = start + tl.arange(0, BLOCK_Q)
        b_q_nope = load_tile(p_q_nope, o_q, o_n, q_nope_t, T, DN, BLOCK_DN, True)
        b_q_rope = load_tile(p_q_rope, o_q, o_r, q_rope_t, T, DR, BLOCK_DR, True)
        b_d_out = load_tile(p_d_out, o_q, o_n, d_out_t, T, DN, BLOCK_DN, True)
        b_lse = tl.load(p_lse + o_q, mask=o_q < T, other=0.0)
        b_delta = tl.load(p_delta + o_q, mask=o_q < T, other=0.0)
        b_p = tl.exp2(logits(b_q_nope, b_q_rope, b_k_nope, b_k_rope, scale, o_q, o_k, MASKED) - b_lse[:, None])
        b_d_v = tl.dot(tl.trans(b_p.to(b_d_out.dtype)), b_d_out, acc=b_d_v, input_precision="ieee")
        b_d_p = tl.dot(b_d_out, tl.trans(b_v), input_precision="ieee")
        b_d_s = tl.trans((b_p * (b_d_p - b_delta[:, None])).to(b_q_nope.dtype))
        b_d_k_nope = tl.dot(b_d_s, b_q_nope, acc=b_d_k_nope, input_precision="ieee")
        b_d_k_rope = tl.dot(b_d_s, b_q_rope, acc=b_d_k_rope, input_precision="ieee")
    return b_d_k_nope, b_d_k_rope, b_d_v


@triton.jit
def key_gradient_kernel(
    q_nope, q_rope, k_nope, k_rope, v, d_out, lse, delta, d_k_nope, d_k_rope, d_v, scale, B, T, H,
    q_nope_b, q_nope_t, q_nope_h, q_rope_b, q_rope_t, q_rope_h,
    k_nope_j, k_nope_b, k_nope_t, k_nope_h, k_rope_b, k_rope_t, v_j, v_b, v_t, v_h, d_out_b, d_out_t, d_out_h,
    J: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, BLOCK_DN: tl.constexpr, BLOCK_DR: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dK_nope_j = scale dS_j^T Q_nope, dV_j = P_j^T dO; and for its head dK_rope = scale sum_j dS_j^T Q_rope.

    FlashAttention-2, algorithm 2, the part of the keys, once a branch. The rope key is one for all heads: its
    gradient is the sum over the heads of what is written here in float32.
    """
    tiles = tl.cdiv(T, BLOCK_K)
    i_k = tl.program_id(0) % tiles  # the first keys have the most queries
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
    o_n, o_r = tl.arange(0, BLOCK_DN), tl.arange(0, BLOCK_DR)
    b_k_rope = load_tile(k_rope + i_b * k_rope_b, o_k, o_r, k_rope_t, T, DR, BLOCK_DR, True)
    p_q_nope = q_nope + i_b * q_nope_b + i_h * q_nope_h
    p_q_rope = q_rope + i_b * q_rope_b + i_h * q_rope_h
    p_d_out = d_out + i_b * d_out_b + i_h * d_out_h
    first = i_k * BLOCK_K // BLOCK_Q * BLOCK_Q
    full = tl.minimum(tl.cdiv((i_k + 1) * BLOCK_K, BLOCK_Q) * BLOCK_Q, T)  # queries from here on are later
    b_d_k_rope = tl.zeros([BLOCK_K, BLOCK_DR], tl.float32)
    for i_j in tl.range(0, J):
        i_j64 = tl.cast(i_j, tl.int64)
        p_k_nope = k_nope + i_j64 * k_nope_j + i_b * k_nope_b + i_h * k_nope_h
        p_v = v + i_j64 * v_j + i_b * v_b + i_h * v_h
        o_row = ((i_j64 * B + i_b) * H + i_h) * T
        b_k_nope = load_tile(p_k_nope, o_k, o_n, k_nope_t, T, DN, BLOCK_DN, True)
        b_v = load_tile(p_v, o_k, o_n, v_t, T, DN, BLOCK_DN, True)
        b_d_k_nope = tl.zeros([BLOCK_K, BLOCK_DN], tl.float32)
        b_d_v = tl.zeros([BLOCK_K, BLOCK_DN], tl.float32)
        b_d_k_nope, b_d_k_rope, b_d_v = key_gradient_over_queries(
            b_d_k_nope, b_d_k_rope, b_d_v, b_k_nope, b_k_rope, b_v, o_k, p_q_nope, p_q_rope, p_d_out,
            lse + o_row, delta + o_row, q_nope_t, q_rope_t, d_out_t, scale, T, first, full,
            DN, DR, BLOCK_DN, BLOCK_DR, BLOCK_Q, True,
        )  # fmt: skip
        b_d_k_nope, b_d_k_rope, b_d_v = key_gradient_over_queries(
            b_d_k_nope, b_d_k_rope, b_d_v, b_k_nope, b_k_rope, b_v, o_k, p_q_nope, p_q_rope, p_d_out,
            lse + o_row, delta + o_row, q_nope_t, q_rope_t, d_out_t, scale, T, full, T,
            DN, DR, BLOCK_DN, BLOCK_DR, BLOCK_Q, False,
        )  # fmt: skip
        o_branch = ((i_j64 * B + i_b) * T * H + i_h) * DN
        store_tile(d_k_nope + o_branch, b_d_k_nope * scale, o_k, o_n, H * DN, T, DN)
        store_tile(d_v + o_branch, b_d_v, o_k, o_n, H * DN, T, DN)
    store_tile(d_k_rope + (i_b * H + i_h) * T * DR, b_d_k_rope * scale, o_k, o_r, DR, T, DR)
