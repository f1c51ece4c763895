"""A native model as the loop sees it (see `decode.runtime`): reading prompts, one step for many rows, its caches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache, new_cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.prefill import Reader
from genctl.decode.runtime import Abilities, Output, Passed
from genctl.decode.types import Source, Sources
from genctl.errors import ModelError
from genctl.native.decoder import Decoder
from genctl.native.model import NativeModel
from genctl.native.steps import Steps

if TYPE_CHECKING:
    from genctl.native.graphs import Graphs


class NativeRuntime(Reader):
    """A native model. `forwards` counts the passes of its decoder.

    With `graphs` steps of one token go through `graphs.Graphs`, on buffers that stay in place: on a GPU unless it is
    False, on a CPU if it is True.
    """

    model: NativeModel
    kind = "native"
    compiled = None

    def __init__(self, model: NativeModel, *, graphs: bool | None = None) -> None:
        self.model = model
        self.decoder, self.encoder = model.decoder, model.encoder
        self.is_encoder_decoder = model.encoder is not None
        self.config = model.config
        self.device, self.dtype, self.name = model.device, model.dtype, model.name
        ropes = [rope for rope in (model.spec.rope, model.spec.local_rope) if rope and rope.depends_on_length]
        self.bound = min((rope.bound for rope in ropes), default=math.inf)
        self.dynamic = any(rope.kind == "dynamic" for rope in ropes)
        self.reads_again = any(rope.reads_again for rope in ropes)
        if 1 in model.spec.windows:
            from genctl.decode.cut_windows import CutWindow

            self.limit_cuts(CutWindow("sliding_window", 1, model.spec.family))
        self.forwards = 0
        self.watch: Callable[[Passed], None] | None = None
        self.findings: list[str] = []
        self.graphs: Graphs | None = None
        self.steps: Steps | None = Steps(self.decoder)
        if self.device.type == "cuda" if graphs is None else graphs:
            from genctl.native.graphs import Graphs, obstacle
            from genctl.native.kernel_steps import kernel_step

            reason = obstacle(model.spec)
            kernels, said = kernel_step(self.decoder)
            self.graphs = None if reason else Graphs(self.decoder, kernels)
            if kernels is not None:
                self.remark = said
            elif said:
                self.findings.append(said)
            if reason:
                self.findings.append(f"steps run without a CUDA graph: {reason}")
        by_hand = model.spec.softcap is not None or model.spec.alibi or model.spec.sinks  # how scores are changed
        self.abilities = Abilities(
            # texts of an encoder-decoder begin with a token or two: nothing is gained. Its rows share the source.
            reads_padded=model.encoder is None,
            shares_prompt=model.encoder is None and self.device.type == "cpu" and not by_hand,
            shares_source=model.encoder is not None,
        )

    @property
    def vocab_size(self) -> int:
        """Entries of the output distribution."""
        return self.model.spec.vocab

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """[..., H] -> logits [..., V]."""
        return self.decoder.head

    @property
    def weights_form(self) -> str:
        """How the products' weights are held on the CPU."""
        product = self.decoder.weights.layers[0].o
        return product.form.partition(" ")[0] if product.is_compiled else "torch"

    def first_layers(self, count: int) -> NativeRuntime:
        """The same model without the layers after `count`. It shares the weights. Raises ModelError."""
        if self.encoder is not None:  # its layers are not left early
            raise ModelError(f"assistant_early_exit: {self.name} is an encoder-decoder")
        spec, weights = self.decoder.spec, self.decoder.weights
        spec = replace(spec, layers=count, windows=spec.windows[:count])
        part = Decoder(spec, replace(weights, layers=weights.layers[:count]), self.decoder.output)
        config = copy.copy(self.config)
        config.num_hidden_layers = count
        return NativeRuntime(NativeModel(part, config, self.model.generation_config, self.model.name))

    # -- caches --------------------------------------------------------------------------------------------------------

    def new_cache(self, *, room: int = 0, whole: bool = False) -> Cache:
        """An empty cache with `room` for columns after the prefill; a `whole` one keeps what windows would drop."""
        windows = self.model.spec.windows
        cache = new_cache([None] * len(windows) if whole else windows, room)
        if self.encoder is not None:  # keys and values of the source
            cache.cross = [GrowingLayer() for _ in windows]
        return cache

    def prepare(self, cache: Cache | None) -> None:
        """Convert a cache in place to the form that steps need."""
        if self.graphs is not None and cache is not None:
            cache.use_slots(windows=True)

    def free(self) -> None:
        """Drop the graphs of steps, and the memory that they hold."""
        if self.graphs is not None:
            self.graphs.free()

    def encode(self, ids: Sequence[int]) -> Source:
        """Run the encoder over one prompt. Shapes: ids [S] -> states [1, S, H]."""
        if self.encoder is None:
            raise ModelError(f"{self.name} has no encoder")
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        return Source(tokens, self.encoder(tokens))

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
        """One pass (see `decode.runtime.ModelRuntime`)."""
        if cache is not None and sources is not None and sources.cross is not None:
            cache = cache.with_cross(sources.cross)
        past = 0 if cache is None else cache.length
        grown = self._grown(feed, cache, history, past, first=first, hidden=hidden)
        if grown is not None:
            return grown
        if positions is None:
            positions = torch.arange(past, past + feed.shape[1], device=feed.device)[None]
        states: list[Tensor] | None = [] if hidden else None
        logits: Tensor | None = None
        if self.graphs is not None and cache is not None and self.graphs.takes(feed, cache, hidden=hidden):
            source_mask = None if sources is None else sources.mask
            logits = self.graphs.step(feed, cache, mask, positions, source_mask)[:, -keep:]
            failure = f"steps run without a CUDA graph: capturing one failed ({self.graphs.failed})"
            if self.graphs.failed and failure not in self.findings:
                self.findings.append(failure)
        elif self.steps is not None and cache is not None and not hidden:
            source_mask = None if sources is None else sources.mask
            logits = self.steps.step(feed, cache, mask, positions, keep=keep, source_mask=source_mask)
        if logits is None:
            logits = self.decoder(
                feed,
                positions,
                None if cache is None else cache.layers,
                mask=mask,
                past=past,
                keep=keep,
                states=states,
                source=None if sources is None else sources.states,
                source_mask=None if sources is None else sources.mask,
                cross=None if cache is None else cache.cross,
            )
        self.forwards += 1
        if self.watch is not None:
            if sources is not None:
                inputs = {"decoder_input_ids": feed, "decoder_attention_mask": mask, "attention_mask": sources.mask}
            else:
                inputs = {"input_ids": feed, "attention_mask": mask}
                if not self.model.spec.alibi:  # positions follow from the mask
                    inputs["position_ids"] = positions
            self.watch(Passed(inputs, cache, past, first))
        if states is None:
            return Output(logits.float(), cache)
        return Output(logits.float(), cache, states[-1], tuple(states))
