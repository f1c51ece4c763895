"""The size of a model in memory."""

from __future__ import annotations

from typing import Any


def weights_bytes(model: Any) -> int:
    """Bytes of a model's weights, tied ones counted once."""
    from genctl.native.model import NativeModel

    if isinstance(model, NativeModel):
        return model.bytes()
    from genctl.models import packed_layers

    return packed_layers.weights_bytes(model)
