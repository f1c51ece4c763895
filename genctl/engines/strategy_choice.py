"""The strategies of one checkpoint: what the knobs choose, drafts, further checkpoints, and forced phrases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.errors import InputError, ModelError, UsageError, cannot_read
from genctl.params import Generation, Runtime

if TYPE_CHECKING:
    from genctl.decode.runtime import ModelRuntime
    from genctl.decode.types import Strategy
    from genctl.engines.lane_results import ForcedPhrases, RerankPlan
    from genctl.models.hub import LoadedModel
    from genctl.models.text import Words
    from genctl.strategies.suffixes import SuffixDrafter


class StrategyChoice:
    """Chooses strategies. Those of equal knobs are one, and further checkpoints are loaded once."""

    def __init__(self, loaded: LoadedModel, forward: ModelRuntime, runtime: Runtime, flags: dict[str, Any]) -> None:
        """`flags`: how further checkpoints (assistants, amateurs) are loaded."""
        self.loaded, self.forward, self.runtime, self.flags = loaded, forward, runtime, flags
        self.auxiliary_models: dict[str, tuple[LoadedModel, ModelRuntime]] = {}
        self._latest: tuple[Generation, tuple[Strategy, RerankPlan | None]] | None = None
        self._drafted: tuple[Strategy, Strategy] | None = None  # the last strategy, and the same with drafts
        self._suffixes: SuffixDrafter | None = None  # the texts of the run, to draft from

    def choose(self, generation: Generation) -> tuple[Strategy, RerankPlan | None]:
        """The strategy for these knobs. It has no state, so requests with equal knobs share one."""
        if self._latest is not None and self._latest[0] is generation:
            return self._latest[1]
        from genctl.config.modes import conflicts, mode_of
        from genctl.strategies import factory
        from genctl.strategies.factory import AuxiliaryModel
        from genctl.strategies.sample import Sample

        def companion(name: str) -> AuxiliaryModel:
            loaded, forward = self.companion(name)
            return AuxiliaryModel(forward, loaded.tokenizer)

        if clashes := conflicts(generation):  # of a command that sets the number of rows itself
            raise UsageError("\n".join(clashes))
        tokenizer = self.loaded.tokenizer
        if generation.mbr_samples and tokenizer is None:
            raise UsageError("mbr_samples: compares texts, and this checkpoint has no tokenizer to write any")
        ranking: RerankPlan | None = None
        if generation.best_of is not None or generation.mbr_samples is not None:
            from genctl.engines import lane_results

            ranking = lane_results.rerank_plan(generation)
        alone = generation if ranking is None else replace(generation, num_return_sequences=1)
        strategy = None
        if mode_of(alone) is not None:  # a second checkpoint, hidden layers or the text
            strategy = factory.auxiliary_strategy(alone, self.forward, tokenizer, companion)
        if strategy is None:
            pad = generation.pad_token_id
            strategy = factory.choose(
                alone, tokenizer, self.loaded.model.generation_config.pad_token_id if pad is None else pad
            )
        if ranking is not None:
            if not isinstance(strategy, Sample):
                name = "best_of" if generation.best_of else "mbr_samples"
                raise UsageError(f"{name} cannot be combined with {strategy.kind}: it chooses among plain samples")
            strategy = Sample(True, ranking.samples, sampler=generation.sampler)
        self._latest = generation, (strategy, ranking)
        return self._latest[1]

    def drafting(self, strategy: Strategy, corpus: str | None) -> Strategy:
        """The same, with drafts of what was written before and of a corpus, if it decodes one row plainly."""
        from genctl.strategies.assisted import Assisted
        from genctl.strategies.sample import Sample
        from genctl.strategies.suffixes import SuffixDrafter

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

    def forget_texts(self) -> None:
        """Begin a new run: nothing is drafted from the texts of the one before."""
        self._suffixes = self._drafted = None

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

    def forced_phrases(self, generation: Generation, strategy: Strategy, words: Words) -> ForcedPhrases | None:
        """The phrases that a finished text must contain."""
        if not (generation.force_words or generation.force_words_ids):
            return None
        from genctl.engines.lane_results import ForcedPhrases, forced_phrases
        from genctl.models.text import decode
        from genctl.strategies.constrained import ConstrainedBeam
        from genctl.strategies.constraints import Constraints

        if not isinstance(strategy, ConstrainedBeam):
            return None
        tokenizer = self.loaded.tokenizer
        phrases = forced_phrases(generation, lambda ids: "" if tokenizer is None else decode(tokenizer, ids))
        return ForcedPhrases(Constraints(strategy.words), phrases, words.decode)

    def companion(self, name: str) -> tuple[LoadedModel, ModelRuntime]:
        """A second checkpoint (an assistant, an amateur) on the same device, loaded once."""
        from genctl.engines.runtime import runtime_of
        from genctl.models import hub

        if name not in self.auxiliary_models:
            # pack it, and never compile it: its steps alternate with the model's
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
            self.auxiliary_models[name] = loaded, runtime_of(loaded.model)
        return self.auxiliary_models[name]
