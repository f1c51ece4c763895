"""Layers for states that a model does not keep in a standard cache, so that rows can be forked and reordered.

Three forms occur in transformers: tensors in the model's modules (RecurrentGemma), a list of hidden states that each
pass returns (XLNet), and a cache class that is not a `Cache` (Reformer).
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.layer import CacheLayer
from genctl.errors import ModelError


class ReturnedStates(CacheLayer):
    """The states that a pass returned, as the only layer of a cache. Rows can be selected; no token can be removed."""

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
        """Take the states that a pass returned."""
        self.layers = [ReturnedStates(states)]


class ModuleStates:
    """The recurrent states in RecurrentGemma's modules, moved into the cache after every pass."""

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
