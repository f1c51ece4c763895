"""How large a model is in memory."""

from __future__ import annotations

from typing import Any


def weights_bytes(model: Any) -> int:
    """Bytes of a model's parameters and buffers, each storage once, however many modules share it."""
    try:
        from genctl.models import packing

        theirs = getattr(packing, "weights_bytes", None)
    except ImportError:
        theirs = None
    if theirs is not None:
        return int(theirs(model))
    seen: dict[int, int] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        seen[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(seen.values())
