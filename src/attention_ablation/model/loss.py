"""The loss of next-token prediction, and the one place where its implementation is chosen.

Shapes: B batch, T tokens, V vocabulary, d width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_ablation.errors import UserError
from attention_ablation.model.transformer import LanguageModel

IMPLEMENTATIONS = ("logits", "chunked")

# Above it the logits of a micro-batch, kept in float32 with their gradient, are worth the chunks: at the paper's
# vocabulary of 50,304 one sequence of 2,048 tokens is 0.4 GB of logits.
LOGITS_BYTES = 256 * 2**20


def choose_loss(requested: str, *, tokens: int, vocabulary_size: int) -> tuple[str, str]:
    """Return (implementation, reason) for `requested`: "auto" or one of IMPLEMENTATIONS.

    `tokens` is the number of tokens of a micro-batch.
    """
    if requested == "auto":
        size = 4 * tokens * vocabulary_size
        chosen = "chunked" if size > LOGITS_BYTES else "logits"
        return chosen, f"auto: a micro-batch has {size / 2**20:,.0f} MiB of logits"
    if requested not in IMPLEMENTATIONS:
        raise UserError(
            f"loss implementation: found {requested!r}, expected one of: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    return requested, "asked for"


class NextTokenLoss(nn.Module):
    """A language model under training: tokens in, mean loss out. Has the model's parameters, under `model.`."""

    def __init__(self, model: LanguageModel, *, implementation: str) -> None:
        super().__init__()
        self.model = model
        self.implementation = implementation

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets (B, T) int64 -> mean cross-entropy, nats a token, float32.

        logits: whole logits, in float32. chunked: PyTorch's `linear_cross_entropy`, which never holds them whole.
        """
        if self.implementation == "logits":
            return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), targets.flatten())
        return F.linear_cross_entropy(
            self.model.hidden(tokens).flatten(0, 1),
            self.model.embedding.weight,
            targets.flatten(),
            options=torch.nn.LinearCrossEntropyOptions(),
        )
