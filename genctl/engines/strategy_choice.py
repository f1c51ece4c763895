"""Chooses the strategies of one checkpoint: from the knobs, with drafts and auxiliary checkpoints.

Also the runtime of a loaded model, and notes on its cache: if it is lossy, has no effect or cannot be reused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from genctl.decode.cache.layer import FULL
from genctl.decode.runtime import ModelRuntime
from genctl.errors import InputError, ModelError, UsageError, cannot_read
from genctl.native.runtime import NativeModel, NativeRuntime
from genctl.params import Generation, Runtime

if TYPE_CHECKING:
    from genctl.config.layers import Resolved
    from genctl.decode.types import Prefix, Strategy
    from genctl.engines.lane_results import RerankPlan
    from genctl.models.hub import LoadedModel
    from genctl.strategies.drafters import SuffixDrafter
    from genctl.strategies.factory import AuxiliaryModel


class StrategyChoice:
    """Chooses strategies. Consecutive requests with the same settings share one; auxiliary checkpoints load once."""

    def __init__(self, loaded: LoadedModel, forward: ModelRuntime, runtime: Runtime, flags: dict[str, Any]) -> None:
        """`flags`: how auxiliary checkpoints (assistants, amateurs) are loaded."""
        self.loaded, self.forward, self.runtime, self.flags = loaded, forward, runtime, flags
        self.auxiliary_models: dict[str, tuple[LoadedModel, AuxiliaryModel]] = {}
        self._latest: tuple[Generation, tuple[Strategy, RerankPlan | None]] | None = None
        self._drafted: tuple[Strategy, Strategy] | None = None  # the last strategy, and the same with drafts
        self._suffixes: SuffixDrafter | None = None  # the texts of the run, to draft from

    def choose(self, generation: Generation) -> tuple[Strategy, RerankPlan | None]:
        """The strategy for these knobs, and how to rerank its samples. It has no state, so requests can share it."""
        if self._latest is not None and self._latest[0] is generation:
            return self._latest[1]
        from genctl.config.modes import conflicts
        from genctl.strategies import factory
        from genctl.strategies.sample import Sample

        if clashes := conflicts(generation):  # possible if a command sets the number of rows itself
            raise UsageError("\n".join(clashes))
        tokenizer = self.loaded.tokenizer
        if generation.mbr_samples and tokenizer is None:
            raise UsageError("mbr_samples: compares texts, and this checkpoint has no tokenizer to write any")
        ranking = None
        if samples := generation.best_of or generation.mbr_samples:
            from genctl.engines.lane_results import RerankPlan

            kind: Literal["best_of", "mbr"] = "best_of" if generation.best_of else "mbr"
            ranking = RerankPlan(kind, samples, generation.num_return_sequences, generation.length_penalty)
        alone = generation if ranking is None else replace(generation, num_return_sequences=1)
        strategy = factory.auxiliary_strategy(alone, self.forward, tokenizer, self._auxiliary)
        if strategy is None:
            own = self.loaded.model.generation_config.pad_token_id
            strategy = factory.choose(alone, tokenizer, own if alone.pad_token_id is None else alone.pad_token_id)
        if ranking is not None:
            if not isinstance(strategy, Sample):
                name = "best_of" if generation.best_of else "mbr_samples"
                raise UsageError(f"{name} cannot be combined with {strategy.kind}: it chooses among plain samples")
            strategy = Sample(True, ranking.samples, sampler=generation.sampler)
        self._latest = generation, (strategy, ranking)
        return self._latest[1]

    def drafting(self, strategy: Strategy, corpus: str | None) -> Strategy:
        """The same strategy with drafts from earlier texts and a corpus, if it is plain decoding of one row."""
        from genctl.strategies.assisted import Assisted
        from genctl.strategies.drafters import SuffixDrafter
        from genctl.strategies.sample import Sample

        if not isinstance(strategy, Sample) or strategy.n > 1:
            return strategy
        if self._suffixes is None:
            self._suffixes = SuffixDrafter()
            if corpus is not None:
                self._read_corpus(self._suffixes, corpus)
        if self._drafted is None or self._drafted[0] is not strategy:
            how: dict[str, Any] = {"sampler": strategy.sampler, "length_penalty": strategy.length_penalty}
            self._drafted = strategy, Assisted(self._suffixes, strategy.do_sample, unasked=True, **how)
        return self._drafted[1]

    def _read_corpus(self, drafter: SuffixDrafter, path: str) -> None:
        """Draft from a text, or from earlier results. Raises InputError and ModelError."""
        from genctl.config import reader
        from genctl.models.text import encode

        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise ModelError(f"draft_corpus: {self.loaded.name} has no tokenizer to read {path} with")
        try:
            given = reader.text(Path(path).expanduser())
            listed = path.endswith(".jsonl")
            rows = [reader.loads(line) for line in reader.text_lines(given)] if listed else [{"text": given}]
        except (reader.Unreadable, reader.BadJson) as error:
            raise InputError(cannot_read(path, str(error), "--draft-corpus")) from None
        for row in rows:
            parts = [row.get(key) for key in ("prompt", "text")] if isinstance(row, dict) else []
            text = "".join(part for part in parts if isinstance(part, str))
            drafter.keep(encode(tokenizer, text, add_special_tokens=False) if text else [])

    def _auxiliary(self, name: str) -> AuxiliaryModel:
        """A second checkpoint (an assistant, an amateur) on the same device, loaded once."""
        from genctl.models import hub
        from genctl.strategies.factory import AuxiliaryModel

        if name not in self.auxiliary_models:
            # quantise it like the model, and never compile it: its steps alternate with the model's
            changed: dict[str, Any] = {"revision": None, "compile": False, "adapter": None, "tensor_parallel": False}
            if not name.endswith(".gguf"):
                quantize = self.runtime.quantize
                changed |= {"dequantize": False, "quantize": None if quantize == "gguf" else quantize}
            # without a tokenizer, different vocabularies cannot be detected
            loaded = hub.load(
                replace(self.runtime, model=name, **changed),
                **self.flags,
                need_tokenizer=self.loaded.tokenizer is not None,
            )
            self.auxiliary_models[name] = loaded, AuxiliaryModel(runtime_of(loaded.model), loaded.tokenizer)
        return self.auxiliary_models[name][1]


def runtime_of(model: Any, *, compile: bool = False) -> ModelRuntime:
    """The `ModelRuntime` of a loaded model. `compile` affects only transformers' models."""
    if isinstance(model, NativeModel):
        return NativeRuntime(model)
    from genctl.transformers.runtime import TransformersRuntime

    return TransformersRuntime(model, compile=compile)


def cache_notes(forward: ModelRuntime, name: str, resolved: Resolved) -> list[str]:
    """One sentence for each surprising effect of the cache, and of `cache_implementation`. `name`: the checkpoint's."""
    uses, form = resolved.generation.use_cache, resolved.generation.cache_implementation
    notes = []
    if forward.abilities.cache_differs:
        used = "its cache is used, as in generate()" if uses else "everything is read again"
        notes.append(f"{forward.name} computes other numbers with a cache than without: {used}")
    if not uses or form == "off":
        return notes
    if not forward.abilities.supports_cache:
        return [*notes, f"{name} keeps no cache: everything is read again at every step"]
    if form == "dynamic":
        return notes
    setting = f"cache_implementation = {form} ({resolved.origins['cache_implementation']})"
    kinds = {layer.kind for layer in forward.new_cache().layers if layer.kind}
    if FULL not in kinds:  # only a layer that keeps all tokens has a choice of forms
        kept = " and ".join(f"{kind}s" for kind in sorted(kinds, reverse=True)) or "layers of its own"
        notes.append(f"{setting} changes nothing: {name} keeps only {kept}")
    elif form == "quantized":
        notes.append(f"{setting} is lossy: keys and values have 8 bits, so the text may differ")
    elif form == "offloaded" and (where := forward.device.type) != "cuda":
        notes.append(f"{setting} has nowhere to offload to: the model is on the {where}, so it acts as dynamic")
    return notes


def undrafted(forward: ModelRuntime, resolved: Resolved) -> str:
    """Why plain decoding is not drafted if no setting names a drafter; "" if it is."""
    generation = resolved.generation
    if not resolved.runtime.draft:
        return "draft = false"
    if not generation.use_cache or generation.cache_implementation != "dynamic":
        return "the cache is off, or of another form than dynamic"
    if resolved.processors is not None or generation.guidance_scale not in (None, 1.0):
        return "custom processors, or guidance, see every token"
    if not forward.drafts_unasked:
        return "only native models on a CPU compute several tokens of a row as one at a time"
    return ""


def reuse_limit(forward: ModelRuntime, saved: Prefix | None) -> str:
    """Why a saved prompt may be useless for another prompt."""
    if forward.is_encoder_decoder:
        return "an encoder reads a source as a whole, so only an equal one can be reused"
    if saved is not None and saved.cache is not None and not saved.cache.is_croppable:
        return "a recurrent state cannot be cropped, so only a prompt that continues it can reuse it"
    return "the prompts have no beginning in common"
