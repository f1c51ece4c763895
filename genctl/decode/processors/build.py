"""Build processors from knobs, in the order of `listed_knobs.PROCESSORS`, importing only the files that they need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from genctl.config.listed_knobs import PROCESSORS, ProcessorRow, Reads, check_finite, is_set, make, processors_of
from genctl.decode.processors import Processor
from genctl.errors import GenctlError, ModelError, UsageError, one_line, quote, raised
from genctl.params import Generation


@dataclass(frozen=True, eq=False)
class ProcessorContext:
    """The input for building processors.

    A lane's history has no padding, so unlike in transformers there is no padding length.
    """

    generation: Generation
    prompt_len: int  # the decoder's tokens before the first new one
    max_length: int  # maximum number of tokens, prompt included
    vocab_size: int  # V, the number of scores per row
    eos: tuple[int, ...] = ()
    device: torch.device | str = "cpu"
    encoder_ids: Tensor | None = None  # int64 [1, S], the encoder's input, or the prompt without an encoder
    tokenizer: Any = None
    is_encoder_decoder: bool = False
    seed: int = 0  # for processors that draw numbers (XTC)
    explicit: tuple[dict[str, Any], ...] | None = None  # the [[processors]] of a preset
    allow_plugins: bool = False
    written: tuple[int, ...] = ()  # the last tokens of the prompt, if the text of the grammar begins with them
    begun: bool = False  # whether other text comes before the new text, so that its leading blank is not stripped
    healed: str = ""  # text that was removed from the prompt; the new tokens must begin with it
    opening: str = ""  # the end of the prompt, where thinking may have been opened (of a chat: after all messages)
    half: bool = False  # whether the model computes in half precision, where equal scores are common
    unconditional: Callable[[Tensor], Tensor] | None = None  # history [R, T] -> logits [R, V] under the negative prompt

    @property
    def min_tokens_to_keep(self) -> int:
        """The least number of tokens that a filter must keep: 1; with beams one more than the EOS ids (at least 2)."""
        if not self.generation.is_beam_search:
            return 1
        return len(self.eos) + 1 if self.eos else 2


@dataclass(frozen=True, eq=False)
class NamedProcessor:
    """A processor with its name and the settings it was built with; call it like any processor."""

    name: str
    function: Processor
    settings: dict[str, Any] = field(default_factory=dict)
    foreign: bool = False  # a user's own: its failures are reported as such
    key: Hashable = None  # equal keys: the same function of scores and `reads`; None: it may depend on more
    reads: Reads = "lane"

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """history int64 [R, T], scores f32 [R, V] -> scores f32 [R, V].

        Raises ModelError if the function fails because a row has no token left, UsageError if a user's own one fails.
        """
        if not self.foreign:
            return clearly(self.function, history, scores)
        try:
            output = self.function(history, scores)
        except GenctlError:
            raise
        except Exception as error:
            raise UsageError(f"processor {self.name} failed: {raised(error)}") from error
        if not isinstance(output, Tensor) or output.shape != scores.shape:
            kind = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise UsageError(f"processor {self.name} returned {kind} instead of scores of shape {tuple(scores.shape)}")
        return output


def clearly(function: Processor, history: Tensor, scores: Tensor) -> Tensor:
    """The scores after a processor, with a clearer error than transformers' for a row without tokens."""
    try:
        return function(history, scores)
    except (ValueError, RuntimeError, IndexError):
        check(scores, ())
        raise


def own(name: str, *arguments: Any, **keywords: Any) -> Processor:
    """An instance of transformers' class `name`."""
    from transformers.generation import logits_process

    processor: Processor = getattr(logits_process, name)(*arguments, **keywords)
    return processor


def encoder_ids(m: ProcessorContext, knob: str) -> Tensor:
    """The ids of the source or prompt, int64 [1, S]. Raises UsageError if it is missing or has no ids."""
    ids = m.encoder_ids
    if ids is None or bool((ids < 0).any()):
        raise UsageError(f"{knob}: there are no ids of a prompt or source to compare with")
    return ids.to(m.device)


def within(m: ProcessorContext, knob: str, ids: Any) -> None:
    """Raises UsageError for a sequence of ids that is empty or has an id outside the vocabulary."""
    if not ids:
        raise UsageError(f"{knob}: a sequence of ids is empty")
    for token in ids:
        if not 0 <= token < m.vocab_size:
            raise UsageError(f"{knob}: {token} is not one of the {m.vocab_size} ids of the vocabulary")


# -- checks of the remaining scores ------------------------------------------------------------------------------------


def name_of(processor: Processor) -> str:
    """The name of a processor in traces and errors."""
    return str(getattr(processor, "name", None) or getattr(processor, "__name__", None) or type(processor).__name__)


def _phrases(processor: Processor) -> str:
    """The first five texts that a processor bans, in parentheses; "" if it bans none."""
    phrases = getattr(getattr(processor, "function", None), "phrases", ())
    more = ", …" if len(phrases) > 5 else ""
    return f" ({', '.join(map(quote, phrases[:5]))}{more})" if phrases else ""


def check(scores: Tensor, processors: Sequence[Processor]) -> None:
    """One pass over scores f32 [R, V]: each row must have a token that can be chosen. Raises as `check_choosable`."""
    check_choosable([scores.amax(-1).tolist()], processors)


def check_choosable(best: Sequence[Sequence[float]], processors: Sequence[Processor]) -> None:
    """Check the largest score of each row after `processors`; it is NaN if any score of the row is NaN.

    Raises UsageError naming the processors if they leave a row no token, ModelError without any, or for NaN or +inf.
    """
    if all(math.isfinite(score) for line in best for score in line):
        return
    names = [name_of(processor) + _phrases(processor) for processor in processors]
    after = f" after {', '.join(names)}" if names else ""
    if any(math.isnan(score) or score == math.inf for line in best for score in line):
        raise ModelError(
            f"the scores are not all numbers{after}: NaN or infinite",
            hint="remove_invalid_values = true replaces them; a larger dtype may avoid them",
        )
    if not names:
        raise ModelError("the model gave every token a score of minus infinity")
    raise UsageError(f"no token is left to choose{after}: together they remove all of them", hint="relax one of them")


def build(context: ProcessorContext) -> tuple[NamedProcessor, ...]:
    """Build the processors of the knobs, in the order of `PROCESSORS`; samplers only when sampling.

    With `context.explicit`, only the processors of that list, in its order: each entry is
    `{"use": NAME, KNOB: VALUE, …}` with knobs of that processor (others keep the value of `context.generation`), or
    a user's own. `config` has checked names, keys and values. Listed processors also act without sampling. Processors
    whose settings have no effect are left out.

    Raises UsageError if a processor cannot be built.
    """
    check_finite(context.generation)
    if context.explicit is None:
        made = [_make(row, context) for row in processors_of(context.generation, healed=bool(context.healed))]
    else:
        made = [_listed(number, item, context) for number, item in enumerate(context.explicit, 1)]
    return tuple(processor for processor in made if processor is not None)


def maker_of(row: ProcessorRow) -> Any:
    """The function that makes a processor from a `ProcessorContext` and the value of its first knob; it returns None
    if the setting has no effect.
    """
    file, _, function = row.maker.partition(".")
    return getattr(import_module(f"genctl.decode.processors.{file}"), function)


def _make(row: ProcessorRow, context: ProcessorContext) -> NamedProcessor | None:
    value = getattr(context.generation, row.knobs[0])
    if not is_set(row, context.generation, healed=bool(context.healed)):
        return None
    try:
        function = maker_of(row)(context, value)
    except GenctlError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # raised by transformers' constructors
        raise UsageError(f"{row.name}: {one_line(error)}") from error
    if function is None:
        return None
    settings = {name: getattr(context.generation, name) for name in row.knobs}
    key = (row.name, repr(settings)) if row.reads != "lane" else None
    return NamedProcessor(row.name, function, settings, key=key, reads=row.reads)


def _listed(number: int, item: dict[str, Any], context: ProcessorContext) -> NamedProcessor | None:
    use, values = item["use"], {key: value for key, value in item.items() if key != "use"}
    try:
        if use not in PROCESSORS:
            # a user's own: a class that is constructed with the values (a transformers LogitsProcessor, or any class
            # with instances that take history and scores), or a function of history, scores and the values
            function = make("processor", use, values, allowed=context.allow_plugins)
            return NamedProcessor(use, function, values, foreign=True)
        if use == "temperature" and "temperature" in values:
            if values["temperature"] == 0.0:
                raise UsageError("temperature: must be above 0 in a list; do_sample = false takes the best token")
            values["dynatemp_range"] = 0.0  # both may be listed, each with its own value
        generation = dataclasses.replace(context.generation, **values)
        check_finite(generation)
        return _make(PROCESSORS[use], dataclasses.replace(context, generation=generation))
    except UsageError as error:
        raise UsageError(f"processors, item {number}: {error.message}", hint=error.hint) from error
