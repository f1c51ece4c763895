"""Contrasts: a strategy runs on the difference of two models' scores, or of two layers'.

Contrastive decoding subtracts an amateur (Li et al. 2023, arXiv:2210.15097), DoLa an earlier layer (Chuang et al. 2023,
arXiv:2309.03883).

Contrastive search: probable tokens that differ from the earlier ones (Su et al. 2022, arXiv:2202.06417).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import kl_div, normalize, pad

from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import ModelRuntime, depth_of
from genctl.decode.types import Choice, Context, Scores, Search, Traits
from genctl.errors import ModelError
from genctl.strategies.sample import Sample


@dataclass(frozen=True)
class Amateur:
    """Tokens by log p_expert - log p_amateur, among those with p_expert >= alpha * max p_expert (equations 2 and 3).

    `temperature` is the amateur's: below 1 it sharpens the amateur's distribution and so the contrast. With `beta` the
    score is (1 + beta) log p_expert - beta log p_amateur (O'Brien and Lewis 2023, arXiv:2309.09117), a weaker contrast
    that suits sampling. The processors run after the contrast.
    """

    amateur: ModelRuntime
    alpha: float = 0.1
    beta: float | None = None
    temperature: float = 1.0
    do_sample: bool = False
    n: int = 1

    kind: ClassVar[str] = "contrastive-decoding"
    length_penalty: ClassVar[float] = 1.0
    traits: ClassVar[Traits] = Traits("raw", independent=True, reads_scores=True)

    @property
    def max_rows(self) -> int:
        return self.n

    def search(self, scores: Scores, context: Context) -> Search:
        if context.model.is_encoder_decoder or self.amateur.is_encoder_decoder:
            raise ModelError("contrastive decoding needs two decoder-only models")
        cached = context.prefix.cache is not None and self.amateur.abilities.together
        reader = ReadAlong(self.amateur, use_cache=cached)
        inner = Sample(self.do_sample, self.n)
        return rescored(inner, lambda raw: self._contrast(raw, reader), scores, context)

    def _contrast(self, scores: Scores, reader: ReadAlong) -> Tensor:
        """f32 [N, V]; `OUT` below the expert's score for implausible tokens, -inf for tokens that the amateur lacks."""
        expert = scores.logprobs[:, 0]
        size = expert.shape[1]
        logits = reader(scores.rows.tokens.tolist())[:, :size]
        amateur = (logits / self.temperature).log_softmax(-1).to(expert.device)
        if amateur.shape[1] < size:  # usually padding of the expert's vocabulary
            lacking = size - amateur.shape[1]
            expert = pad(expert[:, :-lacking], (0, lacking), value=-torch.inf)
            amateur = pad(amateur, (0, lacking))
        beta = self.beta
        contrast = expert - amateur if beta is None else (1 + beta) * expert - beta * amateur
        floor = expert.amax(-1, keepdim=True) + (math.log(self.alpha) if self.alpha else -torch.inf)
        return torch.where(expert < floor, expert + OUT, contrast)


# Added to the log-probability of tokens that a contrast excludes: their probability is 0 in float32, but their order is
# the model's, so that a token remains if processors ban all the others.
OUT = -10000.0


def rescored(inner: Sample, contrast: Callable[[Scores], Tensor], scores: Scores, context: Context) -> Search:
    """Let `inner` choose by `contrast(scores)`, f32 [N, V], after the lane's processors. For the space "raw"."""

    def contrasted(scores: Scores) -> Scores:
        return replace(scores, logits=context.process(contrast(scores))[:, None])

    search = inner.search(contrasted(scores), context)
    choice = next(search)
    while True:
        scores = yield choice
        choice = search.send(contrasted(scores))


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
        width = getattr(head, "in_features", scores.layers[-1].shape[-1])
        if any(scores.layers[layer].dim() != 3 or scores.layers[layer].shape[-1] != width for layer in candidates):
            raise ModelError(f"DoLa: the output head of {context.model.name} cannot read the states of earlier layers")
        return rescored(Sample(self.do_sample, self.n), lambda raw: _contrast(raw, candidates, head), scores, context)


def candidate_layers(model: ModelRuntime, layers: Layers, depth: int) -> list[int]:
    """The layers that may be contrasted with the last one, number `depth`.

    Raises ModelError for models that DoLa does not support, and for layers that the model does not have.
    """
    name, config = model.name, model.config.get_text_config(decoder=True)
    for lacks, sentence in (
        (model.is_encoder_decoder, f"a decoder-only model, and {name} is an encoder-decoder"),
        (model.abilities.recurrent, f"layers that look back at every token, and {name} keeps recurrent states"),
        (model.head is None, f"an output head, and {name} has none"),
    ):
        if lacks:
            raise ModelError(f"DoLa needs {sentence}")
    if not isinstance(layers, str):
        wrong = [layer for layer in layers if not 0 <= layer < depth]
        if wrong or not layers:
            problem = f"has no layer {wrong[0]}" if wrong else "needs at least one"
            raise ModelError(f"dola_layers: {name} {problem}; its layers before the last are 0 to {depth - 1}")
        return list(dict.fromkeys(layers))
    half = depth // 2
    if layers == "high":
        return list(range(half if depth <= 40 else depth - 20, depth, 2))
    # with tied embeddings the lowest layers predict the input token
    start = 0 if not getattr(config, "tie_word_embeddings", False) else {1: 0, 2: 1}.get(depth, 2)
    candidates = [start] if start == half else list(range(start, half if depth <= 40 else 20, 2))
    if not candidates:
        raise ModelError(
            f'dola_layers = "low": {name} has too few layers ({depth}) with tied embeddings; name the layers'
        )
    return candidates


def _contrast(scores: Scores, candidates: Sequence[int], head: Callable[[Tensor], Tensor]) -> Tensor:
    """log p_last - log p_earlier, f32 [N, V], for tokens that are probable in the last layer; `OUT` for others."""
    assert scores.layers is not None
    last = scores.logprobs[:, -1]  # [N, V]
    with torch.no_grad():
        earlier = [head(scores.layers[layer][:, -1]).float().to(last.device) for layer in candidates]
    logprobs = torch.stack(earlier, 1).log_softmax(-1)  # [N, L, V]
    furthest = _divergence(last, logprobs).argmax(1) if len(candidates) > 1 else 0
    chosen = logprobs[torch.arange(len(last), device=last.device), furthest]
    out = last < last.amax(-1, keepdim=True) + math.log(RELATIVE_TOP)
    return torch.where(out, last + OUT, last - chosen)


def _divergence(last: Tensor, earlier: Tensor) -> Tensor:
    """Jensen-Shannon divergence of last [N, V] and each of earlier [N, L, V], as transformers took it; f32 [N, L]."""
    middle = 0.5 * (last.exp()[:, None] + earlier.exp())
    from_last = kl_div(last[:, None].expand_as(middle), middle, reduction="none").mean(-1)
    from_earlier = kl_div(earlier, middle, reduction="none").mean(-1)
    return 0.5 * (from_last + from_earlier)


@dataclass(frozen=True)
class Contrastive:
    """Of the `top_k` most probable tokens write the one with the best

        (1 - penalty_alpha) * probability - penalty_alpha * (largest cosine similarity to an earlier token)

    where tokens are compared by the last hidden states (equation 5). All `top_k` go through the model in one pass as
    branches of the row; the losers are dropped, and the winner's output gives the next probabilities.
    """

    top_k: int
    penalty_alpha: float

    n: ClassVar[int] = 1
    kind: ClassVar[str] = "contrastive"
    length_penalty: ClassVar[float] = 1.0
    # no drafts: losing branches are dropped, so tokens are never removed from a row
    traits: ClassVar[Traits] = Traits(needs_hidden=True, reads_scores=True)

    @property
    def max_rows(self) -> int:
        return self.top_k

    def search(self, scores: Scores, context: Context) -> Search:
        assert context.prefix.hidden is not None
        directions = normalize(context.prefix.hidden[0].float(), dim=-1)  # of the tokens so far, [T, H]
        row = torch.zeros(1, dtype=torch.long, device=scores.logits.device)
        logits, accepted = scores.logits[0, -1], 0
        while True:
            top = logits.softmax(-1).topk(min(self.top_k, len(logits)))
            scores = yield Choice(row, None, accepted=accepted, draft=top.indices[None, :, None])
            assert scores.hidden is not None
            hidden = normalize(scores.hidden[:, 1].float(), dim=-1)  # [k, H], each candidate read after the row
            nearest = (hidden @ directions.T).amax(1)
            values = (1 - self.penalty_alpha) * top.values - self.penalty_alpha * nearest
            row = values.masked_fill(logits[top.indices] == -torch.inf, -torch.inf).argmax(0, keepdim=True)
            directions = torch.cat([directions, hidden[row]])
            logits, accepted = scores.logits[row[0], 1], 1
