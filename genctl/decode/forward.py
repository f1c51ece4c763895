"""How a model is asked: prefill, one step for many rows, and what each architecture wants to be given.

transformers' own `prepare_inputs_for_generation` is called where an architecture overrides it; elsewhere the few
inputs that every model shares are passed directly, which costs nothing per step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from genctl.decode import cache as caches
from genctl.decode import host
from genctl.decode.layers import GrowingLayer, StaticLayer
from genctl.decode.patched import attending
from genctl.decode.recorded import KNOWN, Recorder, recordable
from genctl.decode.recording import Fed
from genctl.decode.runtime import Output, Passed
from genctl.decode.shared import share
from genctl.decode.sources import Sources, join_sources
from genctl.decode.types import Prefix, Source
from genctl.errors import ModelError

if TYPE_CHECKING:
    from genctl.decode.compiled import Compiled

# Decoders whose positions are only relative: rows of different lengths may share a step of an encoder-decoder.
RELATIVE_DECODERS = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers"})


class Forward:
    """A model as the loop sees it. `forwards` counts the passes through the decoder.

    With `compile` its steps go through torch.compile (see `compiled`). Raises ModelError where they cannot. With
    `record` they run from a record where that gives the same (see `recorded`).
    """

    kind = "transformers"

    def __init__(self, model: Any, *, compile: bool = False, record: bool = True) -> None:
        self.model = model
        self.config = model.config
        self.device = model.device if model.device.type != "meta" else torch.device("cpu")
        self.is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        accepted = inspect.signature(model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self.takes_positions = "position_ids" in accepted
        self.takes_mask = "attention_mask" in accepted
        self.takes_keep = "logits_to_keep" in accepted
        prepare = type(model).prepare_inputs_for_generation
        self.prepares = prepare is not GenerationMixin.prepare_inputs_for_generation
        self.relative = not self.is_encoder_decoder or self.config.model_type in RELATIVE_DECODERS
        self.supports_cache = bool(model._supports_default_dynamic_cache())
        self.forwards = 0
        self._shares: bool | None = None
        self._groups: bool | None = None
        self.watch: Callable[[Passed], None] | None = None
        self.compiled: Compiled | None = None
        if compile:
            from genctl.decode.compiled import Compiled

            self.compiled = Compiled(model, frozenset(accepted), self.device)
        usual = record and not compile and not self.prepares
        self.recorder = Recorder(model) if usual and recordable(model) else None

    @property
    def vocab_size(self) -> int:
        """Entries of the output distribution."""
        head = self.model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if weight is not None and weight.numel():
            return int(weight.shape[0])
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @property
    def name(self) -> str:
        """What the architecture is called."""
        return type(self.model).__name__

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end a text, as the checkpoint says."""
        eos = self.model.generation_config.eos_token_id
        return (eos,) if isinstance(eos, int) else tuple(eos or ())

    @property
    def head(self) -> Callable[[Tensor], Tensor] | None:
        """[..., H] -> logits [..., V]; None where there is none."""
        head: Callable[[Tensor], Tensor] | None = self.model.get_output_embeddings()
        return head

    @property
    def recurrent(self) -> bool:
        """Whether layers keep a state instead of every token."""
        return bool(getattr(self.model, "_is_stateful", False))

    def first_layers(self, count: int) -> Forward:
        """The same model without the layers after `count`. It shares the weights. Raises ModelError."""
        from genctl.decode.first_layers import first_layers

        return Forward(first_layers(self.model, count))

    def new_cache(self, *, room: int = 0, whole: bool = False) -> Cache:
        """An empty cache for this model (see `cache.new_cache`)."""
        return caches.new_cache(self.config, encoder_decoder=self.is_encoder_decoder, room=room, whole=whole)

    def encode(self, ids: Sequence[int]) -> Source:
        """Run the encoder over one prompt. Shapes: ids [S] -> states [1, S, H]."""
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        encoder = self.model.get_encoder()
        with torch.no_grad():
            output = encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens), return_dict=True)
        return Source(tokens, output.last_hidden_state)

    def prefill(
        self,
        ids: Sequence[int],
        source: Source | None,
        *,
        use_cache: bool = True,
        hidden: bool = False,
        whole: bool = False,
    ) -> Prefix:
        """Read a prompt, alone: batch 1, no padding. A `whole` cache can be resumed at any of its tokens."""
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        cache = None
        if use_cache and self.supports_cache:
            cache = caches.new_cache(self.config, encoder_decoder=self.is_encoder_decoder, whole=whole)
        sources = None
        if source is not None:
            sources = Sources(source.states, None, None)
        output = self(tokens, cache, sources=sources, first=True, keep=0 if hidden else 1, hidden=hidden)
        return Prefix(
            tokens,
            output.cache if whole else self.kept(output.cache),
            output.logits[:, -1],
            output.hidden,
            None if output.layers is None else tuple(layer[:, -1:] for layer in output.layers),
            source,
        )

    @cached_property
    def reads_together(self) -> bool:
        """Whether several prompts may be read in one pass: padding must be maskable, and leave no trace in a state."""
        if not self.takes_mask or not self.supports_cache or self.is_encoder_decoder:
            return False
        layers = caches.new_cache(self.config).layers
        return bool(layers) and all(isinstance(layer, caches.GrowingLayer) for layer in layers)

    def prefill_together(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Read prompts in one pass, padded on the left; each prefix holds its own row, without the padding."""
        longest = max(map(len, prompts))
        pads = [longest - len(ids) for ids in prompts]
        tokens = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)])
        tokens = tokens.to(self.device)
        mask = None
        positions = torch.arange(longest, device=self.device)[None]
        if any(pads):
            before = torch.tensor(pads, device=self.device)[:, None]
            mask, positions = (positions >= before).long(), (positions - before).clamp(min=0)
        output = self(tokens, caches.new_cache(self.config), mask=mask, positions=positions, first=True, keep=1)
        found = []
        for row, pad in enumerate(pads):
            cache = self.kept(caches.select(output.cache, torch.tensor([row], device=self.device), drop=pad))
            found.append(Prefix(tokens[row : row + 1, pad:], cache, output.logits[row : row + 1, -1], None, None, None))
        return found

    def resume(
        self, saved: Prefix, ids: Sequence[int], source: Source | None, *, hidden: bool = False
    ) -> tuple[Prefix | None, int]:
        """A prompt that begins as `saved` does (a prefix made `whole`): only the rest is read.

        Returns the prefix and how many tokens were not read again; (None, 0) where nothing can be reused. The last
        token is always read: it says what follows. Recurrent states cannot forget, so they serve only prompts that go
        on where the saved one ends.
        """
        known = int(saved.tokens.shape[1])
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(saved.tokens[0].tolist(), ids, strict=False))
        )
        kept = min(same, len(ids) - 1)
        single = not caches.croppable(saved.cache)
        if (single and kept < known) or (hidden and saved.hidden is None):
            return None, 0
        if source is not saved.source or (kept == 0 and source is None):
            return None, 0
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        row = torch.zeros(1, dtype=torch.long, device=self.device)
        cache = caches.select(caches.self_part(saved.cache), row, room=len(ids) - kept)
        caches.crop(cache, known - kept)
        sources = None
        if source is not None:
            sources = Sources(source.states, None, saved.cache.cross_attention_cache)
        parts = [tokens[:, kept:]] if not single else [tokens[:, at : at + 1] for at in range(kept, len(ids))]
        states = [] if saved.hidden is None else [saved.hidden[:, :kept]]
        for feed in parts:
            output = self(feed, cache, sources=sources, first=kept == 0, keep=0 if hidden else 1, hidden=hidden)
            cache = output.cache
            if output.hidden is not None:
                states.append(output.hidden)
        cache = self.kept(caches.narrowed(cache, self.new_cache()))
        layers = None if output.layers is None else tuple(layer[:, -1:] for layer in output.layers)
        seen = torch.cat(states, 1) if hidden else None
        return Prefix(tokens, cache, output.logits[:, -1], seen, layers, source), kept

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
        ahead: int | None = None,
    ) -> Output:
        """One pass. feed int64 [N, F]; mask int64 [N, T+F], None without padding; positions int64 [N, F].

        `keep` limits the logits to the last positions; 0 keeps all. With a cache, what is fed is appended to it.
        `ahead` is how many steps may follow at most, where that is known.
        """
        inputs: dict[str, Any] = {}
        if self.is_encoder_decoder:
            assert sources is not None
            if isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache) and sources.cross is not None:
                cache = EncoderDecoderCache(cache, sources.cross)
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=sources.states)
            if sources.mask is not None:
                inputs["attention_mask"] = self._mask(sources.mask, feed, cache)
            if mask is not None:
                inputs["decoder_attention_mask"] = self._mask(mask, feed, cache)
            inputs["decoder_input_ids"] = feed
        else:
            inputs["input_ids"] = feed
            if self.takes_mask:
                inputs["attention_mask"] = None if mask is None else self._mask(mask, feed, cache)
            if self.takes_positions:
                if positions is None:
                    past = caches.length_of(cache) if cache is not None else 0
                    positions = torch.arange(past, past + feed.shape[1], device=feed.device)[None]
                inputs["position_ids"] = positions
        inputs["use_cache"] = cache is not None
        if cache is not None:
            inputs[self.cache_name] = cache
        if keep and self.takes_keep:
            inputs["logits_to_keep"] = keep
        if self.prepares:
            inputs = self._prepare(feed, inputs, first)
        if hidden:
            inputs["output_hidden_states"] = True
        before = 0 if self.watch is None or cache is None else caches.length_of(cache)
        output: Any = None
        logits: Any = None
        grouped = sources is not None and sources.grouped
        with torch.no_grad():
            if self.compiled is not None and not first and self.compiled.takes(feed, cache, hidden=hidden):
                logits = self.compiled.step(feed, cache, mask, positions, self._eager(inputs))
            elif self.recorder is not None and not (hidden or grouped or self.watch is not None):
                if first or feed.shape[1] > 1:
                    self.recorder.begin()
                elif isinstance(cache, Cache):
                    if positions is None:
                        positions = torch.full((1, 1), caches.length_of(cache), device=feed.device)
                    encoded = (None, None) if sources is None else (sources.states, sources.mask)
                    fed = Fed(feed, cache, mask, positions, *encoded)
                    logits = self.recorder.step(fed, ahead, self._eager(inputs))
            if logits is None:
                with attending(cache, grouped=grouped):
                    output = self.model(**inputs, return_dict=True)
                logits = output.logits
        self.forwards += 1
        if self.watch is not None:
            self.watch(Passed(inputs, cache, before, first))
        if keep and logits.shape[1] > keep:
            logits = logits[:, -keep:]
        states = None
        if hidden:
            states = output.decoder_hidden_states if self.is_encoder_decoder else output.hidden_states
            if states is None:
                raise ModelError(
                    f"{type(self.model).__name__} does not report hidden states, which this strategy needs"
                )
        return Output(
            logits.float(), cache, None if states is None else states[-1], None if states is None else tuple(states)
        )

    def _mask(self, mask: Tensor, feed: Tensor, cache: Any) -> Tensor:
        """A mask int64 [N, T] of one step; as bool [N, 1, 1, T], ready for attention, where it is on a GPU.

        transformers would look whether anything is hidden, and the host would wait for that in every step.
        """
        usual = self._sdpa and self.config.model_type in KNOWN
        if feed.shape[1] > 1 or host.near(mask) or not usual or not isinstance(cache, Cache):
            return mask
        full = all(type(layer) in (GrowingLayer, StaticLayer) for layer in caches.self_part(cache).layers)
        return mask[:, None, None].bool() if full else mask

    def _eager(self, inputs: dict[str, Any]) -> Callable[[Cache], Tensor]:
        """The same step by the model itself, on whatever cache it is given: logits [N, 1, V]."""

        def step(cache: Cache) -> Tensor:
            with attending(cache):
                logits: Tensor = self.model(**{**inputs, self.cache_name: cache}, return_dict=True).logits
            return logits

        return step

    def reread(self, tokens: Tensor, prefix: Prefix) -> Cache:
        """The self-attention cache of rows int64 [R, T] that began at `prefix`, by reading them again."""
        cache = caches.new_cache(self.config)
        sources = None
        if prefix.source is not None:
            sources = join_sources([prefix.source], [prefix.cache.cross_attention_cache], [len(tokens)])
        self(tokens, cache, sources=sources, first=True, keep=1)
        return self.kept(cache)

    def kept(self, cache: Any) -> Any:
        """A cache, or None, in the form that the steps to come want, in place."""
        if self.compiled is None or not isinstance(cache, Cache):
            return cache
        from genctl.decode.compiled import kept

        return kept(cache)

    def shares(self, prefix: Prefix) -> bool:
        """Whether rows that continue a prompt may share its keys and values (see `shared`).

        Tried once with a pass of its own, because a model that computes attention by itself would not see them.
        """
        if self._shares is None:
            usual = self._attends and self.compiled is None  # compiled steps see plain buffers
            self._shares = usual and not self.is_encoder_decoder and self._tries(prefix)
        return self._shares

    def groups(self, prefix: Prefix) -> bool:
        """Whether several rows may attend to one row of an encoder's (see `shared`). Tried once."""
        if self._groups is None:
            self._groups = self._attends and self.is_encoder_decoder and self._tries(prefix)
        return self._groups

    @property
    def _attends(self) -> bool:
        return self.device.type == "cpu" and self._sdpa

    @property
    def _sdpa(self) -> bool:
        config = self.config.get_text_config(decoder=True)
        return getattr(config, "_attn_implementation", "") == "sdpa"

    def _tries(self, prefix: Prefix) -> bool:
        feed = prefix.tokens[:, -1:]
        if prefix.source is None:
            cache = share(prefix.cache, 1, 1)
            inputs = {"input_ids": feed, self.cache_name: cache, "use_cache": True}
        else:
            row = torch.zeros(2, dtype=torch.long, device=self.device)
            cache = EncoderDecoderCache(
                caches.select(caches.self_part(prefix.cache), row), prefix.cache.cross_attention_cache
            )
            inputs = {"decoder_input_ids": feed.expand(2, -1), self.cache_name: cache, "use_cache": True}
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=prefix.source.states.expand(2, -1, -1))
        try:
            with torch.no_grad(), attending(cache, grouped=prefix.source is not None) as attention:
                self.model(**inputs, return_dict=True)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        return attention is not None and attention.reached == attention.wanted

    def _prepare(self, feed: Tensor, inputs: dict[str, Any], first: bool) -> dict[str, Any]:
        """Let an architecture that overrides input preparation have its say."""
        given = dict(inputs)
        given.pop("decoder_input_ids" if self.is_encoder_decoder else "input_ids")
        prepared = self.model.prepare_inputs_for_generation(feed, is_first_iteration=first, **given)
        return {key: value for key, value in prepared.items() if key != "is_first_iteration"}
