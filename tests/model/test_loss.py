"""The loss: both implementations agree, and the choice between them is made once and said."""

import pytest
import torch

from attention_ablation.errors import UserError
from attention_ablation.model.loss import IMPLEMENTATIONS, NextTokenLoss, choose_loss
from attention_ablation.model.published import from_published
from attention_ablation.model.transformer import LanguageModel
from parity.fixtures import load_fixture


def loss_and_gradients(implementation: str, precision: torch.dtype) -> dict[str, torch.Tensor]:
    fixture = load_fixture("mlra_2")
    model = LanguageModel(fixture.config, fixture.scaling, attention="sdpa")
    model.load_state_dict(from_published(fixture.weights, fixture.config))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        loss = NextTokenLoss(model, implementation=implementation)(fixture.tokens, fixture.targets)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


# bfloat16: the chunks keep what whole logits round, 2 % of a gradient's largest entry.
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_chunks_and_whole_logits_give_one_loss_and_one_gradient(precision, tolerance):
    whole, chunked = (loss_and_gradients(name, precision) for name in IMPLEMENTATIONS)
    assert whole.keys() == chunked.keys()
    assert whole["loss"].dtype == chunked["loss"].dtype == torch.float32
    for name, expected in whole.items():
        torch.testing.assert_close(chunked[name], expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_whole_logits_are_never_made_by_the_chunked_loss(monkeypatch):
    monkeypatch.setattr(LanguageModel, "forward", lambda *_: pytest.fail("logits were made"))
    loss_and_gradients("chunked", torch.float32)


def test_the_size_of_the_logits_decides():
    assert choose_loss("auto", tokens=2048, vocabulary_size=2048)[0] == "logits"
    assert choose_loss("auto", tokens=2048, vocabulary_size=50_304) == (
        "chunked",
        "auto: a micro-batch has 393 MiB of logits",
    )
    assert choose_loss("logits", tokens=10**9, vocabulary_size=50_304) == ("logits", "asked for")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(UserError, match="found 'fused', expected one of: auto, logits, chunked"):
        choose_loss("fused", tokens=1, vocabulary_size=1)
