"""A native encoder-decoder as the loop sees it (see `decode.runtime`): sources, reading, one step for many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.encoder_inputs import Sources
from genctl.decode.runtime import Output, Passed
from genctl.decode.types import Prefix, Source
from genctl.errors import ModelError
from genctl.native.runtime import NativeRuntime
from genctl.native.seq2seq_model import Seq2SeqModel


class Seq2SeqRuntime(NativeRuntime):
    """A native encoder-decoder. `forwards` counts the decoder's passes."""

    is_encoder_decoder = True
    reads_together = False  # texts begin with a token or two: there is nothing to gain

    def __init__(self, model: Seq2SeqModel) -> None:
        super().__init__(model, graphs=False)
        self.network = model.network

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """[..., H] -> logits [..., V]."""
        return self.network.head

    def first_layers(self, count: int) -> NativeRuntime:
        """The layers of an encoder-decoder are not left early. Raises ModelError."""
        raise ModelError(f"assistant_early_exit: {self.name} is an encoder-decoder")

    def new_cache(self, *, room: int = 0, whole: bool = False) -> Cache:
        """An empty cache with `room` for columns after the prefill, and one for the source."""
        count = range(self.network.spec.decoder.layers)
        return Cache((GrowingLayer(room) for _ in count), [GrowingLayer() for _ in count])

    def shares(self, prefix: Prefix) -> bool:
        """What is long is the source: rows have it in common (see `groups`)."""
        return False

    def groups(self, prefix: Prefix) -> bool:
        """Several rows may attend to one row of an encoder's."""
        return True

    def encode(self, ids: Sequence[int]) -> Source:
        """Run the encoder over one prompt. Shapes: ids [S] -> states [1, S, H]."""
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        return Source(tokens, self.network.encode(tokens))

    def __call__(
        self,
        feed: Tensor,
        cache: Cache | None,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        sources: Sources | None = None,
        first: bool = False,
        keep: int = 0,
        hidden: bool = False,
        history: Tensor | None = None,
    ) -> Output:
        """One pass, as `decode.runtime.ModelRuntime` says."""
        assert sources is not None
        if cache is not None and sources.cross is not None:
            cache = cache.with_cross(sources.cross)
        past = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(past, past + feed.shape[1], device=feed.device)[None]
        states: list[Tensor] | None = [] if hidden else None
        logits = self.network(
            feed,
            positions,
            sources.states,
            None if cache is None else cache.layers,
            None if cache is None else cache.cross,
            mask=mask,
            source_mask=sources.mask,
            past=past,
            keep=keep,
            states=states,
        )
        self.forwards += 1
        if self.watch is not None:
            given = {"decoder_input_ids": feed, "decoder_attention_mask": mask, "attention_mask": sources.mask}
            self.watch(Passed(given, cache, past, first))
        if states is None:
            return Output(logits.float(), cache)
        return Output(logits.float(), cache, states[-1], tuple(states))
