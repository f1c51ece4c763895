"""One step of a model as something that can be recorded: what goes in, and what stands in its way while it is traced.

Everything that changes from step to step is a tensor here, lengths included, so that a record is bound to none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from genctl.decode import cache as caches
from genctl.decode.layers import SlidingLayer
from genctl.decode.shared import SharedLayer, attend


@dataclass
class Fed:
    """What one step reads."""

    feed: Tensor  # int64 [N, 1]
    cache: Cache
    mask: Tensor | None  # int64 [N, T+1]
    positions: Tensor  # int64 [N or 1, 1]
    states: Tensor | None = None  # [N, S, H] of the encoder
    source_mask: Tensor | None = None  # int64 [N, S]

    def layers(self) -> list[Any]:
        """The layers that grow."""
        found: list[Any] = caches.self_part(self.cache).layers
        return found

    def cross(self) -> list[Any]:
        """What the encoder said, layer by layer; empty for a decoder."""
        found: list[Any] = self.cache.cross_attention_cache.layers if _double(self.cache) else []
        return found


class Recording(nn.Module):
    """A step of `model` as something that can be recorded: called with `given_to`, it returns the logits."""

    model: Any
    like: Fed

    def __init__(self, model: Any, like: Fed) -> None:
        super().__init__()
        self.__dict__.update(model=model, like=like)  # the model is no part of this: its weights are constants
        self.logits: Tensor | None = None
        # layers that do not compute in Python alone say what TorchScript is to run for all of their class
        self.packed: dict[Any, list[Any]] = {}
        for module in model.modules():
            if hasattr(type(module), "scripted"):
                self.packed.setdefault(type(module), []).append(module)
        parts = [kind.scripted(layers) for kind, layers in self.packed.items()]
        self.parts = nn.ModuleList(parts)
        self.places: list[_Place] = []
        self.mask: Tensor | None = None
        self.source_mask: Tensor | None = None
        self.reached = 0
        self.plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def forward(self, feed: Tensor, positions: Tensor, spans: Tensor, *rest: Tensor) -> Tensor:
        """See `given_to`."""
        like, parts = self.like, iter(rest)
        self.mask = None if like.mask is None else next(parts)
        self.source_mask = None if like.source_mask is None else next(parts)
        states = None if like.states is None else next(parts)
        self.places = []
        for number, layer in enumerate(like.layers()):
            prompt = (next(parts), next(parts)) if isinstance(layer, SharedLayer) else None
            self.places.append(_Place((next(parts), next(parts)), spans[number], prompt, full(layer)))
        inputs: dict[str, Any] = {"use_cache": True, "return_dict": True}
        cache = Cache(layers=self.places)
        if states is None:
            inputs |= {"input_ids": feed, "attention_mask": self.mask, "past_key_values": cache}
            inputs["position_ids"] = positions
        else:
            cross = Cache(layers=[_Said(next(parts), next(parts)) for _ in like.cross()])
            inputs |= {"decoder_input_ids": feed, "decoder_attention_mask": self.mask}
            inputs |= {"attention_mask": self.source_mask, "encoder_outputs": BaseModelOutput(last_hidden_state=states)}
            inputs["past_key_values"] = EncoderDecoderCache(cache, cross)
        logits: Tensor = self.model(**inputs).logits
        self.logits = logits
        return logits

    @contextmanager
    def attending(self) -> Iterator[None]:
        """With attention that reads the cache as it is given, and packed layers that TorchScript can run."""
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attention  # of this instance only: the library's own table stays
        for layers, part in zip(self.packed.values(), self.parts, strict=True):
            for place, layer in enumerate(layers):
                layer.__dict__["forward"] = partial(part, place=place)
        try:
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]
            for layer in chain(*self.packed.values()):
                del layer.__dict__["forward"]

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """query [R, H·G, 1, D]; key and value [R, H, S, D]. Returns [R, 1, H·G, D].

        The mask is what the step was given: what a model makes of it while it is traced may be bound to this length.
        """
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux")):
            raise NotImplementedError("attention bends its scores")
        place = next((place for place in self.places if place.seen is key), None)
        given = self.source_mask if place is None else self.mask
        if given is not None and attention_mask is not given:
            raise NotImplementedError("the model makes a mask of its own")
        self.reached += 1
        if place is not None and place.prompt is not None:
            if kwargs.get("position_bias") is not None or key.shape[1:] != value.shape[1:]:
                raise NotImplementedError("attention bends its scores")
            return attend(query, place.prompt, (key, value), kwargs.get("scaling")), None
        if place is not None and given is not None:
            given = given[..., -key.shape[2] :]  # a window keeps the newest columns
        elif place is not None and place.full:
            # transformers masks a full window although nothing in it is hidden, and its kernel adds up in another order
            given = torch.ones(key.shape[2], dtype=torch.bool)[None, None, None]
        return self.plain(module, query, key, value, given, **kwargs)  # type: ignore[no-any-return]  # transformers is untyped here

    def why(self, run: Any) -> str:
        """Why what was recorded cannot serve, or ""."""
        wanted = len(self.places) + len(self.like.cross())
        if self.reached != wanted:
            return f"{self.reached} of {wanted} attentions could be followed"
        shifts = [layer.shift for layer in chain(*self.packed.values()) if layer.shift is not None]
        own = chain(self.model.parameters(), self.model.buffers(), shifts)
        weights = {tensor.untyped_storage().data_ptr() for tensor in own}
        for node in run.graph.findAllNodes("prim::Constant", recurse=True):
            if node.hasAttribute("value") and node.kindOf("value") == "t":
                tensor = node.t("value")
                if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in weights:
                    return f"it would keep a tensor of {tensor.numel()} numbers"
        return ""


class _Place(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """A layer's buffers during a recorded step. Its lengths are tensors, so that no number is kept in the record."""

    is_compileable = False
    is_sliding = False

    def __init__(
        self, buffers: tuple[Tensor, Tensor], span: Tensor, prompt: tuple[Tensor, Tensor] | None, full: bool
    ) -> None:
        super().__init__()
        self.buffers, self.span, self.prompt, self.full = buffers, span, prompt, full
        self.seen: Tensor | None = None  # the keys that this step's query meets
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one column; returns what the query meets, `[rows, heads, length, head_dim]`."""
        keys, values = append(*self.buffers, key_states, value_states, self.span)
        self.seen = keys
        return keys, values

    def get_seq_length(self) -> Any:
        """Tokens before this step's."""
        return self.span[2]

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        """Columns that a query meets, and how many came before them."""
        return self.span[2] + query_length, 0

    def get_max_length(self) -> int:
        """There is none."""
        return -1


class _Said(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """What the encoder said, for one layer's cross-attention."""

    is_compileable = False
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Never asked for. Raises NotImplementedError."""
        raise NotImplementedError("the encoder has been read")

    def get_seq_length(self) -> int:
        """Enough to be taken for read."""
        return 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns there are."""
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        """There is none."""
        return -1


def _appended(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, span: Tensor
) -> tuple[Tensor, Tensor]:
    begin, length = int(span[0]), int(span[1])
    keys.narrow(2, begin + length, 1).copy_(new_keys)
    values.narrow(2, begin + length, 1).copy_(new_values)
    return keys.narrow(2, begin, length + 1), values.narrow(2, begin, length + 1)


def append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """Write a column `[N, H, 1, D]` into each buffer `[N, H, C, D]`; returns the columns that are filled then.

    `span` int64 [3]: the first filled column, how many are, and how many tokens were ever read. In a record the numbers
    are read from it each time.
    """
    global _scripted
    if _scripted is None:
        _scripted = torch.jit.script(_appended)
    found: tuple[Tensor, Tensor] = _scripted(keys, values, new_keys, new_values, span)
    return found


_scripted: Any = None


def traced(step: nn.Module, given: tuple[Tensor, ...]) -> Any:
    return torch.jit.trace(step, given, check_trace=False, strict=False)  # type: ignore[no-untyped-call]  # torch is, here


def tidied(run: Any) -> Any:
    """The same record without what a tracer leaves behind: sizes that pass through tensors, values asked for again.

    Two thirds of a record's nodes are such; they take a third of the time that is not spent in large products. The
    operations on the data stay, each as it was. Where torch's passes are not as expected, the record itself comes back.
    """
    passes: Any = torch._C
    try:
        graph = run.inlined_graph.copy()
        passes._jit_pass_erase_shape_information(graph)  # that of this step: no pass may rely on it
        passes._jit_pass_constant_pooling(graph)
        passes._jit_pass_cse(graph)  # first, for the costly one to have less to look at
        passes._jit_pass_peephole(graph, True)
        passes._jit_pass_cse(graph)
        passes._jit_pass_dce(graph)
        return partial(passes._create_function_from_graph("step", graph), run._c)
    except (AttributeError, TypeError, RuntimeError):
        return run


def _double(cache: Cache) -> bool:
    return isinstance(cache, EncoderDecoderCache)


def full(layer: Any) -> bool:
    """Whether a window has no room for this step's column."""
    return isinstance(layer, SlidingLayer) and bool(layer.length + 1 >= layer.sliding_window)


def given_to(fed: Fed) -> tuple[Tensor, ...]:
    """What a record is given: `Recording.forward` takes it apart."""
    spans, tensors = [], list[Tensor]()
    for layer in fed.layers():
        spans.append(layer.place())
        if isinstance(layer, SharedLayer):
            tensors += layer.prompt
        tensors += layer.buffers
    for layer in fed.cross():
        tensors += layer.content()
    masks = [_wide(mask) for mask in (fed.mask, fed.source_mask) if mask is not None]
    states = [] if fed.states is None else [fed.states]
    return (fed.feed, fed.positions, torch.tensor(spans), *masks, *states, *tensors)


def _wide(mask: Tensor) -> Tensor:
    """int64 [N, T] -> bool [N, 1, 1, T], which transformers takes as it is."""
    return mask[:, None, None].bool()


def written(fed: Fed) -> None:
    for layer in fed.layers():
        layer.placed()
