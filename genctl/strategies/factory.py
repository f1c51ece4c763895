"""The strategy for the generation parameters, determined as in transformers; conflicts are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from genctl.config.modes import check_search
from genctl.decode.types import Strategy
from genctl.errors import UsageError
from genctl.params import Generation
from genctl.strategies.sample import Sample

if TYPE_CHECKING:
    from genctl.strategies.constraints import Alternatives, Phrase


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

        return Beam(
            beams,
            generation.do_sample,
            generation.num_beam_groups,
            generation.diversity_penalty,
            generation.length_penalty,
            generation.early_stopping,
            returned,
            pad_token_id if generation.pad_token_id is None else generation.pad_token_id,
        )
    if generation.penalty_alpha:
        from genctl.strategies.contrastive import Contrastive

        return Contrastive(generation.top_k, generation.penalty_alpha)
    if generation.ban:
        from genctl.strategies.banned import Banned

        return Banned(generation.do_sample, generation.length_penalty, generation.sampler)
    return Sample(generation.do_sample, returned, generation.length_penalty, generation.sampler)


def _words(generation: Generation, tokenizer: Any) -> tuple[Alternatives, ...]:
    """The constraints: for each the alternative phrases."""
    constraints: list[Alternatives] = []
    for entry in generation.force_words_ids or []:
        if any(isinstance(item, list) for item in entry):
            if not all(isinstance(item, list) for item in entry):
                raise UsageError(f"force_words_ids: {entry} mixes ids with lists of ids")
            constraints.append(tuple(_phrase(item) for item in entry if isinstance(item, list)))
        else:
            constraints.append((_phrase([item for item in entry if isinstance(item, int)]),))
    if not generation.force_words:
        return tuple(constraints)
    from genctl.decode.processors.token_sequences import variants

    for word in generation.force_words:
        if tokenizer is None:
            raise UsageError("force_words needs a tokenizer; use force_words_ids")
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
