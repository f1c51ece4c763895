"""A native encoder-decoder with what its checkpoint says of itself (see `model`)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from genctl.native.encoder_decoder import EncoderDecoder
from genctl.native.linear import Joined, Linear
from genctl.native.model import NativeConfig, NativeModel, SpecialTokens
from genctl.native.seq2seq_spec import Seq2SeqSpec


class Seq2SeqConfig(NativeConfig):
    """config.json's fields as attributes; the decoder's sizes under their usual names."""

    is_encoder_decoder = True

    def __init__(self, fields: dict[str, Any], spec: Seq2SeqSpec) -> None:
        self.__dict__.update(fields)
        self.model_type = spec.family
        self.vocab_size, self.hidden_size = spec.vocab, spec.hidden
        self.num_hidden_layers, self.head_dim = spec.decoder.layers, spec.decoder.head_dim
        self.num_attention_heads = self.num_key_value_heads = spec.decoder.heads
        self.tie_word_embeddings = spec.tied
        if spec.context is not None:
            self.max_position_embeddings = spec.context


class Seq2SeqModel(NativeModel):
    """An encoder-decoder, its configuration, its special tokens."""

    decoder: Any  # both sides: an EncoderDecoder

    def __init__(self, network: EncoderDecoder, config: Seq2SeqConfig, special: SpecialTokens, name: str = "") -> None:
        both: Any = network
        super().__init__(both, config, special, name)
        self.network = network

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, with a name of ours."""
        seen: set[int] = set()
        for name, tensor in _tensors("", self.network.weights):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def products(self) -> Iterator[Linear | Joined]:
        """Every matrix product, the head's last."""
        weights = self.network.weights
        for layer in (*weights.encoder.layers, *weights.decoder.layers):
            yield from (layer.qkv, layer.o, layer.up, layer.down)
            if layer.cross is not None:
                yield from (layer.cross.q, layer.cross.kv, layer.cross.o)
        yield weights.head

    def get_input_embeddings(self) -> Any:
        """Something whose `weight` are the embeddings of a source, [V, E]."""
        return SimpleNamespace(weight=self.network.weights.encoder.embed)


def _tensors(name: str, part: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        if part.ndim:  # a constant of a formula is no weight
            yield name, part
        return
    if hasattr(part, "tensors"):
        part = part.tensors()
    inner = enumerate(part) if isinstance(part, (list, tuple)) else getattr(part, "__dict__", {}).items()
    for key, value in inner:
        yield from _tensors(f"{name}.{key}".lstrip("."), value)
