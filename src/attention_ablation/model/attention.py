"""MLA, GLA and MLRA as one module (paper, section "One family of attention").

Shapes: B batch, T tokens, H heads, G groups, J branches, L = J*G latents, C latent dim; head dims Dn (nope,
also value) and Dr (rope), D = Dn + Dr; N = H/G heads of one group times 2*Dn. `x_BTHD` has that shape.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attention_ablation.kernels.latent_attention import latent_attention
from attention_ablation.model.config import ModelConfig
from attention_ablation.model.layers import Linear, RMSNorm
from attention_ablation.model.rotary import Rotation, rotate


class ScalingTensors(NamedTuple):
    """alpha_q, alpha_kv and alpha_o as 0-d tensors.

    Tensors and not numbers: numbers would be constants of the compiled graph, and each arm would compile
    its own.
    """

    query: Tensor
    key_value: Tensor
    output: Tensor


class LatentAttention(nn.Module):
    """Causal attention with keys and values out of L latents; branch j and group i read latent j*G + i."""

    def __init__(self, config: ModelConfig, *, implementation: str) -> None:
        super().__init__()
        self.config = config
        self.implementation = implementation
        heads, nope_dim, rope_dim = config.heads, config.nope_dim, config.rope_dim
        self.softmax_scale = (nope_dim + rope_dim) ** -0.5
        self.query_down = Linear(config.width, config.query_rank)
        self.query_norm = RMSNorm(config.query_rank)
        self.query_up = Linear(config.query_rank, heads * (nope_dim + rope_dim))
        self.key_value_down = Linear(config.width, config.kv_rank + rope_dim)
        self.latent_norm = RMSNorm(config.latents, config.latent_dim)
        self.key_value_up = nn.Parameter(  # (L, C, N)
            torch.empty(config.latents, config.latent_dim, heads // config.groups * 2 * nope_dim)
        )
        self.output = Linear(heads * nope_dim, config.width)

    def forward(self, x: Tensor, rotation: Rotation, scaling: ScalingTensors) -> Tensor:
        """x (B, T, d), normalised by the block -> (B, T, d)."""
        q_nope, q_rope = self.queries(x, rotation, scaling)
        k_nope, k_rope, v = self.keys_and_values(x, rotation, scaling)
        out_BTHD = latent_attention(
            q_nope,
            q_rope,
            k_nope,
            k_rope,
            v,
            softmax_scale=self.softmax_scale,
            implementation=self.implementation,
        )
        return self.output(out_BTHD.flatten(2) * scaling.output)

    def queries(self, x: Tensor, rotation: Rotation, scaling: ScalingTensors) -> tuple[Tensor, Tensor]:
        """q_nope (B, T, H, Dn) and the rotated q_rope (B, T, H, Dr)."""
        config = self.config
        latent_BTR = self.query_norm(self.query_down(x), scaling.query)
        q_BTHD = self.query_up(latent_BTR).unflatten(2, (config.heads, config.nope_dim + config.rope_dim))
        q_nope, q_rope = q_BTHD.split([config.nope_dim, config.rope_dim], dim=-1)
        over_heads = Rotation(rotation.cosine[:, None], rotation.signed_sine[:, None])
        return q_nope, rotate(q_rope, over_heads)

    def keys_and_values(
        self, x: Tensor, rotation: Rotation, scaling: ScalingTensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """k_nope (J, B, T, H, Dn), the rotated k_rope (B, T, Dr), v (J, B, T, H, Dn)."""
        config = self.config
        B, T, _ = x.shape
        J, G, L, C = config.branches, config.groups, config.latents, config.latent_dim
        latents, k_rope = self.key_value_down(x).split([config.kv_rank, config.rope_dim], dim=-1)
        latents_BTLC = self.latent_norm(latents.unflatten(2, (L, C)), scaling.key_value)
        # One batched product for all latents: (L, B*T, C) @ (L, C, N).
        kv_LSN = torch.bmm(latents_BTLC.flatten(0, 1).transpose(0, 1), self.key_value_up)
        kv = kv_LSN.view(J, G, B, T, config.heads // G, 2, config.nope_dim)
        kv_JBTH2D = kv.permute(0, 2, 3, 1, 4, 5, 6).flatten(3, 4)  # heads group by group
        k_nope, v = kv_JBTH2D.unbind(-2)  # two selections instead would each fill a gradient of zeros
        return k_nope, rotate(k_rope, rotation), v
