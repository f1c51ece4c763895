"""Penalties and biases: processors that change scores depending on the tokens so far. All are stateless.

Those that transformers also has return the same numbers as its classes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genctl.decode.processors import Processor, token_sequences
from genctl.decode.processors.build import ProcessorContext, encoder_ids, own, within
from genctl.errors import UsageError
from genctl.params import Bias

OUT = -float("inf")
IdArray: TypeAlias = NDArray[np.int64]


def presence(m: ProcessorContext, penalty: float) -> Processor:
    """Subtract `penalty` from tokens that are among the new ones; the prompt does not count (OpenAI API, vLLM)."""
    return lambda history, scores: scores - penalty * (_counts(m, history, scores) > 0)


def frequency(m: ProcessorContext, penalty: float) -> Processor:
    """Subtract `penalty` for each time that a token is among the new ones (OpenAI API, vLLM)."""
    return lambda history, scores: scores - penalty * _counts(m, history, scores)


def _counts(m: ProcessorContext, history: Tensor, scores: Tensor) -> Tensor:
    """f32 [R, V]: how often each token occurs among the new ones, or among the last `penalty_last_n` of them."""
    window = m.generation.penalty_last_n
    begin = m.prompt_len if window is None else max(m.prompt_len, history.shape[1] - window)
    new = history[:, begin:].to(scores.device)
    counts = scores.new_zeros(scores.shape[0], scores.shape[1] + 1)
    # An embedding may have more rows than there are scores; such ids are counted past the end.
    counts.scatter_add_(1, new.clamp(max=scores.shape[1]), torch.ones_like(new, dtype=scores.dtype))
    return counts[:, :-1]


def dry_of_knobs(m: ProcessorContext, multiplier: float) -> Processor:
    g, knob = m.generation, "dry_sequence_breakers"
    sequences = {ids for text in g.dry_sequence_breakers for ids in token_sequences.containing(m.tokenizer, text, knob)}
    return windowed(dry(multiplier, g.dry_base, g.dry_allowed_length, sequences), g.penalty_last_n)


def windowed(processor: Processor, window: int | None) -> Processor:
    """The processor, limited to the last `window` tokens of the history; None: all of them."""
    if window is None:
        return processor
    return lambda history, scores: processor(history[:, -window:], scores)


def dry(multiplier: float, base: float, allowed_length: int, breakers: Collection[tuple[int, ...]]) -> Processor:
    """DRY: make tokens that would continue a repetition less likely, the more so the longer it is.

    github.com/oobabooga/text-generation-webui/pull/5677. If the last n tokens occur earlier in the history (prompt
    included), the token that followed them there loses multiplier * base ** (n - allowed_length), from n =
    allowed_length on; the longest n counts. Nothing matches across a breaker, and a breaker itself is never penalised:
    `breakers` are single ids, and sequences of ids whose last one breaks.
    """
    stops = {ids[0] for ids in breakers if len(ids) == 1}
    phrases = sorted(ids for ids in breakers if len(ids) > 1)
    reach = max(map(len, phrases), default=0)
    # Close to the largest float32, where the token has no probability: longer repetitions do not count more.
    most = 1e30
    growing = base > 1.0 and multiplier < most
    longest = allowed_length + (math.ceil(math.log(most / multiplier) / math.log(base)) if growing else 0)

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        output = None
        for row, written in enumerate(history.cpu().numpy()):
            unbroken = _unbroken(written[-longest - reach :].tolist(), stops, phrases, longest)
            lengths = _continuations(written, unbroken, allowed_length)
            tokens = [token for token in lengths if token < scores.shape[1] and token not in stops]
            if not tokens:
                continue
            exponents = np.array([lengths[token] - float(allowed_length) for token in tokens])
            with np.errstate(over="ignore"):
                penalties = np.minimum(multiplier * np.power(base, exponents), most)
            output = scores.clone() if output is None else output
            output[row, tokens] -= scores.new_tensor(penalties)
        return scores if output is None else output

    return processor


def _continuations(written: IdArray, most: int, least: int) -> dict[int, int]:
    """The tokens that would continue a repetition of `least` to `most` tokens, each with the length of the longest.

    written int64 [T]. The first comparison finds all earlier places of the last token; each further one only checks
    the places that still match.
    """
    ends = np.flatnonzero(written[:-1] == written[-1]) if least <= most else np.empty(0, np.intp)
    lengths = np.ones_like(ends)
    live = np.arange(len(ends))
    for length in range(1, most):
        live = live[ends[live] >= length]
        live = live[written[ends[live] - length] == written[-1 - length]]
        if not len(live):
            break
        lengths[live] = length + 1
    long = np.flatnonzero(lengths >= least)
    long = long[np.argsort(lengths[long])]  # of equal tokens the dictionary keeps the last, which is the longest
    return dict(zip(written[ends[long] + 1].tolist(), lengths[long].tolist(), strict=True))


def _unbroken(newest: list[int], stops: Collection[int], phrases: Sequence[tuple[int, ...]], most: int) -> int:
    """How many tokens at the end of the history come after its last breaker; at most `most`."""
    for back in range(min(most, len(newest))):
        end = len(newest) - back
        if newest[end - 1] in stops:
            return back
        for phrase in phrases:
            if newest[end - 1] == phrase[-1] and tuple(newest[max(0, end - len(phrase)) : end]) == phrase:
                return back
    return min(most, len(newest))


def sequence_bias(m: ProcessorContext, biases: list[Bias]) -> Processor:
    return checked_bias(m, "sequence_bias", {tuple(ids): float(bias) for ids, bias in biases})


def logit_bias(m: ProcessorContext, biases: dict[str, float]) -> Processor | None:
    return checked_bias(m, "logit_bias", token_sequences.bias_of(m.tokenizer, biases)) if biases else None


def checked_bias(m: ProcessorContext, knob: str, biases: dict[tuple[int, ...], float]) -> Processor:
    """The processor of biases. Raises UsageError if there are none, or for an invalid id or bias."""
    if not biases:
        raise UsageError(f"{knob}: the list is empty; expected at least one sequence of ids")
    for ids, bias in biases.items():
        within(m, knob, ids)
        if bias != bias or bias == float("inf"):
            raise UsageError(f"{knob}: a bias must be a number or -inf, but is {bias}")
    return biased(biases, m.vocab_size, m.device)


def encoder_repetition_penalty(m: ProcessorContext, penalty: float) -> Processor:
    """Multiply the scores of the source's tokens by the penalty if they are above 0, else divide them, in each row."""
    ids = encoder_ids(m, "encoder_repetition_penalty")
    return lambda history, scores: _penalised(ids.expand(len(scores), -1), scores, 1 / float(penalty))


def repetition_penalty(m: ProcessorContext, penalty: float) -> Processor:
    """Divide the scores of tokens already in the row by the penalty if above 0, else multiply (arXiv:1909.05858)."""
    return windowed(lambda history, scores: _penalised(history, scores, float(penalty)), m.generation.penalty_last_n)


def _penalised(ids: Tensor, scores: Tensor, penalty: float) -> Tensor:
    size = scores.shape[-1]
    ids = ids.clamp(max=size)  # ids beyond the scores (an embedding may have more rows) share a spare column
    padded = torch.nn.functional.pad(scores, (0, 1))
    penalised = padded.gather(1, ids)
    penalised = torch.where(penalised < 0, penalised * penalty, penalised / penalty)
    return padded.scatter(1, ids, penalised)[..., :size]


def no_repeat_ngram_size(m: ProcessorContext, size: int) -> Processor:
    """Remove tokens that would complete an n-gram that the row already contains."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        length = history.shape[-1]
        if length < size:
            return scores
        begun = history[:, length + 1 - size :]
        windows = history.unfold(1, size, 1)  # [R, T - n + 1, n]
        same = (windows[..., :-1] == begun[:, None]).all(-1)
        vocabulary = scores.shape[-1]
        out = scores.new_zeros((len(scores), vocabulary + 1), dtype=torch.bool)
        # windows that do not match write to a spare column
        out.scatter_(1, torch.where(same, windows[..., -1].clamp(max=vocabulary), vocabulary), True)
        return scores.masked_fill(out[:, :vocabulary], OUT)

    return processor


def encoder_no_repeat_ngram_size(m: ProcessorContext, size: int) -> Processor | None:
    ids = encoder_ids(m, "encoder_no_repeat_ngram_size")
    if size > ids.shape[1]:  # there is no sequence of n tokens to repeat, and transformers would count up to n
        return None
    return own("EncoderNoRepeatNGramLogitsProcessor", size, ids)


def exponential_decay_length_penalty(m: ProcessorContext, decay: tuple[int, float]) -> Processor:
    """Add |score| * (factor ** n - 1) to the scores of EOS, n tokens after the first decay[0] new ones.

    A score that is not finite stays: a minimum length before it has removed EOS.
    """
    eos = [token for token in m.eos if token < m.vocab_size]  # config.json may name an id that the model lacks
    if not eos:
        raise UsageError("exponential_decay_length_penalty makes EOS more likely, but there is no EOS id")
    start, factor = decay[0] + m.prompt_len, float(decay[1])
    ends = torch.tensor(eos, device=m.device)

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        behind = history.shape[-1] - start
        if behind <= 0:
            return scores
        ending = scores[:, ends]
        added = torch.zeros_like(scores)
        added[:, ends] = (ending.abs() * (factor**behind - 1)).masked_fill(~ending.isfinite(), 0.0)
        return scores + added

    return processor


def biased(biases: Mapping[tuple[int, ...], float], vocab_size: int, device: torch.device | str) -> Processor:
    """Add a bias to the last token of each sequence if the row ends with the tokens before it.

    Sequences of the same length are compared at once.
    """
    grouped: dict[int, list[tuple[int, ...]]] = {}
    for sequence in biases:
        grouped.setdefault(len(sequence) - 1, []).append(sequence)
    always = torch.zeros(vocab_size, device=device)
    for sequence in grouped.pop(0, []):
        always[sequence[0]] = biases[sequence]
    groups = [
        (
            torch.tensor([sequence[:-1] for sequence in sequences], device=device),  # [n, length]
            torch.tensor([sequence[-1] for sequence in sequences], device=device),
            torch.tensor([biases[sequence] for sequence in sequences], device=device),
        )
        for sequences in grouped.values()
    ]

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        bias = torch.zeros_like(scores) + always
        for prefixes, last, values in groups:
            length = prefixes.shape[1]
            if length <= history.shape[1]:
                same = (history[:, None, -length:] == prefixes).all(-1)  # [R, n]
                bias.index_add_(1, last, torch.where(same, values, 0.0).to(bias.dtype))
        return scores + bias

    return processor
