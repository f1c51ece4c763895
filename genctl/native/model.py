"""A native model with its configuration and special tokens: the attributes of transformers' models that genctl uses."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from genctl.native.decoder import Decoder, Encoder
from genctl.native.linear import Joined, Linear
from genctl.native.spec import Spec


class NativeConfig:
    """config.json's fields as attributes; sizes that several families name differently under their usual names.

    The sizes of an encoder-decoder are its decoder's.
    """

    def __init__(self, fields: dict[str, Any], spec: Spec) -> None:
        self.__dict__.update(fields)
        self.is_encoder_decoder = spec.encoder is not None
        self.model_type: str = spec.family
        self.vocab_size, self.hidden_size, self.num_hidden_layers = spec.vocab, spec.hidden, spec.layers
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.tie_word_embeddings = spec.tied
        if spec.context is not None:
            self.max_position_embeddings = spec.context

    def get_text_config(self, decoder: bool = False) -> NativeConfig:
        """Itself: this configuration has no parts."""
        return self


class SpecialTokens:
    """Which ids end, pad and begin a text, by the checkpoint's generation settings."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.eos_token_id: int | list[int] | None = settings.get("eos_token_id")
        self.pad_token_id: int | None = settings.get("pad_token_id")
        self.bos_token_id: int | None = settings.get("bos_token_id")
        self.decoder_start_token_id: int | None = settings.get("decoder_start_token_id")


class NativeModel:
    """A decoder, perhaps with an encoder before it, its configuration, its special tokens."""

    def __init__(
        self,
        decoder: Decoder,
        config: NativeConfig,
        special: SpecialTokens,
        name: str = "",
        encoder: Encoder | None = None,
    ) -> None:
        self.decoder, self.encoder = decoder, encoder
        self.config = config
        self.generation_config = special
        self.name = name or f"a native {decoder.spec.family} model"

    @property
    def spec(self) -> Spec:
        """The decoder's spec, which contains the encoder's."""
        return self.decoder.spec

    @property
    def cache_layout(self) -> str:
        """How its cache differs from that of transformers' class; "" if it does not.

        transformers repeats the keys of Falcon's grouped heads for each query before it keeps them.
        """
        spec = self.spec
        grouped = spec.family == "falcon" and 1 < spec.kv_heads < spec.heads
        return "a head for each group" if grouped else ""

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, with a name of ours."""
        seen: set[int] = set()
        parts = {"head": self.decoder.output, "decoder": self.decoder.weights}
        if self.encoder is not None:
            parts = {"encoder": self.encoder.weights, **parts}
        for name, tensor in _tensors("", parts):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def products(self) -> Iterator[Linear | Joined]:
        """Every matrix product, the head's last."""
        encoder = [] if self.encoder is None else self.encoder.weights.layers
        for layer in (*encoder, *self.decoder.weights.layers):
            yield from (layer.qkv, layer.o, *layer.mlp.products())
            if layer.cross is not None:
                yield from (layer.cross.q, layer.cross.kv, layer.cross.o)
        yield self.decoder.output

    def get_input_embeddings(self) -> Any:
        """An object whose `weight` is the matrix of input embeddings, [V, E]."""
        return SimpleNamespace(weight=(self.encoder or self.decoder).weights.embed)

    def bytes(self) -> int:
        """The size of all tensors; tied ones count once."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())


def _tensors(name: str, part: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside weights, layers and products."""
    if isinstance(part, Tensor):
        if part.ndim:  # a constant of a formula is no weight
            yield name, part
        return
    if hasattr(part, "tensors"):
        part = part.tensors()
    if isinstance(part, dict):
        inner: Any = part.items()
    else:
        inner = enumerate(part) if isinstance(part, (list, tuple)) else getattr(part, "__dict__", {}).items()
    for key, value in inner:
        yield from _tensors(f"{name}.{key}".lstrip("."), value)
