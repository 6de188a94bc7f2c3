"""Latent attention in Triton, forward and backward, one program a (tile, head), walking over the head's branches.

The split query is read once for all branches, the logits of the shared rope key are added to those of each branch
without a concatenated key, and what a sum over branches wants (the output, the query's and the rope key's gradients)
is summed in registers. Nothing is added by two programs, so the same input gives the same bits.

Causal softmax attention is the online-softmax method of Dao, "FlashAttention-2" (arXiv:2307.08691), algorithms 1 and
2; the logits are those of `reference.py`. Exponents have base 2, as the hardware has: logits are multiplied by
log2(e), and `lse` is the logarithm to base 2.

Every tile is masked, also those that are wholly earlier than their queries, and addresses are not hoisted out of the
loops (`disable_licm`): with a loop of its own for the unmasked tiles, and hoisting, sm_90 spilled 136 bytes in the
forward and 552 in the query gradient (two branches, the paper's head dims, 64 x 64 tiles); so it spills none.

Shapes: B batch, T tokens, H heads, J branches; DN nope head dim (keys and values), DR rope head dim. Names: `i_`
index, `o_` offsets, `p_` pointer, `b_` block in registers, `m_` mask, CAPITALS known when compiled. A stride is named
after its tensor and the letter of its dimension; the last stride of every tensor is 1. What a kernel writes is
contiguous: `out`, `d_q_nope` (B, T, H, DN), `d_q_rope` (B, T, H, DR), `branch_out`, `d_k_nope`, `d_v`
(J, B, T, H, DN), `lse`, `delta` (J, B, H, T), `d_k_rope` (B, H, T, DR), one a head.

Triton reads TRITON_INTERPRET when it decorates, so whoever wants the interpreter sets it before this is imported.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(p, first, stride_t, T, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """BLOCK_T rows of the (T, D) matrix at `p`, from row `first` on; zero outside of it.

    The tile's start is a 64-bit number; within the tile 32 bits do, which the launch makes sure of.
    """
    o_t, o_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    p_tile = p + tl.cast(first, tl.int64) * stride_t + (o_t[:, None] * stride_t + o_d[None, :])
    if D == BLOCK_D:
        return tl.load(p_tile, mask=(first + o_t < T)[:, None], other=0.0)
    return tl.load(p_tile, mask=(first + o_t < T)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def store_tile(p, b_tile, first, stride_t, T, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile to the (T, D) matrix at `p`, from row `first` on, and nothing outside of it."""
    o_t, o_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    p_tile = p + tl.cast(first, tl.int64) * stride_t + (o_t[:, None] * stride_t + o_d[None, :])
    tl.store(p_tile, b_tile.to(p.dtype.element_ty), mask=(first + o_t < T)[:, None] & (o_d < D)[None, :])


@triton.jit
def logits(b_row_nope, b_row_rope, b_column_nope, b_column_rope, scale, m_seen):
    """scale log2(e) (nope . nope + rope . rope), queries down and keys across or the reverse; -inf outside m_seen.

    Keys beyond T need no mask of their own: they are later than every query below T, and no other is stored.
    """
    b_s = tl.dot(b_row_nope, tl.trans(b_column_nope), input_precision="ieee")
    b_s = tl.dot(b_row_rope, tl.trans(b_column_rope), acc=b_s, input_precision="ieee")
    return tl.where(m_seen, b_s * (scale * LOG2_E), float("-inf"))


@triton.jit
def forward_kernel(
    q_nope, q_rope, k_nope, k_rope, v, out, branch_out, lse, scale, B, T, H,
    q_nope_b, q_nope_t, q_nope_h, q_rope_b, q_rope_t, q_rope_h,
    k_nope_j, k_nope_b, k_nope_t, k_nope_h, k_rope_b, k_rope_t, v_j, v_b, v_t, v_h,
    J: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, BLOCK_DN: tl.constexpr, BLOCK_DR: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = sum_j softmax(S_j) V_j; branch_out_j = softmax(S_j) V_j, if J > 1; lse_j = log2 sum_keys 2^(S_j).

    S_j = scale log2(e) (Q_nope K_nope_j^T + Q_rope K_rope^T), causal. FlashAttention-2, algorithm 1, once a branch:
    for each key tile max' = max(max, rowmax S), P = 2^(S - max'), a = 2^(max - max'), sum = a sum + rowsum P,
    O = a O + P V; at the end O / sum.
    """
    tiles = tl.cdiv(T, BLOCK_Q)
    i_q = tiles - 1 - tl.program_id(0) % tiles  # the longest first: the last ones to run are then short
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    first_q = i_q * BLOCK_Q
    o_q = first_q + tl.arange(0, BLOCK_Q)
    b_q_nope = load_tile(q_nope + i_b * q_nope_b + i_h * q_nope_h, first_q, q_nope_t, T, DN, BLOCK_Q, BLOCK_DN)
    b_q_rope = load_tile(q_rope + i_b * q_rope_b + i_h * q_rope_h, first_q, q_rope_t, T, DR, BLOCK_Q, BLOCK_DR)
    p_k_rope = k_rope + i_b * k_rope_b
    last = tl.minimum(first_q + BLOCK_Q, T)
    b_out = tl.zeros([BLOCK_Q, BLOCK_DN], tl.float32)
    for i_j in tl.range(0, J, disable_licm=True):
        i_j64 = tl.cast(i_j, tl.int64)
        p_k_nope = k_nope + i_j64 * k_nope_j + i_b * k_nope_b + i_h * k_nope_h
        p_v = v + i_j64 * v_j + i_b * v_b + i_h * v_h
        b_o = tl.zeros([BLOCK_Q, BLOCK_DN], tl.float32)
        b_sum = tl.zeros([BLOCK_Q], tl.float32)
        b_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        for first_k in tl.range(0, last, BLOCK_K, disable_licm=True):
            b_k_nope = load_tile(p_k_nope, first_k, k_nope_t, T, DN, BLOCK_K, BLOCK_DN)
            b_k_rope = load_tile(p_k_rope, first_k, k_rope_t, T, DR, BLOCK_K, BLOCK_DR)
            m_seen = o_q[:, None] >= first_k + tl.arange(0, BLOCK_K)[None, :]
            b_s = logits(b_q_nope, b_q_rope, b_k_nope, b_k_rope, scale, m_seen)
            b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
            b_p = tl.exp2(b_s - b_new_max[:, None])
            b_rescale = tl.exp2(b_max - b_new_max)
            b_sum = b_sum * b_rescale + tl.sum(b_p, axis=1)
            b_v = load_tile(p_v, first_k, v_t, T, DN, BLOCK_K, BLOCK_DN)
            b_o = tl.dot(b_p.to(b_v.dtype), b_v, acc=b_o * b_rescale[:, None], input_precision="ieee")
            b_max = b_new_max
        b_o = b_o / b_sum[:, None]
        b_out += b_o
        o_lse = ((i_j64 * B + i_b) * H + i_h) * T + o_q
        tl.store(lse + o_lse, b_max + tl.log2(b_sum), mask=o_q < T)
        if J > 1:
            p_branch_out = branch_out + ((i_j64 * B + i_b) * T * H + i_h) * DN
            store_tile(p_branch_out, b_o, first_q, H * DN, T, DN, BLOCK_Q, BLOCK_DN)
    store_tile(out + (i_b * T * H + i_h) * DN, b_out, first_q, H * DN, T, DN, BLOCK_Q, BLOCK_DN)


@triton.jit
def query_gradient_kernel(
    q_nope, q_rope, k_nope, k_rope, v, d_out, branch_out, lse, delta, d_q_nope, d_q_rope, scale, B, T, H,
    q_nope_b, q_nope_t, q_nope_h, q_rope_b, q_rope_t, q_rope_h,
    k_nope_j, k_nope_b, k_nope_t, k_nope_h, k_rope_b, k_rope_t, v_j, v_b, v_t, v_h, d_out_b, d_out_t, d_out_h,
    J: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, BLOCK_DN: tl.constexpr, BLOCK_DR: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dQ = scale sum_j dS_j K_j, nope and rope; and delta_j = rowsum(dO O_j), which the key kernel reads after it.

    FlashAttention-2, algorithm 2, the part of the query, once a branch: P = 2^(S - lse), dS = P (dO V^T - delta).
    """
    tiles = tl.cdiv(T, BLOCK_Q)
    i_q = tiles - 1 - tl.program_id(0) % tiles
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    first_q = i_q * BLOCK_Q
    o_q = first_q + tl.arange(0, BLOCK_Q)
    b_q_nope = load_tile(q_nope + i_b * q_nope_b + i_h * q_nope_h, first_q, q_nope_t, T, DN, BLOCK_Q, BLOCK_DN)
    b_q_rope = load_tile(q_rope + i_b * q_rope_b + i_h * q_rope_h, first_q, q_rope_t, T, DR, BLOCK_Q, BLOCK_DR)
    b_d_out = load_tile(d_out + i_b * d_out_b + i_h * d_out_h, first_q, d_out_t, T, DN, BLOCK_Q, BLOCK_DN)
    p_k_rope = k_rope + i_b * k_rope_b
    last = tl.minimum(first_q + BLOCK_Q, T)
    b_d_q_nope = tl.zeros([BLOCK_Q, BLOCK_DN], tl.float32)
    b_d_q_rope = tl.zeros([BLOCK_Q, BLOCK_DR], tl.float32)
    for i_j in tl.range(0, J, disable_licm=True):
        i_j64 = tl.cast(i_j, tl.int64)
        p_k_nope = k_nope + i_j64 * k_nope_j + i_b * k_nope_b + i_h * k_nope_h
        p_v = v + i_j64 * v_j + i_b * v_b + i_h * v_h
        p_branch_out = branch_out + ((i_j64 * B + i_b) * T * H + i_h) * DN
        b_branch_out = load_tile(p_branch_out, first_q, H * DN, T, DN, BLOCK_Q, BLOCK_DN)
        b_delta = tl.sum(b_d_out.to(tl.float32) * b_branch_out.to(tl.float32), axis=1)
        o_lse = ((i_j64 * B + i_b) * H + i_h) * T + o_q
        tl.store(delta + o_lse, b_delta, mask=o_q < T)
        b_lse = tl.load(lse + o_lse, mask=o_q < T, other=0.0)
        for first_k in tl.range(0, last, BLOCK_K, disable_licm=True):
            b_k_nope = load_tile(p_k_nope, first_k, k_nope_t, T, DN, BLOCK_K, BLOCK_DN)
            b_k_rope = load_tile(p_k_rope, first_k, k_rope_t, T, DR, BLOCK_K, BLOCK_DR)
            b_v = load_tile(p_v, first_k, v_t, T, DN, BLOCK_K, BLOCK_DN)
            m_seen = o_q[:, None] >= first_k + tl.arange(0, BLOCK_K)[None, :]
            b_s = logits(b_q_nope, b_q_rope, b_k_nope, b_k_rope, scale, m_seen)
            b_d_p = tl.dot(b_d_out, tl.trans(b_v), input_precision="ieee")
            b_d_s = (tl.exp2(b_s - b_lse[:, None]) * (b_d_p - b_delta[:, None])).to(b_k_nope.dtype)
            b_d_q_nope = tl.dot(b_d_s, b_k_nope, acc=b_d_q_nope, input_precision="ieee")
            b_d_q_rope = tl.dot(b_d_s, b_k_rope, acc=b_d_q_rope, input_precision="ieee")
    p_d_q_nope, p_d_q_rope = d_q_nope + (i_b * T * H + i_h) * DN, d_q_rope + (i_b * T * H + i_h) * DR
    store_tile(p_d_q_nope, b_d_q_nope * scale, first_q, H * DN, T, DN, BLOCK_Q, BLOCK_DN)
    store_tile(p_d_q_rope, b_d_q_rope * scale, first_q, H * DR, T, DR, BLOCK_Q, BLOCK_DR)


@triton.jit
def key_gradient_kernel(
    q_nope, q_rope, k_nope, k_rope, v, d_out, lse, delta, d_k_nope, d_k_rope, d_v, scale, B, T, H,
    q_nope_b, q_nope_t, q_nope_h, q_rope_b, q_rope_t, q_rope_h,
    k_nope_j, k_nope_b, k_nope_t, k_nope_h, k_rope_b, k_rope_t, v_j, v_b, v_t, v_h, d_out_b, d_out_t, d_out_h,
    J: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, BLOCK_DN: tl.constexpr, BLOCK_DR: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dK_nope_j = scale dS_j^T Q_nope, dV_j = P_j^T dO; and for its head dK_rope = scale sum_j dS_j^T Q_rope.

    FlashAttention-2, algorithm 2, the part of the keys, once a branch: P = 2^(S - lse), dS = P (dO V^T - delta). The
    rope key is one for all heads: its gradient is the sum over the heads of what is written here in float32. Queries
    beyond T are read as zeros, dO too: they add nothing.
    """
    tiles = tl.cdiv(T, BLOCK_K)
    i_k = tl.program_id(0) % tiles  # the longest first: the first keys have the most queries
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    first_k = i_k * BLOCK_K
    o_k = first_k + tl.arange(0, BLOCK_K)
    b_k_rope = load_tile(k_rope + i_b * k_rope_b, first_k, k_rope_t, T, DR, BLOCK_K, BLOCK_DR)
    p_q_nope = q_nope + i_b * q_nope_b + i_h * q_nope_h
    p_q_rope = q_rope + i_b * q_rope_b + i_h * q_rope_h
    p_d_out = d_out + i_b * d_out_b + i_h * d_out_h
    b_d_k_rope = tl.zeros([BLOCK_K, BLOCK_DR], tl.float32)
    for i_j in tl.range(0, J, disable_licm=True):
        i_j64 = tl.cast(i_j, tl.int64)
        p_k_nope = k_nope + i_j64 * k_nope_j + i_b * k_nope_b + i_h * k_nope_h
        p_v = v + i_j64 * v_j + i_b * v_b + i_h * v_h
        b_k_nope = load_tile(p_k_nope, first_k, k_nope_t, T, DN, BLOCK_K, BLOCK_DN)
        b_v = load_tile(p_v, first_k, v_t, T, DN, BLOCK_K, BLOCK_DN)
        b_d_k_nope = tl.zeros([BLOCK_K, BLOCK_DN], tl.float32)
        b_d_v = tl.zeros([BLOCK_K, BLOCK_DN], tl.float32)
        for first_q in tl.range(first_k // BLOCK_Q * BLOCK_Q, T, BLOCK_Q, disable_licm=True):
            o_q = first_q + tl.arange(0, BLOCK_Q)
            o_lse = ((i_j64 * B + i_b) * H + i_h) * T + o_q
            b_q_nope = load_tile(p_q_nope, first_q, q_nope_t, T, DN, BLOCK_Q, BLOCK_DN)
            b_q_rope = load_tile(p_q_rope, first_q, q_rope_t, T, DR, BLOCK_Q, BLOCK_DR)
            b_d_out = load_tile(p_d_out, first_q, d_out_t, T, DN, BLOCK_Q, BLOCK_DN)
            b_lse = tl.load(lse + o_lse, mask=o_q < T, other=0.0)
            b_delta = tl.load(delta + o_lse, mask=o_q < T, other=0.0)
            # Keys down: what is summed over the queries then needs no transposition.
            b_s = logits(b_k_nope, b_k_rope, b_q_nope, b_q_rope, scale, o_q[None, :] >= o_k[:, None])
            b_p = tl.exp2(b_s - b_lse[None, :])
            b_d_v = tl.dot(b_p.to(b_d_out.dtype), b_d_out, acc=b_d_v, input_precision="ieee")
            b_d_p = tl.dot(b_v, tl.trans(b_d_out), input_precision="ieee")
            b_d_s = (b_p * (b_d_p - b_delta[None, :])).to(b_q_nope.dtype)
            b_d_k_nope = tl.dot(b_d_s, b_q_nope, acc=b_d_k_nope, input_precision="ieee")
            b_d_k_rope = tl.dot(b_d_s, b_q_rope, acc=b_d_k_rope, input_precision="ieee")
        o_branch = ((i_j64 * B + i_b) * T * H + i_h) * DN
        store_tile(d_k_nope + o_branch, b_d_k_nope * scale, first_k, H * DN, T, DN, BLOCK_K, BLOCK_DN)
        store_tile(d_v + o_branch, b_d_v, first_k, H * DN, T, DN, BLOCK_K, BLOCK_DN)
    store_tile(d_k_rope + (i_b * H + i_h) * T * DR, b_d_k_rope * scale, first_k, DR, T, DR, BLOCK_K, BLOCK_DR)
