"""A native encoder-decoder with what its checkpoint says of itself (see `model`)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from genctl.native.encoder_decoder import EncoderDecoder
from genctl.native.linear import Joined, Linear
from genctl.native.model import NativeConfig, NativeModel, SpecialTokens


class Seq2SeqModel(NativeModel):
    """An encoder-decoder, its configuration, its special tokens."""

    decoder: Any  # both sides: an EncoderDecoder

    def __init__(self, network: EncoderDecoder, config: NativeConfig, special: SpecialTokens, name: str = "") -> None:
        both: Any = network
        super().__init__(both, config, special, name)
        self.network = network

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
