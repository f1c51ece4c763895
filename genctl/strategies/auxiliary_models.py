"""Strategies that need more than the model's logits: an assistant, an amateur, hidden layers, or the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genctl.config.modes import mode_of
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Strategy
from genctl.errors import ModelError
from genctl.params import Generation

if TYPE_CHECKING:
    from genctl.strategies.contrast import Amateur
    from genctl.strategies.draft_models import Drafter


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

    drawn: dict[str, Any] = {"sampler": generation.sampler, "draft_sampling": generation.draft_sampling}
    if way == "prompt_lookup_num_tokens":
        assert generation.prompt_lookup_num_tokens is not None
        from genctl.strategies.suffixes import PromptLookup

        lookup = PromptLookup(generation.max_matching_ngram_size)
        # "up to" the number: as many as pay, unless the text depends on the number
        price = not (sample and generation.draft_sampling == "rejection")
        return Assisted(lookup, sample, generation.prompt_lookup_num_tokens, price, **drawn)
    drafter: Drafter
    if way == "assistant_early_exit":
        assert generation.assistant_early_exit is not None
        from genctl.strategies.draft_models import EarlyExitDrafter

        exit_layer, use_cache = generation.assistant_early_exit, generation.use_cache
        drafter = EarlyExitDrafter.after(forward, exit_layer, use_cache=use_cache)
    else:
        drafter = _assistant(generation, tokenizer, load)
    return Assisted(
        drafter,
        sample,
        generation.num_assistant_tokens,
        assistant_confidence_threshold=generation.assistant_confidence_threshold,
        **drawn,
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
    from genctl.strategies.contrast import Amateur

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
