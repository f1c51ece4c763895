"""A native model as the loop sees it (see `decode.runtime`): reading prompts, one step for many rows, its caches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from genctl.decode import cut_windows
from genctl.decode.cache.cache import Cache, new_cache
from genctl.decode.encoder_inputs import Sources
from genctl.decode.prefill import Reader
from genctl.decode.runtime import Output, Passed
from genctl.decode.types import Prefix, Source
from genctl.errors import ModelError
from genctl.native.decoder import Decoder
from genctl.native.graphs import Graphs, fits
from genctl.native.model import NativeModel


class NativeRuntime(Reader):
    """A native decoder. `forwards` counts its passes.

    With `graphs` steps of one token go through `graphs.Graphs`, on a cache of fixed size: on a GPU unless it is False,
    on a CPU if it is True.
    """

    model: NativeModel
    kind = "native"
    is_encoder_decoder = False
    supports_cache = reads_together = savable = True
    together = pads = pads_sources = pads_behind = True
    compiled = None

    def __init__(self, model: NativeModel, *, graphs: bool | None = None) -> None:
        self.model = model
        self.decoder = model.decoder
        self.config = model.config
        self.device, self.dtype, self.name = model.device, model.dtype, model.name
        ropes = [rope for rope in (model.spec.rope, model.spec.local_rope) if rope and rope.depends_on_length]
        self.bound = min((rope.bound for rope in ropes), default=math.inf)
        self.dynamic = any(rope.kind == "dynamic" for rope in ropes)
        self.reads_again = any(rope.reads_again for rope in ropes)
        self.limit_cuts(cut_windows.of_spec(model.spec.windows, model.spec.family))
        self.forwards = 0
        self.watch: Callable[[Passed], None] | None = None
        self.findings: list[str] = []
        wanted = self.device.type == "cuda" if graphs is None else graphs
        self.graphs = Graphs(self.decoder) if wanted and fits(model.spec) else None

    @property
    def vocab_size(self) -> int:
        """Entries of the output distribution."""
        return self.model.spec.vocab

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """[..., H] -> logits [..., V]."""
        return self.decoder.weights.head

    @property
    def recurrent(self) -> bool:
        """Every layer keeps every token, or the newest of them."""
        return False

    def first_layers(self, count: int) -> NativeRuntime:
        """The same model without the layers after `count`. It shares the weights."""
        spec, weights = self.decoder.spec, self.decoder.weights
        spec = replace(spec, layers=count, windows=spec.windows[:count])
        part = Decoder(spec, replace(weights, layers=weights.layers[:count]))
        config = copy.copy(self.config)
        config.num_hidden_layers = count
        return NativeRuntime(NativeModel(part, config, self.model.generation_config, self.model.name))

    # -- caches --------------------------------------------------------------------------------------------------------

    def new_cache(self, *, room: int = 0, whole: bool = False) -> Cache:
        """An empty cache with `room` for columns after the prefill; a `whole` one keeps what windows would drop."""
        windows = self.model.spec.windows
        return new_cache([None] * len(windows) if whole else windows, room)

    def prepare(self, cache: Cache | None) -> None:
        """Bring a cache into the form that the steps to come want, in place."""
        if self.graphs is not None and cache is not None:
            cache.use_slots()

    def shares(self, prefix: Prefix) -> bool:
        """Whether rows that continue a prompt may share its keys and values: not where scores are changed by hand."""
        spec = self.model.spec
        return self.device.type == "cpu" and spec.softcap is None and not spec.alibi

    def groups(self, prefix: Prefix) -> bool:
        """There is no encoder."""
        return False

    def encode(self, ids: Sequence[int]) -> Source:
        """There is no encoder."""
        raise ModelError(f"{self.name} has no encoder")

    # -- the pass ------------------------------------------------------------------------------------------------------

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
        past = 0 if cache is None else cache.length
        grown = self._grown(feed, cache, history, past, first=first, hidden=hidden)
        if grown is not None:
            return grown
        if positions is None:
            positions = torch.arange(past, past + feed.shape[1], device=feed.device)[None]
        states: list[Tensor] | None = [] if hidden else None
        if self.graphs is not None and cache is not None and self.graphs.takes(feed, cache, hidden=hidden):
            logits = self.graphs.step(feed, cache, mask, positions)
        else:
            layers = None if cache is None else cache.layers
            logits = self.decoder(feed, positions, layers, mask=mask, past=past, keep=keep, states=states)
        self.forwards += 1
        if self.watch is not None:
            inputs = {"input_ids": feed, "attention_mask": mask}
            if not self.model.spec.alibi:  # the mask says it all
                inputs["position_ids"] = positions
            self.watch(Passed(inputs, cache, past, first))
        if states is None:
            return Output(logits.float(), cache)
        return Output(logits.float(), cache, states[-1], tuple(states))
