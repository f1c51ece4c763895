"""DoLa: contrast the last layer with an earlier layer (Chuang et al. 2023, arXiv:2309.03883)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from genctl.decode.runtime import ModelRuntime, depth_of
from genctl.decode.types import Context, Scores, Search, Traits
from genctl.errors import ModelError
from genctl.strategies.contrast import OUT, rescored
from genctl.strategies.sample import Sample

Layers: TypeAlias = Literal["low", "high"] | tuple[int, ...]

RELATIVE_TOP = 0.1  # tokens less probable than this fraction of the best one are out (equation 4)


@dataclass(frozen=True)
class Dola:
    """Contrast the last layer with the candidate layer that differs most from it (Jensen-Shannon divergence).

    `layers`: the lower or the higher half, every second layer of it, or layer numbers; 0 is the embeddings. The layer
    is chosen for each row and step. As in transformers 4, the head reads a candidate layer's states without the final
    norm, and the processors run after the contrast.
    """

    layers: Layers = "low"
    do_sample: bool = False
    n: int = 1

    kind: ClassVar[str] = "dola"
    length_penalty: ClassVar[float] = 1.0
    traits: ClassVar[Traits] = Traits("raw", needs_hidden=True, independent=True, reads_scores=True)

    @property
    def max_rows(self) -> int:
        return self.n

    def search(self, scores: Scores, context: Context) -> Search:
        assert scores.layers is not None
        # LongCat-Flash counts the attention layers of its blocks, two in each, and reports the states of blocks
        depth = len(scores.layers) - 1
        if depth > depth_of(context.model):  # XLNet has two streams
            raise ModelError(f"DoLa reads one state of each layer, and {context.model.name} reports several")
        candidates = candidate_layers(context.model, self.layers, depth)
        head = context.model.head
        assert head is not None
        _check_widths(context.model.name, scores, candidates, head)
        return rescored(Sample(self.do_sample, self.n), lambda raw: _contrast(raw, candidates, head), scores, context)


def candidate_layers(model: ModelRuntime, layers: Layers, depth: int) -> list[int]:
    """The layers that may be contrasted with the last one, number `depth`.

    Raises ModelError for models that DoLa does not support, and for layers that the model does not have.
    """
    name = model.name
    if model.is_encoder_decoder:
        raise ModelError(f"DoLa needs a decoder-only model, and {name} is an encoder-decoder")
    if model.abilities.recurrent:
        raise ModelError(f"DoLa needs layers that look back at every token, and {name} keeps recurrent states")
    if model.head is None:
        raise ModelError(f"DoLa needs an output head, and {name} has none")
    config = model.config.get_text_config(decoder=True)
    if not isinstance(layers, str):
        wrong = [layer for layer in layers if not 0 <= layer < depth]
        if wrong or not layers:
            problem = f"has no layer {wrong[0]}" if wrong else "needs at least one"
            raise ModelError(f"dola_layers: {name} {problem}; its layers before the last are 0 to {depth - 1}")
        return list(dict.fromkeys(layers))
    half, span = depth // 2, 20
    if layers == "high":
        return list(range(half, depth, 2)) if depth <= 40 else list(range(depth - span, depth, 2))
    # with tied embeddings the lowest layers predict the input token
    start = 0 if not getattr(config, "tie_word_embeddings", False) else {1: 0, 2: 1}.get(depth, 2)
    if start == half:
        return [start]
    candidates = list(range(start, half, 2)) if depth <= 40 else list(range(start, span, 2))
    if not candidates:
        raise ModelError(
            f'dola_layers = "low": {name} has too few layers ({depth}) with tied embeddings; name the layers'
        )
    return candidates


def _check_widths(name: str, scores: Scores, candidates: Sequence[int], head: Callable[[Tensor], Tensor]) -> None:
    """Raises ModelError if the states of an earlier layer do not have the width of the head's input."""
    assert scores.layers is not None
    width = getattr(head, "in_features", scores.layers[-1].shape[-1])
    for layer in candidates:
        states = scores.layers[layer]
        if states.dim() != 3:
            raise ModelError(f"DoLa reads one state of each token, and the layers of {name} keep several")
        if states.shape[-1] != width:
            raise ModelError(
                f"DoLa reads the states of earlier layers with the output head, and that of {name} takes {width} "
                f"numbers where they have {states.shape[-1]}"
            )


def _contrast(scores: Scores, candidates: Sequence[int], head: Callable[[Tensor], Tensor]) -> Tensor:
    """log p_last - log p_earlier, f32 [N, V], for tokens that are probable in the last layer; `OUT` for others."""
    assert scores.layers is not None
    last = scores.logprobs[:, -1]  # [N, V]
    with torch.no_grad():
        earlier = [head(scores.layers[layer][:, -1]).float().to(last.device) for layer in candidates]
    logprobs = torch.stack(earlier, 1).log_softmax(-1)  # [N, L, V]
    if len(candidates) == 1:
        chosen = logprobs[:, 0]
    else:
        furthest = _divergence(last, logprobs).argmax(1)
        chosen = logprobs[torch.arange(len(last), device=last.device), furthest]
    out = last < last.amax(-1, keepdim=True) + math.log(RELATIVE_TOP)
    return torch.where(out, last + OUT, last - chosen)


def _divergence(last: Tensor, earlier: Tensor) -> Tensor:
    """Jensen-Shannon divergence of last [N, V] and each of earlier [N, L, V], as transformers took it; f32 [N, L]."""
    middle = 0.5 * (last.exp()[:, None] + earlier.exp())
    from_last = functional.kl_div(last[:, None].expand_as(middle), middle, reduction="none").mean(-1)
    from_earlier = functional.kl_div(earlier, middle, reduction="none").mean(-1)
    return 0.5 * (from_last + from_earlier)
