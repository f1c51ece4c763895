"""The interface between the decode loop and a model; `native.runtime` and `transformers.runtime` implement it. Also how
every model reads prompts: alone, several in one pass, after a saved prefix, and again after a preemption.

N rows, F tokens fed to each, T columns of the cache, V vocabulary, H hidden size.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache, RowOfPass
from genctl.decode.types import Prefix, Source, Sources, join_sources
from genctl.errors import ModelError
from genctl.events import shared_length

if TYPE_CHECKING:
    from genctl.decode.step_costs import PassPrice


class TokenPlaces:
    """Where the tokens of a ragged pass go in the cache: a pass whose rows are fed different numbers of tokens.

    Each of the N rows of such a pass is one token, and its row of the mask marks the columns that the token attends to.
    """

    def __init__(self, both: Tensor, new: int) -> None:
        self.both = both  # int64 [2, N], contiguous: the row of the cache, and the column
        self.rows, self.columns = both
        self.new = new  # columns that the pass adds to the cache


@dataclass(frozen=True, eq=False)
class Pass:
    """The input of a forward pass. With a cache, the fed tokens are appended to it."""

    feed: Tensor  # int64 [N, F]
    cache: Cache | None = None
    mask: Tensor | None = None  # int64 [N, T+F], with `places` bool [N, T+new]; None without padding
    positions: Tensor | None = None  # int64 [N or 1, F]; None: those after the end of the cache
    sources: Sources | None = None  # of an encoder-decoder
    first: bool = False  # nothing was read before
    keep: int = 0  # the number of last positions to compute logits for; 0: all
    hidden: bool = False  # whether the states of all layers are wanted
    history: Tensor | None = None  # int64 [N, T+F], the full texts, if `wants_history`
    places: TokenPlaces | None = None  # for a ragged pass, if the runtime supports it (`Abilities.ragged`)


@dataclass
class Output:
    """The output of one forward pass: F tokens for each of N rows."""

    logits: Tensor  # f32 [N, F, V]
    cache: Cache | None
    hidden: Tensor | None = None  # [N, F, H]
    layers: tuple[Tensor, ...] | None = None  # per layer [N, F, H]


@dataclass
class Passed:
    """A pass through the decoder, for an observer."""

    inputs: dict[str, Any]  # the keyword arguments of the model
    cache: Cache | None  # after the pass
    past: int  # columns that it held before the pass
    first: bool


def cut_bound(model: Any) -> int | None:
    """The length up to which a transformers model's texts may be cut into passes anywhere; None: windows set no limit.

    transformers gives the cache windows whenever config.json has a `sliding_window`. A model without windows (Llama),
    or one whose code makes no window masks (Moshi), masks only the future: a token of the prompt sees all earlier ones,
    a later token the columns that the cache still has. With a window of 1 the mask of a prompt hides all but the token
    itself, but the cache drops nothing (it keeps `[-window + 1:]`). In both cases the texts equal those of
    `generate()`. Sparse attention with an indexer (DeepSeek) sees the `index_topk` tokens with the best scores;
    negative scores are clamped to 0, so many are equal, and which of them `topk` takes depends on its input's shape.
    """
    chosen = [module.index_topk for module in model.modules() if type(getattr(module, "index_topk", None)) is int]
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    size = min(chosen, default=None)
    if size is None and (kinds is None or any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)):
        for name in ("attention_chunk_size", "sliding_window"):  # if both are set, the second one applies
            found = getattr(config, name, None)
            if type(found) is int and found > 0:
                size = found if found == 1 or not _masks_windows(model) else None
                with suppress(Exception):  # third-party code
                    if not hasattr(type(config)(), name):
                        size = found
    return 0 if size == 1 else size


_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate")


def _masks_windows(model: Any) -> bool:
    """Whether one of the modules that define the model's classes makes window masks, or is not from transformers."""
    files = {type(module).__module__ for module in model.modules() if ".modeling_" in type(module).__module__}
    return any(
        not file.startswith("transformers.") or any(hasattr(sys.modules[file], maker) for maker in _MASKS)
        for file in files
    )


@dataclass(frozen=True, eq=False, repr=False)  # either would measure abilities by passes (`transformers.abilities`)
class Abilities:
    """What a loaded model can do without changing its scores. The defaults are those of a native decoder."""

    supports_cache: bool = True  # steps may continue from a cache; without one every step reads everything again
    cache_differs: bool = False  # its cache, which `generate()` uses, changes its texts
    savable: bool = True  # its cache can be saved to a file and continued by several tokens in one pass
    recurrent: bool = False  # some layers keep a fixed-size state instead of every token
    together: bool = True  # rows of one length may share a pass and be reordered
    pads: bool = True  # rows of different lengths may share a pass, padded on the left and masked
    pads_sources: bool = True  # encoder sources of different lengths may share a pass, padded on the right
    pads_behind: bool = True  # complete texts of different lengths may share a pass, padded on the right
    reads_padded: bool = True  # padding does not affect what a prompt leaves in the cache
    multi_token_exact: bool = True  # several tokens in one pass get the same numbers as one at a time
    multi_token_exact_uncached: bool = True  # the same without a cache
    ragged: bool = False  # rows of one pass may be fed different numbers of tokens (`TokenPlaces`)
    shares_prompt: bool = False  # rows that continue a prompt may share its keys and values
    shares_source: bool = False  # several rows may attend to one row of encoder states

    @property
    def reads_together(self) -> bool:
        """Whether several prompts may be read in one pass."""
        return self.reads_padded and self.pads

    def reads_several(self, cached: bool) -> bool:
        """Whether several tokens in one pass get the same numbers as one at a time."""
        return self.multi_token_exact if cached else self.multi_token_exact_uncached


class ModelRuntime(ABC):
    """A model that reads prompts and runs steps. `forwards` counts the passes through the decoder."""

    kind: str  # "native" or "transformers"
    name: str  # of the architecture, in messages
    model: Any
    config: Any  # the checkpoint's configuration: its fields as attributes
    device: torch.device
    dtype: torch.dtype  # of the weights
    is_encoder_decoder: bool
    abilities: Abilities
    findings: list[str]  # notes about the model for the user, a sentence each
    forwards: int
    watch: Callable[[Passed], None] | None  # called after every pass
    compiled: Any = None  # steps through torch.compile

    # For rotary positions that depend on the length of a text (see `LengthRope`), and for a `cut_bound`:
    bound: float = math.inf  # up to this length texts may be cut into passes anywhere
    dynamic = False  # beyond the bound every token is read in a pass of its own
    reads_again = False  # a text that grows beyond the bound is read again in one pass

    @abstractmethod
    def __call__(self, given: Pass) -> Output:
        """One pass. Raises ModelError if the model's own code fails."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Entries of the output distribution."""

    @property
    @abstractmethod
    def head(self) -> Callable[[Tensor], Tensor] | None:
        """[..., H] -> logits [..., V], for strategies that read earlier layers; None if there is none."""

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end a text, from the checkpoint's generation_config."""
        eos = self.model.generation_config.eos_token_id
        return (eos,) if isinstance(eos, int) else tuple(eos or ())

    @abstractmethod
    def first_layers(self, count: int) -> ModelRuntime:
        """A model of the first `count` layers of this one, which shares its weights. Raises ModelError."""

    @abstractmethod
    def new_cache(self, *, room: int = 0, whole: bool = False) -> Cache:
        """An empty cache with `room` for columns after the prefill; if `whole`, it keeps what windows would drop."""

    def prepare(self, cache: Cache | None) -> None:  # noqa: B027 — most runtimes take any form
        """Convert a cache in place to the form that steps need."""

    def reorder(self, cache: Cache, rows: Tensor, since: int) -> Cache:
        """See `Cache.reorder`."""
        return cache.reorder(rows, since)

    def free(self) -> None:  # noqa: B027 — most runtimes keep nothing
        """After memory ran out: drop what is kept only for speed."""

    def limit_cuts(self, bound: int | None) -> None:
        """Lower `bound` to this length, if that is less, and read every later token alone (see `cut_bound`)."""
        if bound is not None:
            self.bound, self.dynamic = min(self.bound, bound), True

    def wants_history(self, before: int) -> bool:
        """Whether a pass that continues texts of `before` tokens needs `history`, the full texts."""
        return self.reads_again and before <= self.bound

    @property
    def drafts_unasked(self) -> bool:
        """Whether drafts change no bit of the results, so that they may be used without a setting.

        Without `Abilities.ragged`, only a row that is alone in its batch drafts.
        """
        return False

    @property
    def weights_form(self) -> str:
        """How the weights of matrix products are stored on the CPU: a key of `step_costs.PRICES`."""
        return "torch"

    @cached_property
    def pass_price(self) -> PassPrice:
        """What its passes cost, from a table."""
        from genctl.decode.step_costs import price_of

        return price_of(self.model.config, self.weights_form if self.device.type == "cpu" else "gpu")

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether a pass may be launched before the host knows its input: on a device that works in parallel."""
        return self.device.type == "cuda"

    def draft_room(self, length: int) -> float:
        """How many tokens may be drafted after a text of `length` tokens without changing how it is read."""
        if length > self.bound:
            return 0 if self.dynamic else math.inf
        return self.bound - length

    # -- reading -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, ids: Sequence[int]) -> Source:
        """Run the encoder over one prompt. Shapes: ids [S] -> states [1, S, H]."""

    def prefill(
        self,
        ids: Sequence[int],
        source: Source | None,
        *,
        use_cache: bool = True,
        hidden: bool = False,
        whole: bool = False,
    ) -> Prefix:
        """Read one prompt: batch 1, no padding. A `whole` cache can be resumed at any of its tokens."""
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        cache = self.new_cache(whole=whole) if use_cache and self.abilities.supports_cache else None
        sources = None if source is None else Sources(source.states, None, None)
        output = self(Pass(tokens, cache, sources=sources, keep=0 if hidden else 1, hidden=hidden, first=True))
        if not whole:
            self.prepare(output.cache)
        return _prefix(tokens, output, output.hidden, source)

    def prefill_together(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Read prompts in one pass, padded on the left. Each prefix holds its own row, without the padding."""
        longest = max(map(len, prompts))
        pads = [longest - len(ids) for ids in prompts]
        rows = [[0] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)]
        tokens, mask = torch.tensor(rows).to(self.device), None
        positions = torch.arange(longest, device=self.device)[None]
        if any(pads):
            before = torch.tensor(pads, device=self.device)[:, None]
            mask, positions = (positions >= before).long(), (positions - before).clamp(min=0)
        together = self.new_cache()
        output = self(Pass(tokens, together, mask, positions, keep=1, first=True))
        # on a GPU a row is copied only when it is needed: launching the copies would keep the GPU waiting
        late = self.device.type == "cuda" and type(together) is Cache
        if late:
            self.prepare(together)
        prefixes = []
        for row, pad in enumerate(pads):
            if late:
                cache: Cache = RowOfPass(together, row, pad)
            else:
                cache = together.select(torch.tensor([row], device=self.device), drop=pad)
                self.prepare(cache)
            own, logits = tokens[row : row + 1, pad:], output.logits[row : row + 1, -1]
            prefixes.append(Prefix(own, cache, logits))
        return prefixes

    def prefill_in_pieces(self, ids: Sequence[int], size: int) -> Generator[Prefix | None, None, None]:
        """Read a prompt, `size` tokens in a pass. Yields None after each pass but the last, then the prefix.

        Only for texts that may be cut anywhere (`Abilities.multi_token_exact`, `bound`).
        """
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        cache: Cache | None = self.new_cache(room=len(ids) - size)
        for begin in range(0, len(ids), size):
            output = self(Pass(tokens[:, begin : begin + size], cache, keep=1, first=begin == 0))
            cache = output.cache
            if begin + size < len(ids):
                yield None
        self.prepare(cache)
        yield _prefix(tokens, output, None, None)

    def resume(
        self, saved: Prefix, ids: Sequence[int], source: Source | None, *, hidden: bool = False
    ) -> tuple[Prefix | None, int]:
        """Read a prompt that begins like `saved` (a prefix that was read with `whole`): only the rest is read.

        Returns the prefix and the number of reused tokens; (None, 0) if nothing can be reused. The last token is always
        read, for its logits. Recurrent states cannot remove tokens, so they can be reused only by prompts that continue
        the complete saved one.
        """
        known = saved.tokens[0].tolist()
        reused = min(shared_length(known, ids), len(ids) - 1)
        assert saved.cache is not None
        forgets = saved.cache.is_croppable
        if source is not saved.source or (reused == 0 and source is None) or (reused < len(known) and not forgets):
            return None, 0
        if (hidden and saved.hidden is None) or max(len(known), len(ids)) > self.bound:
            return None, 0
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        cache = saved.cache.select(tokens.new_zeros(1), room=len(ids) - reused)
        cache.crop(len(known) - reused)
        sources = None if source is None else Sources(source.states, None, saved.cache.cross)
        seen = [] if saved.hidden is None else [saved.hidden[:, :reused]]
        # a recurrent state reads the following tokens one by one
        for feed in [tokens[:, reused:]] if forgets else torch.split(tokens[:, reused:], 1, 1):
            keep = 0 if hidden else 1
            output = self(Pass(feed, cache, sources=sources, first=reused == 0, keep=keep, hidden=hidden))
            assert output.cache is not None
            cache = output.cache
            if output.hidden is not None:
                seen.append(output.hidden)
        cache.narrow(self.new_cache())
        self.prepare(cache)
        return _prefix(tokens, output, torch.cat(seen, 1) if hidden else None, source), reused

    def reread(self, tokens: Tensor, prefix: Prefix) -> Cache:
        """Read rows int64 [R, T], which began at `prefix`, again. Returns their cache."""
        cache = self.new_cache()
        sources = None
        if prefix.source is not None:
            assert prefix.cache is not None
            sources = join_sources([prefix.source], [prefix.cache.cross], [len(tokens)])
        length, prompt = tokens.shape[1], int(prefix.tokens.shape[1])
        ends = [length]
        if length > self.bound and not self.reads_again:
            cuts = range(prompt, length) if self.dynamic else sorted({prompt, max(prompt, int(self.bound))})
            ends = [*cuts, length]
        at = 0
        for end in ends:  # cut the text where it was cut before, if that matters
            self(Pass(tokens[:, at:end], cache, sources=sources, keep=1, first=at == 0, history=tokens[:, :end]))
            at = end
        self.prepare(cache)
        return cache

    def _grown(self, given: Pass, past: int) -> Output | None:
        """For `reads_again`: if the fed tokens bring the texts beyond the bound, read all of them again; else None.

        Reads the full texts in one pass and refills the cache with the result, in the cache's own form.
        """
        cache, history, count = given.cache, given.history, given.feed.shape[1]
        if cache is None or history is None or given.first or past > self.bound:
            return None
        beyond = past + count > self.bound
        # after a rejected draft, a cache within the bound may hold values that were computed beyond it
        if not beyond and not cache.beyond:
            return None
        cache.beyond = beyond
        fresh = self.new_cache()
        if cache.records_past:  # a draft may be rejected
            fresh.activate_past_recording()
        output = self(Pass(history, fresh, first=True, keep=0 if given.hidden else count, hidden=given.hidden))
        cache.refill(fresh)
        if not given.hidden:
            return Output(output.logits, cache)
        layers = tuple(layer[:, -count:] for layer in output.layers or ())
        return Output(output.logits[:, -count:], cache, layers[-1], layers)


def depth_of(model: ModelRuntime) -> int:
    """The number of layers of the decoder. Raises ModelError if the config has no such number."""
    config = model.config.get_text_config(decoder=True)
    depth = getattr(config, "num_hidden_layers", None)
    if type(depth) is not int:
        raise ModelError(f"{model.name} has no single list of layers, whose number config.json would give")
    return depth


def _prefix(tokens: Tensor, output: Output, hidden: Tensor | None, source: Source | None) -> Prefix:
    layers = None if output.layers is None else tuple(layer[:, -1:] for layer in output.layers)
    return Prefix(tokens, output.cache, output.logits[:, -1], hidden, layers, source)
