"""The strategy for the generation parameters, determined as in transformers; conflicts are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from genctl.decode.processors.token_sequences import variants
from genctl.decode.types import Strategy
from genctl.errors import UsageError
from genctl.params import Generation
from genctl.strategies.sample import Sample

if TYPE_CHECKING:
    from genctl.strategies.constraints import Alternatives, Phrase
    from genctl.strategies.contrastive import Contrastive


def choose(generation: Generation, tokenizer: Any = None, pad_token_id: int | None = None) -> Strategy:
    """The strategy for these knobs. `tokenizer` encodes `force_words`; without it texts cannot be forced.

    `pad_token_id` is the checkpoint's, used if the knobs have none.

    Raises UsageError, in one sentence, for knobs that conflict or that the strategy cannot use.
    """
    words = _words(generation, tokenizer)
    beams, returned = generation.num_beams, generation.num_return_sequences
    _check_beams(generation)
    if words:
        from genctl.strategies.constrained import ConstrainedBeam

        _check_words(generation)
        reserved = int(generation.forced_eos_token_id is not None)
        return ConstrainedBeam(beams, words, generation.length_penalty, generation.early_stopping, returned, reserved)
    if beams > 1 and generation.stochastic_beams:
        from genctl.strategies.stochastic import StochasticBeam

        return StochasticBeam(beams, returned)
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
        return _contrastive(generation)
    if not generation.do_sample and returned > 1:
        raise UsageError(
            f"num_return_sequences = {returned} would return identical sequences: do_sample is false and num_beams = 1"
        )
    return Sample(generation.do_sample, returned, generation.length_penalty, generation.sampler)


def _check_beams(generation: Generation) -> None:
    beams, groups, returned = generation.num_beams, generation.num_beam_groups, generation.num_return_sequences
    penalty = generation.diversity_penalty
    if beams > 1 and returned > beams:
        raise UsageError(f"num_return_sequences = {returned} cannot exceed num_beams = {beams}")
    if groups > beams:
        raise UsageError(f"num_beam_groups = {groups} cannot exceed num_beams = {beams}")
    if beams % groups:
        raise UsageError(f"num_beams = {beams} cannot be divided into num_beam_groups = {groups} equal groups")
    if groups > 1 and generation.do_sample:
        raise UsageError(
            f"num_beam_groups = {groups} cannot be combined with do_sample = true: diverse beam search does not sample"
        )
    if groups > 1 and not penalty:
        raise UsageError(f"num_beam_groups = {groups} needs diversity_penalty above 0, or all groups are identical")
    if penalty and groups == 1:
        raise UsageError(f"diversity_penalty = {penalty:g} has no effect with num_beam_groups = 1")
    if generation.stochastic_beams and beams == 1:
        raise UsageError("stochastic_beams = true samples several hypotheses, but num_beams = 1")
    if generation.stochastic_beams and not generation.do_sample:
        raise UsageError("stochastic_beams = true cannot be combined with do_sample = false: it samples beams")
    if generation.sampler != "multinomial" and beams > 1 and generation.do_sample:
        raise UsageError(
            f'sampler = "{generation.sampler}" draws one token for each row, but num_beams = {beams} needs several'
        )
    if generation.penalty_alpha and beams > 1:
        raise UsageError(f"penalty_alpha = {generation.penalty_alpha:g} is contrastive search, but num_beams = {beams}")


def _check_words(generation: Generation) -> None:
    name = "force_words_ids" if generation.force_words_ids else "force_words"
    if generation.num_beams == 1:
        raise UsageError(f"{name} needs num_beams above 1, but num_beams = 1")
    if generation.do_sample:
        raise UsageError(f"{name} cannot be combined with do_sample = true: constrained beam search does not sample")
    if generation.num_beam_groups > 1:
        raise UsageError(f"{name} cannot be combined with num_beam_groups = {generation.num_beam_groups}")


def _contrastive(generation: Generation) -> Contrastive:
    from genctl.strategies.contrastive import Contrastive

    alpha, returned = generation.penalty_alpha or 0.0, generation.num_return_sequences
    if generation.do_sample:
        raise UsageError(
            f"penalty_alpha = {alpha:g} cannot be combined with do_sample = true: contrastive search does not sample"
        )
    if generation.top_k < 2:
        raise UsageError(f"penalty_alpha = {alpha:g} compares candidates, but top_k = {generation.top_k}")
    if returned > 1:
        raise UsageError(f"penalty_alpha = {alpha:g} finds one sequence, but num_return_sequences = {returned}")
    return Contrastive(generation.top_k, alpha)


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
    for word in generation.force_words or []:
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
