"""transformers' caches, and the parts that genctl does not replace: recurrent states, empty layers, models' own states.

genctl's layers are registered as transformers' classes here, so transformers' caches accept them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from genctl import compat
from genctl.decode.cache.cache import Cache
from genctl.decode.cache.forms import SlidingLayer, Slots
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import FULL, RECURRENT, SLIDING, CacheLayer, attention_entry, entry, shape_in_memory
from genctl.errors import ModelError

DynamicLayer.register(GrowingLayer)
_KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    *compat.layers_that_keep_nothing(cache_utils),
)


class TransformersCache(Cache):
    """A cache for a transformers model, which receives `library` with these layers."""

    def __init__(self, library: Any, layers: Iterable[CacheLayer], cross: Sequence[GrowingLayer] | None = None) -> None:
        super().__init__(layers, cross)
        self.library = library

    @property
    def for_model(self) -> Any:
        """transformers' cache with the layers as they are now."""
        self.library.layers = [layer.for_model for layer in self.layers]
        if self.cross is None:
            return self.library
        return EncoderDecoderCache(self.library, cache_utils.Cache(layers=[layer.for_model for layer in self.cross]))

    def with_layers(self, layers: Iterable[CacheLayer]) -> Self:
        """A cache of the same class with other layers of self-attention, and none of cross-attention."""
        new = super().with_layers(layers)
        new.library = copy.copy(self.library)
        return new

    def offload(self) -> None:
        """Keep the growing layers on the CPU between passes; each is copied back one layer ahead of its use."""
        library, self.library.layers = self.library, [layer.for_model for layer in self.layers]
        library.offloading, library.only_non_sliding, library.prefetch_stream = True, True, torch.Stream()
        for number in range(len(self.layers)):
            library.offload(number, True)


def new_cache(config: Any, *, encoder_decoder: bool = False, room: int = 0, whole: bool = False) -> TransformersCache:
    """An empty cache for a transformers model of this config; `room` is the number of columns that follow the prefill.

    With `whole`, windows keep every column, so any number of tokens can be removed (see `Cache.narrow`).
    """
    library = DynamicCache(config=config.get_text_config(decoder=True))
    layers: list[CacheLayer] = []
    for layer in library.layers:
        is_window = type(layer) is DynamicSlidingWindowLayer
        if type(layer) is DynamicLayer or (whole and is_window):
            layers.append(GrowingLayer(room))
        else:
            layers.append(SlidingLayer(layer.sliding_window, room) if is_window else ForeignLayer(layer))
    # T5 and its variants: the config's number of layers is the encoder's
    count = getattr(config, "num_decoder_layers", None)
    if type(count) is int and count > 0 and {type(layer) for layer in layers} == {GrowingLayer}:
        layers = [GrowingLayer(room) for _ in range(count)]
    # every decoder layer attends to the whole source, even with a window on its own text
    return TransformersCache(library, layers, [GrowingLayer() for _ in layers] if encoder_decoder else None)


class ForeignLayer(CacheLayer):
    """A layer of transformers, or one that an architecture defines: the model receives `layer`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.is_known = self.is_mergeable = type(layer) in _KINDS  # an architecture's own layers may have more state
        self.has_columns = isinstance(layer, DynamicLayer)
        self.is_recurrent = isinstance(layer, LinearAttentionCacheLayerMixin)
        self.kind = RECURRENT if self.is_recurrent else ""
        self.record_past = bool(getattr(layer, "record_past", False))

    @property
    def for_model(self) -> Any:
        """The library's layer."""
        return self.layer

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed: not from recurrent states or from unknown layers without their own `crop`."""
        if self.is_recurrent and any(self.layer.is_recurrent_states_initialized.values()):
            return False
        return self.is_known or "crop" in vars(type(self.layer))

    def activate_past_recording(self) -> None:
        """Keep columns that would be dropped until the next `crop`, so that tokens can be removed."""
        if hasattr(self.layer, "activate_past_recording"):
            self.layer.activate_past_recording()
            self.record_past = True

    def get_seq_length(self) -> int:
        """Columns ever appended."""
        return int(self.layer.get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest columns."""
        self.layer.crop(tokens_to_remove)

    def content(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns."""
        return self.layer.keys, self.layer.values

    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> CacheLayer:
        """A new layer with `rows` (int64 [N]) of this one, without its first `drop` columns."""
        # only an unknown layer's own method reorders all of its state
        new = copy.copy(self.layer) if self.is_known else copy.deepcopy(self.layer)
        for name, value in vars(new).items():
            if isinstance(value, dict):  # the states, and flags for each
                setattr(new, name, dict(value))
        if drop and self._stores_columns:
            if hasattr(new, "cumulative_length"):  # a window that may have dropped columns
                new.cumulative_length -= drop
                drop = max(new.keys.shape[-2] - new.cumulative_length, 0)
            new.keys, new.values = new.keys[:, :, drop:], new.values[:, :, drop:]
        new.reorder_cache(rows)
        return ForeignLayer(new)

    def merge(self, others: Sequence[ForeignLayer], room: int = 0) -> CacheLayer:
        """One layer with the rows of all, aligned to the right; shorter ones are padded with zeros on the left."""
        layers = [self.layer, *(other.layer for other in others)]
        new = copy.copy(self.layer)
        if self.is_recurrent:
            for name in ("conv_states", "recurrent_states"):
                states = [getattr(layer, name) for layer in layers]
                merged = {i: None if old is None else torch.cat([s[i] for s in states]) for i, old in states[0].items()}
                setattr(new, name, merged)
        if self._stores_columns:
            if hasattr(new, "cumulative_length"):
                new.cumulative_length = max(layer.cumulative_length for layer in layers)
            length = max(layer.keys.shape[-2] for layer in layers)
            for name in ("keys", "values"):
                parts = [getattr(layer, name) for layer in layers]
                # zeros: a masked column is still multiplied by the values, and 0 x NaN is NaN
                parts = [functional.pad(part, (0, 0, length - part.shape[-2], 0)) for part in parts]
                setattr(new, name, torch.cat(parts))
        return ForeignLayer(new)

    def describe(self, number: int) -> list[dict[str, Any]]:
        """See `Cache.describe`."""
        parts = []
        states = {name.removesuffix(".0").replace(".", ""): state for name, state in self._states().items()}
        if states:
            main = states.get("recurrent", next(iter(states.values())))
            part = entry(number, RECURRENT, main, [*states.values()])
            parts.append({**part, "states": {name: shape_in_memory(state) for name, state in states.items()}})
        if self._stores_columns:
            window = getattr(self.layer, "sliding_window", None)
            part = attention_entry(number, FULL if window is None else SLIDING, self.content())
            parts.append(part if window is None else {**part, "window": window})
        return parts

    def state_dict(self) -> dict[str, Tensor]:
        """The layer's states, keys and values."""
        columns = zip(("keys", "values"), self.content(), strict=True) if self._stores_columns else ()
        return {**self._states(), **dict(columns)}

    def load_state_dict(self, states: Mapping[str, Tensor], length: int) -> None:
        """Load states, keys and values, stored after `length` tokens. Raises KeyError."""
        layer = self.layer
        for index in range(layer.number_of_states if self.is_recurrent else 0):
            for name in ("conv", "recurrent"):
                if (state := states.get(f"{name}.{index}")) is not None:
                    layer.lazy_initialization(**{f"{name}_states": state}, state_idx=index)
                    getattr(layer, f"{name}_states")[index] = state
            layer.has_previous_state[index] = True
        if self.has_columns and "keys" in states:
            DynamicLayer.lazy_initialization(layer, states["keys"], states["values"])
            layer.keys, layer.values = states["keys"], states["values"]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length

    @property
    def _stores_columns(self) -> bool:
        return self.has_columns and bool(self.layer.is_initialized)

    def _states(self) -> dict[str, Tensor]:
        """The states of the layer: `conv.J`, `recurrent.J`."""
        return {
            f"{name}.{index}": state
            for name in ("conv", "recurrent")
            if self.is_recurrent
            for index, state in getattr(self.layer, f"{name}_states").items()
            if state is not None
        }


# -- states that a model does not keep in a standard cache, so that rows can be forked and reordered ------------------
# Two forms occur in transformers: states that each pass returns (hidden states of XLNet, Reformer's own cache class),
# and tensors in the model's modules (RecurrentGemma).


class ReturnedStates(CacheLayer):
    """The states that a pass returned, as the only layer of a cache. Rows can be selected, but no tokens removed."""

    def __init__(self, states: Any = None) -> None:
        self.states = states

    @property
    def for_model(self) -> Any:
        """The states."""
        return self.states

    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> ReturnedStates:
        """A new layer with `rows` (int64 [N]) of this one. Nothing is dropped."""
        if isinstance(self.states, (list, tuple)):  # each [T, N, H]
            return ReturnedStates(tuple(state.index_select(1, rows) for state in self.states))
        states = copy.copy(self.states)
        if states is not None:
            for name, value in vars(states).items():  # a cache class whose lists the model writes to
                setattr(states, name, copy.copy(value))
            states.reorder_cache(rows)
        return ReturnedStates(states)

    def get_seq_length(self) -> int:
        """0: columns are not counted."""
        return 0

    def state_dict(self) -> dict[str, Tensor]:
        """Raises ModelError: the form of the states depends on the model."""
        raise ModelError("the model has its own form of cached states, which cannot be saved")


class ReturnedStatesCache(Cache):
    """A cache of `ReturnedStates`."""

    def __init__(self) -> None:
        super().__init__([ReturnedStates()])

    @property
    def for_model(self) -> Any:
        """The states of the last pass."""
        return self.layers[0].for_model

    def store(self, states: Any) -> None:
        """Store the states that a pass returned."""
        self.layers = [ReturnedStates(states)]


class ModuleStates:
    """RecurrentGemma's recurrent states, which are moved from its modules into the cache after every pass."""

    def __init__(self, model: Any) -> None:
        blocks = enumerate(layer.temporal_block for layer in model.model.layers)
        self.blocks = [(number, block) for number, block in blocks if hasattr(block, "rg_lru")]

    def put(self, cache: Cache | None) -> None:
        """Copy the cache's states into the modules; None clears them."""
        for number, block in self.blocks:
            layer = None if cache is None else cache.layers[number].for_model
            block.conv1d_state = None if layer is None else layer.conv_states[0]
            block.rg_lru.recurrent_states = None if layer is None else layer.recurrent_states[0]

    def take(self, cache: Cache | None) -> None:
        """Move the modules' states into the cache."""
        for number, block in self.blocks:
            if cache is not None and block.conv1d_state is not None:
                layer = cache.layers[number].for_model
                layer.conv_states[0], layer.recurrent_states[0] = block.conv1d_state, block.rg_lru.recurrent_states
                layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = True
                layer.has_previous_state[0] = True
                layer.device, layer.dtype = block.conv1d_state.device, block.conv1d_state.dtype
            block.conv1d_state = block.rg_lru.recurrent_states = None


class CompiledLayer(Slots, CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """A layer during a compiled step: its buffers, and the place of the new column."""

    is_compileable = True
    is_sliding = False
    is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the buffers exist."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns; the mask hides those that are not visible."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """All columns but the last count as the past, so that the causal mask hides none."""
        return self.keys.shape[2] - 1  # int() would specialise the compiled code to this width

    def get_max_length(self) -> int:
        """The number of columns."""
        return self.keys.shape[2]
