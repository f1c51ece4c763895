"""A native model's interface to the decode loop (see `decode.runtime`): prefill, batched steps, caches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache, new_cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import KeyValues
from genctl.decode.runtime import Abilities, ModelRuntime, Output, Pass, Passed
from genctl.decode.types import Source
from genctl.errors import ModelError
from genctl.kernels import build
from genctl.native.attention import PlacedLayer, places_mask
from genctl.native.decoder import Decoder, Encoder
from genctl.native.linear import Joined, Linear
from genctl.native.spec import Spec
from genctl.native.steps import Steps

if TYPE_CHECKING:
    from genctl.native.graphs import Graphs


# -- a native model with its configuration and special tokens: the attributes of transformers' models that genctl uses


class NativeConfig:
    """config.json's fields as attributes; sizes whose names differ between families also have the usual names.

    The sizes of an encoder-decoder are its decoder's.
    """

    def __init__(self, fields: dict[str, Any], spec: Spec) -> None:
        self.__dict__.update(fields)
        self.is_encoder_decoder = spec.encoder is not None
        self.model_type: str = spec.family
        self.vocab_size, self.hidden_size, self.num_hidden_layers = spec.vocab, spec.hidden, spec.layers
        self.tie_word_embeddings = spec.tied
        if spec.context is not None:
            self.max_position_embeddings = spec.context

    def get_text_config(self, decoder: bool = False) -> NativeConfig:
        """Itself: this configuration has no parts."""
        return self


class SpecialTokens:
    """The ids that end, pad and begin a text, from the checkpoint's generation settings."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.eos_token_id: int | list[int] | None = settings.get("eos_token_id")
        self.pad_token_id: int | None = settings.get("pad_token_id")
        self.bos_token_id: int | None = settings.get("bos_token_id")
        self.decoder_start_token_id: int | None = settings.get("decoder_start_token_id")


class NativeModel:
    """A decoder with its configuration and special tokens, and the encoder of an encoder-decoder."""

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
        """How its cache differs from the cache of transformers' class; "" if it does not.

        transformers repeats the keys of Falcon's grouped heads for each query head before caching them.
        """
        grouped = self.spec.family == "falcon" and 1 < self.spec.kv_heads < self.spec.heads
        return "a head for each group" if grouped else ""

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, under genctl's own names."""
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
        if part.ndim:  # scalars are constants of formulas, not weights
            yield name, part
        return
    part = part.tensors() if hasattr(part, "tensors") else part
    part = dict(enumerate(part)) if isinstance(part, (list, tuple)) else part
    for key, value in (part if isinstance(part, dict) else getattr(part, "__dict__", {})).items():
        yield from _tensors(f"{name}.{key}".lstrip("."), value)


class NativeRuntime(ModelRuntime):
    """A native model. `forwards` counts the passes of its decoder.

    `graphs`: run steps of one token through `graphs.Graphs`, on buffers that stay in place. None means on a GPU only.
    If the decoder has Triton kernels, they also read prompts and drafts.
    """

    model: NativeModel
    kind = "native"

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
            self.limit_cuts(0)
        self.forwards = 0
        self.watch: Callable[[Passed], None] | None = None
        self.findings: list[str] = []
        self.graphs: Graphs | None = None
        self.steps: Steps | None = Steps(self.decoder)
        if self.device.type == "cuda" if graphs is None else graphs:
            from genctl.native.graphs import Graphs, obstacle
            from genctl.native.kernel_decoder import decoder_by_kernels

            kernels, note = decoder_by_kernels(self.decoder)
            if note:
                self.findings.append(note)
            if reason := obstacle(model.spec):
                self.findings.append(f"steps run without a CUDA graph: {reason}")
            else:
                self.graphs = Graphs(self.decoder, kernels)
        spec = model.spec
        by_hand = spec.softcap is not None or spec.alibi or spec.sinks  # scores are modified, so no fused attention
        shifted = any(spec.windows) or spec.alibi or spec.relative or spec.sinks
        self.abilities = Abilities(
            # an encoder-decoder's texts begin with a token or two, so this gains nothing; its rows share the source
            reads_padded=model.encoder is None,
            ragged=self._takes_drafts() and not shifted,
            shares_prompt=model.encoder is None and self.device.type == "cpu" and not by_hand,
            shares_source=model.encoder is not None,
        )

    @property
    def vocab_size(self) -> int:
        """Size of the output distribution."""
        return self.model.spec.vocab

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """[..., H] -> logits [..., V]."""
        return self.decoder.head

    @property
    def drafts_unasked(self) -> bool:
        """Whether drafts leave every bit of the results unchanged, so they may be on by default."""
        if self.steps is None or not self.decoder.weights.layers[0].o.is_compiled:  # torch's products give other bits
            return False
        return self._takes_drafts() and self.steps.is_compiled

    @property
    def weights_form(self) -> str:
        """How weights are stored for matrix products on the CPU."""
        product = self.decoder.weights.layers[0].o
        if not product.is_compiled:
            return "torch"
        narrow = "" if build.choice()[0].startswith(("avx512", "amx")) else "narrow "
        return narrow + str(product.form.partition(" ")[0])

    def first_layers(self, count: int) -> NativeRuntime:
        """The same model cut to its first `count` layers, sharing the weights. Raises ModelError."""
        if self.encoder is not None:  # no early exit from its layers
            raise ModelError(f"assistant_early_exit: {self.name} is an encoder-decoder")
        spec, weights = self.decoder.spec, self.decoder.weights
        spec = replace(spec, layers=count, windows=spec.windows[:count])
        part = Decoder(spec, replace(weights, layers=weights.layers[:count]), self.decoder.output)
        config = copy.copy(self.config)
        config.num_hidden_layers = count
        return NativeRuntime(NativeModel(part, config, self.model.generation_config, self.model.name))

    # -- caches --------------------------------------------------------------------------------------------------------

    def new_cache(self, *, room: int = 0, whole: bool = False) -> Cache:
        """An empty cache with `room` for columns after the prefill; `whole` keeps columns that windows would drop."""
        windows = self.model.spec.windows
        cache = new_cache([None] * len(windows) if whole else windows, room)
        if self.encoder is not None:  # keys and values of the source
            cache.cross = [GrowingLayer() for _ in windows]
        return cache

    def prepare(self, cache: Cache | None) -> None:
        """Convert a cache in place to the form that steps need."""
        if self.graphs is not None and cache is not None:
            cache.use_slots(windows=True)

    def reorder(self, cache: Cache, rows: Tensor, since: int) -> Cache:
        """See `Cache.reorder`. Slotted layers without a window are reordered in one kernel launch."""
        kernels = None if self.graphs is None else self.graphs.kernels
        if kernels is None or not cache.is_slotted or cache.cross is not None or any(self.model.spec.windows):
            return super().reorder(cache, rows, since)
        kernels.move_rows(cache.slots(0), rows, since, cache.length)
        return cache

    def free(self) -> None:
        """Drop the graphs of steps and their memory."""
        if self.graphs is not None:
            self.graphs.free()

    def encode(self, ids: Sequence[int]) -> Source:
        """Run the encoder over one prompt. Shapes: ids [S] -> states [1, S, H]."""
        if self.encoder is None:
            raise ModelError(f"{self.name} has no encoder")
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        return Source(tokens, self.encoder(tokens))

    def _takes_drafts(self) -> bool:
        """Whether several tokens of a row in one pass give the same results as one at a time."""
        alone = self.encoder is None and self.graphs is None and self.device.type == "cpu"
        return alone and self.bound == math.inf

    # -- the pass ------------------------------------------------------------------------------------------------------

    def __call__(self, given: Pass) -> Output:
        """One pass (see `decode.runtime.ModelRuntime`)."""
        feed, cache, mask, positions, sources = given.feed, given.cache, given.mask, given.positions, given.sources
        keep, hidden = given.keep, given.hidden
        if cache is not None and sources is not None and sources.cross is not None:
            cache = cache.with_cross(sources.cross)
        past = 0 if cache is None else cache.length
        if self.reads_again and (grown := self._grown(given, past)) is not None:
            return grown
        if given.places is not None:
            return self._ragged(given, past)
        if positions is None:
            positions = torch.arange(past, past + feed.shape[1], device=feed.device)[None]
        states: list[Tensor] | None = [] if hidden else None
        source_mask = None if sources is None else sources.mask
        logits: Tensor | None = None
        if self.graphs is not None and cache is not None and self.graphs.takes(feed, cache, hidden=hidden):
            logits = self.graphs.step(feed, cache, mask, positions, source_mask)[:, -keep:]
            failure = f"steps run without a CUDA graph: capturing one failed ({self.graphs.failed})"
            if self.graphs.failed and failure not in self.findings:
                self.findings.append(failure)
        elif self.graphs is not None and self.graphs.kernels is not None:
            slotted = self.new_cache() if cache is None else cache
            logits = self.graphs.read(feed, slotted, mask, positions, keep, hidden=hidden)
        elif self.steps is not None and cache is not None and not hidden:
            logits = self.steps.step(feed, cache, mask, positions, past, keep=keep, source_mask=source_mask)
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
                source_mask=source_mask,
                cross=None if cache is None else cache.cross,
            )
        self.forwards += 1
        if self.watch is not None:
            if sources is not None:
                inputs = {"decoder_input_ids": feed, "decoder_attention_mask": mask, "attention_mask": source_mask}
            else:
                inputs = {"input_ids": feed, "attention_mask": mask}
                if not self.model.spec.alibi:  # positions follow from the mask
                    inputs["position_ids"] = positions
            self.watch(Passed(inputs, cache, past, given.first))
        return Output(logits.float(), cache, *(() if states is None else (states[-1], tuple(states))))

    def _ragged(self, given: Pass, past: int) -> Output:
        """A pass in which each token is a row and has its own place in the cache."""
        feed, cache, places, positions = given.feed, given.cache, given.places, given.positions
        assert cache is not None
        assert places is not None
        assert positions is not None
        past += places.new - 1
        steps = self.steps
        logits = None if steps is None else steps.step(feed, cache, given.mask, positions, past, places=places)
        if logits is None:
            layers: list[KeyValues] = [PlacedLayer(cast(GrowingLayer, layer), places) for layer in cache.layers]
            logits = self.decoder(feed, positions, layers, past=past, visible=[places_mask(given.mask)])
        self.forwards += 1
        return Output(logits.float(), cache)
