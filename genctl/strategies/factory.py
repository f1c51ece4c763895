"""The strategy for the generation parameters, determined as in transformers; conflicts are refused.

`auxiliary_strategy` makes strategies that need more than the model's logits: an assistant, an amateur, hidden layers,
or the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genctl.config.modes import check_search, mode_of
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Strategy
from genctl.errors import ModelError, UsageError
from genctl.params import Generation
from genctl.strategies.sample import Sample

if TYPE_CHECKING:
    from genctl.strategies.constraints import Alternatives, Phrase
    from genctl.strategies.drafters import Drafter


@dataclass(frozen=True)
class AuxiliaryModel:
    """A second checkpoint. `tokenizer` is None if it has none; prompts of token ids need none."""

    forward: ModelRuntime
    tokenizer: Any = None


def auxiliary_strategy(
    generation: Generation, forward: ModelRuntime, tokenizer: Any, load: Callable[[str], AuxiliaryModel]
) -> Strategy | None:
    """The strategy of the assistant, early exit, lookup, DoLa or amateur knobs; None if none is set.

    `forward` and `tokenizer` are the model's; `load` loads `assistant_model` or `amateur_model`. Raises UsageError for
    conflicting knobs, ModelError for checkpoints that cannot be combined.
    """
    way = mode_of(generation)
    if way is None:
        return None
    sample, count = generation.do_sample, generation.num_return_sequences
    if way == "dola_layers":
        from genctl.strategies.contrast import Dola

        layers = generation.dola_layers
        assert layers is not None
        return Dola(tuple(layers) if isinstance(layers, list) else layers, sample, count)
    if way == "amateur_model":
        from genctl.strategies.contrast import Amateur

        name = str(generation.amateur_model)
        amateur = load(name)
        if not same_tokens(tokenizer, amateur.tokenizer):
            raise ModelError(f"amateur_model: {name} has other tokens than the model, so nothing compares")
        alpha, beta = generation.contrastive_alpha, generation.contrastive_beta
        return Amateur(amateur.forward, alpha, beta, generation.amateur_temperature, sample, count)
    from genctl.strategies.assisted import Assisted
    from genctl.strategies.drafters import PromptLookup, early_exit

    if way == "prompt_lookup_num_tokens":
        lookup = PromptLookup(generation.max_matching_ngram_size)
        return Assisted(lookup, sample, generation.prompt_lookup_num_tokens, price=True, sampler=generation.sampler)
    if way == "assistant_early_exit":
        assert generation.assistant_early_exit is not None
        drafter: Drafter = early_exit(forward, generation.assistant_early_exit, use_cache=generation.use_cache)
    else:
        drafter = _assistant(generation, tokenizer, load)
    return Assisted(
        drafter,
        sample,
        generation.num_assistant_tokens,
        assistant_confidence_threshold=generation.assistant_confidence_threshold,
        sampler=generation.sampler,
    )


def _assistant(generation: Generation, tokenizer: Any, load: Callable[[str], AuxiliaryModel]) -> Drafter:
    name = str(generation.assistant_model)
    assistant = load(name)
    if same_tokens(tokenizer, assistant.tokenizer):
        from genctl.strategies.drafters import ModelDrafter

        return ModelDrafter(assistant.forward)
    if tokenizer is None or assistant.tokenizer is None:
        raise ModelError(f"{name} has other tokens than the model, and one of them has no tokenizer")
    from genctl.strategies.universal import UniversalDrafter

    lookbehinds = generation.assistant_lookbehind, generation.target_lookbehind
    return UniversalDrafter(assistant.forward, assistant.tokenizer, tokenizer, *lookbehinds)


def same_tokens(a: Any, b: Any) -> bool:
    """Whether two tokenizers have the same vocabulary. Two checkpoints without a tokenizer count as equal."""
    if a is None or b is None:
        return a is b
    return a is b or bool(a.get_vocab() == b.get_vocab())


def choose(generation: Generation, tokenizer: Any = None, pad_token_id: int | None = None) -> Strategy:
    """The strategy for these knobs. `tokenizer` encodes `force_words`; it is required for texts.

    `pad_token_id` is the checkpoint's, used if the knobs have none.

    Raises UsageError for knobs that conflict or that the strategy cannot use.
    """
    words = _words(generation, tokenizer)
    beams, returned = generation.num_beams, generation.num_return_sequences
    check_search(generation)
    if words:
        from genctl.strategies.constrained import ConstrainedBeam

        reserved = int(generation.forced_eos_token_id is not None)
        return ConstrainedBeam(beams, words, generation.length_penalty, generation.early_stopping, returned, reserved)
    if beams > 1:
        from genctl.strategies.beam import Beam

        pad = pad_token_id if generation.pad_token_id is None else generation.pad_token_id
        groups, diversity = generation.num_beam_groups, generation.diversity_penalty
        ends = generation.length_penalty, generation.early_stopping
        return Beam(beams, generation.do_sample, groups, diversity, *ends, returned, pad)
    if generation.penalty_alpha:
        from genctl.strategies.contrast import Contrastive

        return Contrastive(generation.top_k, generation.penalty_alpha)
    if generation.ban:
        from genctl.strategies.banned import Banned

        return Banned(generation.do_sample, generation.length_penalty, generation.sampler)
    return Sample(generation.do_sample, returned, generation.length_penalty, generation.sampler)


def _words(generation: Generation, tokenizer: Any) -> tuple[Alternatives, ...]:
    """The alternative phrases of each constraint."""
    constraints: list[Alternatives] = []
    for entry in generation.force_words_ids or []:
        lists = [item for item in entry if isinstance(item, list)]
        if lists and len(lists) < len(entry):
            raise UsageError(f"force_words_ids: {entry} mixes ids with lists of ids")
        phrases = lists or [[item for item in entry if isinstance(item, int)]]
        constraints.append(tuple(map(_phrase, phrases)))
    if generation.force_words and tokenizer is None:
        raise UsageError("force_words needs a tokenizer; use force_words_ids")
    for word in generation.force_words or []:
        from genctl.decode.processors.token_sequences import variants

        texts = [word] if isinstance(word, str) else word
        if not texts:
            raise UsageError("force_words: an empty list of alternatives can never be met")
        constraints.append(tuple(ids for text in texts for ids in variants(tokenizer, text, "force_words")))
    return tuple(constraints)


def _phrase(ids: Sequence[int]) -> Phrase:
    if not ids:
        raise UsageError("force_words_ids: an empty phrase asks for nothing")
    if min(ids) < 0:
        raise UsageError(f"force_words_ids: {min(ids)} is not a token id")
    return tuple(ids)
