"""The scale ablation of Multi-Head Low-Rank Attention, from corpus to figure.

`load_snapshot(path)` returns a trained model, ready for `(B, T)` token ids.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_ablation.model.snapshots import load_snapshot

__all__ = ["load_snapshot"]


def __getattr__(name: str) -> Any:
    # Late, because importing torch takes three seconds that most commands do not need.
    if name == "load_snapshot":
        from attention_ablation.model.snapshots import load_snapshot

        return load_snapshot
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
