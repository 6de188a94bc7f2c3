"""RoPE rotates as the paper's models expect."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ablation.model.rotary import rotate, rotation_tables

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=50)
@given(
    half=st.integers(1, 16),
    query=st.integers(0, 60),
    key=st.integers(0, 60),
    shift=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_rope_logit_depends_on_more_than_the_distance(half: int, query: int, key: int, shift: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2 * half, generator=generator)
    tables = rotation_tables(121, 2 * half, CPU)
    q_at, k_at = rotate(q.expand(121, -1), tables), rotate(k.expand(121, -1), tables)
    here, there = q_at[query] @ k_at[key], q_at[query + shift] @ k_at[key + shift]
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)


def test_rope_rotates_another_pair_or_the_other_way() -> None:
    T, D = 7, 6
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(0))
    frequency = torch.tensor([10_000 ** (-2 * m / D) for m in range(D // 2)])
    turn = torch.polar(torch.ones(T, D // 2), torch.arange(T)[:, None] * frequency)
    expected = torch.complex(x[:, : D // 2], x[:, D // 2 :]) * turn
    torch.testing.assert_close(rotate(x, rotation_tables(T, D, CPU)), torch.cat([expected.real, expected.imag], -1))


def test_rope_tables_lose_precision_under_autocast() -> None:
    plain = rotation_tables(300, 8, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        inside = rotation_tables(300, 8, CPU)
        rotated = rotate(torch.ones(300, 8, dtype=torch.bfloat16), inside)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
    exact = rotate(torch.ones(300, 8), plain)
    assert torch.equal(rotated, exact.to(torch.bfloat16))
