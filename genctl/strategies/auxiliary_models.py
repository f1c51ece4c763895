"""Strategies that need more than the model's logits: an assistant, an amateur, hidden layers, or the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Strategy
from genctl.errors import ModelError, UsageError
from genctl.params import Generation

if TYPE_CHECKING:
    from genctl.strategies.amateur import Amateur
    from genctl.strategies.draft_models import Drafter

# The knobs that select one of these strategies, and the knobs that only refine one.
DRAFTING = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
MODES = (*DRAFTING, "dola_layers", "amateur_model")
REFINES: dict[str, tuple[str, ...]] = {
    "max_matching_ngram_size": ("prompt_lookup_num_tokens",),
    "num_assistant_tokens": ("assistant_model", "assistant_early_exit"),
    "num_assistant_tokens_schedule": ("assistant_model", "assistant_early_exit"),
    "assistant_confidence_threshold": ("assistant_model", "assistant_early_exit"),
    "assistant_lookbehind": ("assistant_model",),
    "target_lookbehind": ("assistant_model",),
    "contrastive_alpha": ("amateur_model",),
    "contrastive_beta": ("amateur_model",),
    "amateur_temperature": ("amateur_model",),
}


@dataclass(frozen=True)
class AuxiliaryModel:
    """A second checkpoint. `tokenizer` is None if it has none; prompts of token ids need none."""

    forward: ModelRuntime
    tokenizer: Any = None


def mode_of(generation: Generation) -> str | None:
    """The knob in `MODES` that is set. Raises UsageError, in one sentence, for a knob that conflicts with it."""
    knobs = [name for name in MODES if getattr(generation, name) is not None]
    if not knobs:
        defaults = {item.name: item.default for item in fields(Generation)}
        for name, ways in REFINES.items():
            if getattr(generation, name) != defaults[name]:
                raise UsageError(f"{name} changes nothing without {' or '.join(ways)}")
        return None
    way = knobs[0]
    others = {
        **{name: True for name in knobs[1:]},
        f"num_beams = {generation.num_beams}": generation.num_beams > 1,
        "penalty_alpha": bool(generation.penalty_alpha),
        "force_words": bool(generation.force_words or generation.force_words_ids),
    }
    for other, there in others.items():
        if there:
            raise UsageError(f"{way} and {other} are two ways to search, and a text is found in one")
    returned = generation.num_return_sequences
    if returned > 1 and way in DRAFTING:
        raise UsageError(f"{way} writes one sequence at a time, but num_return_sequences = {returned}")
    if returned > 1 and not generation.do_sample:
        raise UsageError(f"num_return_sequences = {returned} would return identical sequences: do_sample is false")
    if generation.do_sample and generation.sampler != "multinomial":
        raise UsageError(f'sampler = "{generation.sampler}" is for plain sampling, and {way} draws in its own way')
    return way


def auxiliary_strategy(
    generation: Generation, forward: ModelRuntime, tokenizer: Any, load: Callable[[str], AuxiliaryModel]
) -> Strategy | None:
    """The strategy of the assistant, early exit, lookup, DoLa or amateur knobs; None if none is set.

    `forward` and `tokenizer` are the model's; `load` loads `assistant_model` or `amateur_model`. Raises UsageError for
    conflicting knobs, ModelError for checkpoints that do not go together.
    """
    way = mode_of(generation)
    if way is None:
        return None
    sample, count = generation.do_sample, generation.num_return_sequences
    if way == "dola_layers":
        from genctl.strategies.dola import Dola

        layers = generation.dola_layers
        assert layers is not None
        return Dola(tuple(layers) if isinstance(layers, list) else layers, sample, count)
    if way == "amateur_model":
        return _amateur(generation, tokenizer, load)
    from genctl.strategies.assisted import Assisted

    if way == "prompt_lookup_num_tokens":
        assert generation.prompt_lookup_num_tokens is not None
        from genctl.strategies.draft_models import PromptLookup

        lookup = PromptLookup(generation.max_matching_ngram_size)
        return Assisted(lookup, sample, num_assistant_tokens=generation.prompt_lookup_num_tokens)
    drafter: Drafter
    if way == "assistant_early_exit":
        assert generation.assistant_early_exit is not None
        from genctl.strategies.early_exit import EarlyExitDrafter

        drafter = EarlyExitDrafter.after(forward, generation.assistant_early_exit)
    else:
        drafter = _assistant(generation, tokenizer, load)
    return Assisted(
        drafter,
        sample,
        generation.num_assistant_tokens,
        generation.num_assistant_tokens_schedule,
        generation.assistant_confidence_threshold,
    )


def _assistant(generation: Generation, tokenizer: Any, load: Callable[[str], AuxiliaryModel]) -> Drafter:
    assert generation.assistant_model is not None
    assistant = load(generation.assistant_model)
    if same_tokens(tokenizer, assistant.tokenizer):
        from genctl.strategies.draft_models import ModelDrafter

        return ModelDrafter(assistant.forward)
    if tokenizer is None or assistant.tokenizer is None:
        raise ModelError(
            f"{generation.assistant_model} has other tokens than the model, and one of them has no tokenizer"
        )
    from genctl.strategies.universal import UniversalDrafter

    return UniversalDrafter(
        assistant.forward,
        assistant.tokenizer,
        tokenizer,
        generation.assistant_lookbehind,
        generation.target_lookbehind,
    )


def _amateur(generation: Generation, tokenizer: Any, load: Callable[[str], AuxiliaryModel]) -> Amateur:
    assert generation.amateur_model is not None
    amateur = load(generation.amateur_model)
    if not same_tokens(tokenizer, amateur.tokenizer):
        raise ModelError(
            f"amateur_model: {generation.amateur_model} has other tokens than the model, so nothing compares"
        )
    from genctl.strategies.amateur import Amateur

    return Amateur(
        amateur.forward,
        generation.contrastive_alpha,
        generation.contrastive_beta,
        generation.amateur_temperature,
        generation.do_sample,
        generation.num_return_sequences,
    )


def same_tokens(a: Any, b: Any) -> bool:
    """Whether two tokenizers have the same vocabulary. Two checkpoints without a tokenizer count as equal."""
    if a is None or b is None:
        return a is b
    return a is b or bool(a.get_vocab() == b.get_vocab())
