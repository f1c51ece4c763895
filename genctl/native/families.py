"""Reading a config.json with the function of its family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from genctl.native.config import Config, NotNative
from genctl.native.names import Found

# Names of the activation functions that `mlp` has.
ACTIVATIONS = frozenset(
    {"silu", "swish", "relu", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu"}
)


def read_config(config: dict[str, Any], read: Callable[[Config], Found], context: int | None = None) -> Found:
    """The spec and the names of the tensors of a config.json; `read` is the function of its family. Raises NotNative.

    `context` is its `max_position_embeddings` where config.json has none.
    """
    longest = {} if context is None else {"max_position_embeddings": context}
    reader = Config({**longest, **config})
    try:
        spec, names = read(reader)
    except (TypeError, ValueError, ArithmeticError) as error:  # config.json is untrusted
        family = config.get("model_type")
        raise NotNative(f"config.json has a field of another type than {family} has: {error}") from error
    reader.rest()
    if not isinstance(spec.activation, str) or spec.activation not in ACTIVATIONS:
        raise NotNative(f"config.json: activation {spec.activation!r:.40} is not known to the native runtime")
    for what in ("scaling", "logits_scale", "softcap", "final_softcap"):
        if getattr(spec, what) == 0:  # transformers divides by it, or takes another value for it
            raise NotNative(f"config.json: a {what} of 0")
    if spec.heads % spec.kv_heads:
        raise NotNative(f"{spec.heads} heads cannot share {spec.kv_heads}")
    return spec, names
