"""The decoder-only language model: pre-norm blocks around latent attention, tied embedding.

Shapes: B batch, T tokens, V vocabulary, d width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention_ablation.kernels.latent_attention import require_implementation
from attention_ablation.model.attention import LatentAttention, ScalingTensors
from attention_ablation.model.config import ModelConfig, Scaling, scaling_factors
from attention_ablation.model.layers import Embedding, RMSNorm, SwiGLU
from attention_ablation.model.rotary import Rotation, rotation_tables


class Block(nn.Module):
    """x += attention(RMSNorm(x)); x += mlp(RMSNorm(x))."""

    def __init__(self, config: ModelConfig, *, attention: str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = LatentAttention(config, implementation=attention)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = SwiGLU(config.width, config.mlp_width)

    def forward(self, x: Tensor, rotation: Rotation, scaling: ScalingTensors) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, scaling)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """One variant (`config`) in one arm (`scaling`); both arms have the same parameters and the same graph.

    The matrices are unfilled until `initialize` or a loader has filled them.
    """

    alpha_query: Tensor
    alpha_key_value: Tensor
    alpha_output: Tensor

    def __init__(self, config: ModelConfig, scaling: Scaling, *, attention: str) -> None:
        """`attention` is an implementation that `choose_implementation` returned; UserError for any other."""
        super().__init__()
        require_implementation(attention)
        self.activation_checkpointing = False  # keep a block's input alone and compute it again in the backward pass
        self.config = config
        self.scaling = scaling
        self.embedding = Embedding(config.vocabulary_size, config.width)
        self.blocks = nn.ModuleList(Block(config, attention=attention) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        names = ("alpha_query", "alpha_key_value", "alpha_output")
        for name, factor in zip(names, scaling_factors(config, scaling), strict=True):
            # A 0-d tensor on the CPU goes with tensors of any device, so a model built on the meta device and
            # given its weights by assignment needs nothing else.
            self.register_buffer(name, torch.tensor(factor, device="cpu"), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V), in bfloat16 under bfloat16 autocast."""
        return F.linear(self.hidden(tokens), self.embedding.weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) int64 -> what the logits are projected from, (B, T, d)."""
        rotation = rotation_tables(tokens.shape[1], self.config.rope_dim, tokens.device)
        scaling = ScalingTensors(self.alpha_query, self.alpha_key_value, self.alpha_output)
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                # Nothing random runs in a block, so no generator's state has to be kept.
                x = checkpoint(block, x, rotation, scaling, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rotation, scaling)
        return self.norm(x)
