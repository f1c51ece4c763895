"""Build the stopping criteria of the knobs, in order.

Without a `[[stopping]]` list the order is transformers', then genctl's own: max_time, stop_strings, stop_token_ids,
stop_regex, stop_mean_logprob, stop_repeat_ngram. With one, the list comes first, in its own order, and then the other
knobs that are set. If several would end a row at the same token, the first is reported.

A table of the list has `use`: the name of a knob, of an installed criterion, or `package.module:Class`. Its other keys
are that knob's (by default as set elsewhere) or the arguments of the class. `config` has checked names, keys and the
values of knobs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl.config.listed_knobs import criteria_of
from genctl.decode.stopping import Criterion, Stop, Written
from genctl.decode.stopping.criterion import (
    MIN_TOKENS,
    MaxTime,
    MeanLogprob,
    Repetition,
    StopRegex,
    StopStrings,
    StopTokens,
)
from genctl.decode.stopping.stops import BROKEN, Marks, Pattern, Stops, marks, quoted
from genctl.decode.stopping.thoughts import Tags, Thoughts, added_tokens
from genctl.errors import PresetError, UsageError
from genctl.params import Generation


@dataclass(frozen=True)
class StoppingContext:
    """The input of building criteria."""

    generation: Generation
    tokenizer: Any = None  # used only for the ids that decoding skips
    decode: Callable[[list[int]], str] | None = None  # new tokens -> their text, special tokens skipped
    explicit: tuple[dict[str, Any], ...] | None = None  # a preset's [[stopping]] tables
    allow_plugins: bool = False
    tags: Tags | None = None  # around thoughts, in which stop strings and patterns do not count
    in_thought: bool = False  # whether the new text begins within one
    marks: Marks = field(default_factory=Marks)  # made by `build`

    @property
    def thoughts(self) -> Thoughts | None:
        """Where stops do not count, in the searched text."""
        if self.tags is None:
            return None
        opening, closing = (tuple(self.marks.stops([tag])) for tag in self.tags[:2])
        return Thoughts(opening, closing, self.in_thought)


@dataclass(frozen=True)
class NamedCriterion:
    """A criterion, its name in a preset, and where it cuts the text."""

    name: str
    criterion: Criterion
    stops: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    pattern: Pattern | None = None
    marks: Marks = field(default_factory=Marks)  # the special tokens that `stops` and `pattern` name
    thoughts: Thoughts | None = None  # in which `stops` and `pattern` do not count

    def __call__(self, written: Written) -> Stop | tuple[str, str] | None:
        return self.criterion(written)


def build(context: StoppingContext) -> tuple[NamedCriterion, ...]:
    """The criteria of the `[[stopping]]` list and of the knobs, in the order in which they are called.

    Raises PresetError (UsageError without a list) with one line for each error.
    """
    context = dataclasses.replace(context, marks=_marks(context))
    criteria: list[NamedCriterion] = []
    mistakes: list[str] = []
    listed = False
    listed_names = [table.get("use") for table in context.explicit or ()]
    for number, table in enumerate(context.explicit or (), 1):
        try:
            criteria.append(_from_table(table, context))
        except (UsageError, ValueError) as error:
            mistakes.append(f"[[stopping]] {number}: {error}")
            listed = True
    for name in criteria_of(context.generation):
        if name in listed_names:
            continue
        try:
            criteria.append(_MAKERS[name]({}, context))
        except (UsageError, ValueError) as error:
            mistakes.append(f"{name}: {error}")
    if mistakes:
        raise (PresetError if listed else UsageError)("\n".join(mistakes))
    return tuple(criteria)


def stops_of(criteria: Sequence[NamedCriterion], *, keep: bool) -> Stops | None:
    """What the criteria cut from the texts of a lane, if they cut anything. With `keep` they cut behind the stop."""
    stops = Stops(
        tuple(string for criterion in criteria for string in criterion.stops),
        tuple(criterion.pattern for criterion in criteria if criterion.pattern is not None),
        frozenset() if keep else frozenset().union(*(criterion.ids for criterion in criteria)),
        next((criterion.marks for criterion in criteria if criterion.marks.ids), Marks()),
        keep,
        next((criterion.thoughts for criterion in criteria if criterion.thoughts is not None), None),
    )
    return stops if stops.strings or stops.patterns or stops.ids else None


def _from_table(table: Mapping[str, Any], context: StoppingContext) -> NamedCriterion:
    keys = dict(table)
    use = keys.pop("use")
    if use in _MAKERS:
        if use not in keys and getattr(context.generation, use) in (None, [], ()):
            raise ValueError(f"{use} has no value: set {use} in this table or in the preset")
        return _MAKERS[use](keys, context)
    from genctl.decode.stopping import criterion

    offered = {"tokenizer": context.tokenizer, "decode": context.decode}
    return NamedCriterion(use, criterion.make(use, keys, offered, allowed=context.allow_plugins))


def _value(keys: Mapping[str, Any], context: StoppingContext, name: str) -> Any:
    return keys[name] if name in keys else getattr(context.generation, name)


def _check_text(context: StoppingContext) -> None:
    if context.decode is None:
        raise ValueError("needs a tokenizer to read the text, and this checkpoint has none")


def _special(context: StoppingContext) -> set[int]:
    """The ids that decoding skips."""
    special = set(getattr(context.tokenizer, "all_special_ids", ()))
    added = added_tokens(context.tokenizer).items()
    return special | {token for token, added_token in added if getattr(added_token, "special", False)}


def _marks(context: StoppingContext) -> Marks:
    """The marks of the special tokens that stop strings, patterns or the tags of thoughts name."""
    if context.decode is None:
        return Marks()
    generation, tables = context.generation, context.explicit or ()
    stops = _strings([generation.stop_strings, *(table.get("stop_strings") for table in tables)])
    patterns = _strings([generation.stop_regex, *(table.get("stop_regex") for table in tables)])
    if not stops and not patterns:
        return Marks()
    skipped = [token for token in sorted(_special(context)) if not context.decode([token])]
    tags = () if context.tags is None else context.tags[:2]
    return marks(context.tokenizer, skipped, [*stops, *tags], patterns)


def _strings(values: Sequence[Any]) -> list[str]:
    """The texts among values and lists of values."""
    parts = [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]
    return [part for part in parts if isinstance(part, str)]


def _max_time(keys: Mapping[str, Any], context: StoppingContext) -> NamedCriterion:
    return NamedCriterion("max_time", MaxTime(float(_value(keys, context, "max_time"))))


def _stop_strings(keys: Mapping[str, Any], context: StoppingContext) -> NamedCriterion:
    value = _value(keys, context, "stop_strings")
    stops = [value] if isinstance(value, str) else value
    if not stops:
        raise ValueError("the list is empty")
    if "" in stops:
        raise ValueError("an empty text is in every text: every row would end at its first token")
    for stop in stops:
        if BROKEN in stop:
            raise ValueError(f"{quoted(stop)} has U+FFFD, the sign for an incomplete character")
    unique = tuple(dict.fromkeys(stops))
    searched = context.marks.stops(unique)
    _check_text(context)
    thoughts = context.thoughts
    criterion = StopStrings(searched, thoughts)
    return NamedCriterion("stop_strings", criterion, tuple(searched), marks=context.marks, thoughts=thoughts)


def _stop_token_ids(keys: Mapping[str, Any], context: StoppingContext) -> NamedCriterion:
    ids = frozenset(_value(keys, context, "stop_token_ids"))
    if not ids:
        raise ValueError("the list is empty")
    if min(ids) < 0:
        raise ValueError(f"an id is at least 0, not {min(ids)}")
    return NamedCriterion("stop_token_ids", StopTokens(ids), ids=ids)


def _stop_regex(keys: Mapping[str, Any], context: StoppingContext) -> NamedCriterion:
    pattern = Pattern(_value(keys, context, "stop_regex"), context.marks)
    _check_text(context)
    thoughts = context.thoughts
    criterion = StopRegex(pattern, thoughts)
    return NamedCriterion("stop_regex", criterion, pattern=pattern, marks=context.marks, thoughts=thoughts)


def _stop_mean_logprob(keys: Mapping[str, Any], context: StoppingContext) -> NamedCriterion:
    least = keys.get("min_tokens", MIN_TOKENS)  # not a knob, so not checked yet
    if type(least) is not int or least < 1:
        raise ValueError(f"min_tokens is a whole number of at least 1, not {least!r}")
    floor = float(_value(keys, context, "stop_mean_logprob"))
    return NamedCriterion("stop_mean_logprob", MeanLogprob(floor, least))


def _stop_repeat_ngram(keys: Mapping[str, Any], context: StoppingContext) -> NamedCriterion:
    size, times = (_value(keys, context, name) for name in ("stop_repeat_ngram", "stop_repeat_times"))
    return NamedCriterion("stop_repeat_ngram", Repetition(size, times))


_MAKERS: dict[str, Callable[[Mapping[str, Any], StoppingContext], NamedCriterion]] = {
    "max_time": _max_time,
    "stop_strings": _stop_strings,
    "stop_token_ids": _stop_token_ids,
    "stop_regex": _stop_regex,
    "stop_mean_logprob": _stop_mean_logprob,
    "stop_repeat_ngram": _stop_repeat_ngram,
}
