"""The Triton kernels, interpreted, against the reference in float64. Only float32: bfloat16 dots are wrong there."""

import pytest
import torch
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.kernels import triton_launch
from attention_ablation.kernels.latent_attention import latent_attention
from attention_ablation.kernels.reference import latent_attention_reference
from attention_ablation.kernels.tiles import Tile, Tiles

NAMES = ("output", "q_nope", "q_rope", "k_nope", "k_rope", "v")
KERNELS = ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"]


def random_inputs(
    J: int, B: int, T: int, H: int, Dn: int, Dr: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T + J)
    shapes = ((B, T, H, Dn), (B, T, H, Dr), (J, B, T, H, Dn), (B, T, Dr), (J, B, T, H, Dn))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def output_and_gradients(function, inputs: list[Tensor], d_out: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves, softmax_scale=(leaves[0].shape[-1] + leaves[1].shape[-1]) ** -0.5)
    return [output.detach(), *torch.autograd.grad(output, leaves, d_out)]


def triton(*inputs: Tensor, softmax_scale: float) -> Tensor:
    return latent_attention(*inputs, softmax_scale=softmax_scale, implementation="triton")


def assert_equal_to_the_reference(
    inputs: list[Tensor], d_out: Tensor | None = None, of_largest: float = 2e-6
) -> None:
    if d_out is None:
        # An eighth: at T 1 the gradients of q and k are 0, and what is left is the rounding of terms that cancel, of
        # the size of d_out; at 1 that is up to 4e-7.
        d_out = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype) / 8
    found = output_and_gradients(triton, inputs, d_out)
    expected = output_and_gradients(latent_attention_reference, [x.double() for x in inputs], d_out.double())
    for name, a, b in zip(NAMES, found, expected, strict=True):
        error = float((a.double() - b).abs().max())
        assert error <= of_largest * float(b.abs().max()) + 1e-7, f"{name}: off by {error}"


@pytest.mark.parametrize("T", [1, 7, 63, 64, 65, 130])
@pytest.mark.parametrize(
    ("J", "B", "H", "Dn", "Dr"), [(1, 2, 3, 20, 12), (2, 1, 3, 33, 7), (3, 1, 1, 4, 4), (4, 2, 1, 16, 10)]
)
def test_kernels_depart_from_the_reference(T, J, B, H, Dn, Dr, launched):
    assert_equal_to_the_reference(random_inputs(J, B, T, H, Dn, Dr))
    assert launched == KERNELS


@pytest.mark.parametrize(("Dn", "Dr"), [(128, 64), (64, 128), (100, 36)])
def test_kernels_depart_from_the_reference_at_large_heads(Dn, Dr, launched):
    assert_equal_to_the_reference(random_inputs(2, 1, 70, 1, Dn, Dr))
    assert launched == KERNELS


@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (32, 32)])
def test_the_tile_changes_more_than_rounding(tile, launched, monkeypatch):
    tiles = Tiles(*[Tile(*tile, 4, 1)] * 3)
    monkeypatch.setattr(triton_launch, "tiles_for", lambda *_, **__: tiles)
    assert_equal_to_the_reference(random_inputs(2, 1, 70, 1, 8, 4))
    assert launched == KERNELS


def test_float16_is_read_or_written_as_something_else(launched):
    assert_equal_to_the_reference(random_inputs(2, 1, 40, 2, 16, 8, torch.float16), of_largest=3e-3)
    assert launched == KERNELS


def test_views_are_read_as_if_they_were_contiguous(launched, monkeypatch):
    J, B, T, H, Dn, Dr = 2, 2, 37, 3, 12, 6
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, T, H, Dn + Dr, generator=generator)
    kv = torch.randn(B, H, J, T, 2, Dn, generator=generator).permute(2, 0, 3, 1, 4, 5)
    k_rope = torch.randn(B, T, 50 + Dr, generator=generator)[..., 50:]
    inputs = [q[..., :Dn], q[..., Dn:], kv[..., 0, :], k_rope, kv[..., 1, :]]
    d_out = torch.randn(B, H, T, Dn, generator=generator).transpose(1, 2)
    copies = []
    contiguous = Tensor.contiguous
    monkeypatch.setattr(Tensor, "contiguous", lambda x: copies.append(x) or contiguous(x))
    assert_equal_to_the_reference(inputs, d_out)
    assert launched == KERNELS
    assert not copies


def test_tensors_without_an_inner_last_dimension_are_misread(launched):
    inputs = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in random_inputs(2, 1, 20, 2, 8, 4)]
    assert_equal_to_the_reference(inputs, torch.ones(()).expand(1, 20, 2, 8))
    assert launched == KERNELS


def test_offsets_beyond_32_bits_wrap(launched, tmp_path):
    T, Dn, stride = 200, 8, 2**24 - 8
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=T * stride)  # 13 GB, of which 1 MB is used
    far = memory.as_strided((1, T, 1, Dn), (0, stride, Dn, 1))
    assert 192 * stride > 2**31  # 192: where the last tile starts
    inputs = random_inputs(1, 1, T, 1, Dn, 4)
    far.copy_(inputs[0])
    near = output_and_gradients(triton, inputs, torch.ones_like(inputs[0]))
    for position in (0, 2, 4):  # q_nope, k_nope, v
        moved = list(inputs)
        moved[position] = far if position == 0 else far[None]
        far.copy_(inputs[position].view(far.shape))
        for a, b in zip(output_and_gradients(triton, moved, torch.ones_like(inputs[0])), near, strict=True):
            assert torch.equal(a, b)


def guarded(like: Tensor, fill: float = float("nan"), guard: int = 3000) -> tuple[Tensor, Tensor]:
    """A tensor shaped as `like`, all `fill`, in the middle of a buffer of sevens; and the buffer."""
    buffer = torch.full((like.numel() + 2 * guard,), 7.0)
    inside = buffer[guard : guard + like.numel()].view(like.shape)
    inside.fill_(fill)
    return inside, buffer


@pytest.mark.parametrize("J", [1, 2])
def test_kernels_write_outside_of_their_buffers_or_leave_holes(J, interpreter):
    B, T, H, Dn, Dr = 2, 65, 3, 12, 6
    inputs = []
    for x in random_inputs(J, B, T, H, Dn, Dr):
        # A read outside would meet NaN.
        buffer = torch.full((x.numel() + 6000,), float("nan"))
        inputs.append(buffer[3000 : 3000 + x.numel()].view(x.shape).copy_(x))
    copies = [x.clone() for x in inputs]
    q_nope, q_rope, k_nope, _, v = inputs
    statistics = torch.empty(J, B, H, T)
    out, lse, delta = guarded(q_nope), guarded(statistics), guarded(statistics)
    branch_out = guarded(k_nope if J > 1 else torch.empty(0))
    d_q_nope, d_q_rope, d_k_nope, d_v = (guarded(x) for x in (q_nope, q_rope, k_nope, v))
    d_k_rope = guarded(torch.empty(B, H, T, Dr))
    tile, d_out, scale = Tile(32, 16, 4, 1), torch.randn(q_nope.shape), 0.3
    triton_launch.forward_launch(inputs, out[0], branch_out[0], lse[0], scale, tile).run()
    triton_launch.query_gradient_launch(
        inputs, d_out, (branch_out if J > 1 else out)[0], lse[0], delta[0], d_q_nope[0], d_q_rope[0], scale, tile
    ).run()
    triton_launch.key_gradient_launch(
        inputs, d_out, lse[0], delta[0], d_k_nope[0], d_k_rope[0], d_v[0], scale, tile
    ).run()
    for inside, buffer in (out, branch_out, lse, delta, d_q_nope, d_q_rope, d_k_nope, d_k_rope, d_v):
        assert inside.isfinite().all()
        assert (buffer[:3000] == 7).all() and (buffer[-3000:] == 7).all()
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_an_empty_batch_is_launched(launched):
    inputs = random_inputs(2, 0, 5, 2, 8, 4)
    assert triton(*inputs, softmax_scale=1.0).shape == (0, 5, 2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.double(), "expected one type for all"),
        (lambda x: x[:, :-1], "expected"),
        (lambda x: torch.zeros(1, 5, 2, 130), "found shapes"),
    ],
)
def test_inputs_that_the_kernels_do_not_take_are_computed_wrongly(change, message, interpreter):
    q_nope, *others = random_inputs(2, 1, 5, 2, 8, 4)
    with pytest.raises(UserError, match=message):
        triton(change(q_nope), *others, softmax_scale=1.0)


def test_heads_that_no_tile_holds_are_computed_wrongly(interpreter):
    with pytest.raises(UserError, match="128 is the largest"):
        triton(*random_inputs(1, 1, 2, 1, 130, 4), softmax_scale=1.0)


def test_bfloat16_which_the_interpreter_gets_wrong_is_computed_all_the_same(interpreter):
    inputs = random_inputs(1, 1, 4, 1, 16, 16, torch.bfloat16)
    with pytest.raises(UserError, match="bfloat16 is wrong there"):
        triton(*inputs, softmax_scale=1.0)
