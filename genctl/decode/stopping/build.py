"""Build the stopping criteria of the knobs, in order.

Without a `[[stopping]]` list the order is transformers', then genctl's own: max_time, stop_strings, stop_token_ids,
stop_regex, stop_mean_logprob, stop_repeat_ngram. With one, the list comes first, in its own order, and then the other
knobs that are set. If several would end a row at the same token, the first is reported.

A table of the list has `use`: the name of a knob, of an installed criterion, or `package.module:Class`. Its other keys
are that knob's (by default as set elsewhere) or the arguments of the class. `config` has checked names, keys and the
values of knobs.

Stopping criteria of users: constructed and called.

A criterion is called as `criterion(written)` and returns None or False to continue, True, a text, or a pair of finish
reason and text; a subclass of transformers' StoppingCriteria is called with the new tokens as `input_ids` [1, T] and
`scores` None instead. Either must depend only on its arguments: rows are reordered, forked and rolled back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from genctl.config import listed_knobs
from genctl.config.listed_knobs import criteria_of
from genctl.decode.stopping import Criterion, Stop, Written
from genctl.decode.stopping.stops import BROKEN, Marks, Pattern, Stops, Tags, Thoughts, added_tokens, marks, quoted
from genctl.errors import PresetError, UsageError, raised
from genctl.params import Generation

MIN_TOKENS = 5  # a mean over fewer tokens is too noisy


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


@dataclass(frozen=True)
class NamedCriterion:
    """A criterion, its name in a preset, and what it cuts from the text."""

    name: str
    criterion: Criterion
    stops: Stops = field(default_factory=Stops)

    def __call__(self, written: Written) -> Stop | tuple[str, str] | None:
        return self.criterion(written)


def build(context: StoppingContext) -> tuple[NamedCriterion, ...]:
    """The criteria of the `[[stopping]]` list and of the knobs, in the order in which they are called.

    Raises PresetError (UsageError without a list) with one line for each error.
    """
    context = dataclasses.replace(context, marks=_marks(context))
    listed = [(f"[[stopping]] {number}", table) for number, table in enumerate(context.explicit or (), 1)]
    used = [table["use"] for _, table in listed]
    knobs = [(name, {"use": name}) for name in criteria_of(context.generation) if name not in used]
    criteria: list[NamedCriterion] = []
    mistakes: list[str] = []
    for place, table in [*listed, *knobs]:
        try:
            criteria.append(_from_table(table, context))
        except (UsageError, ValueError) as error:
            mistakes.append(f"{place}: {error}")
    if mistakes:
        raise (PresetError if mistakes[0].startswith("[[") else UsageError)("\n".join(mistakes))
    return tuple(criteria)


def stops_of(criteria: Sequence[NamedCriterion], *, keep: bool) -> Stops | None:
    """What the criteria cut from the texts of a lane, if they cut anything. With `keep` they cut behind the stop."""
    parts = [criterion.stops for criterion in criteria]
    stops = Stops(
        tuple(string for part in parts for string in part.strings),
        tuple(pattern for part in parts for pattern in part.patterns),
        frozenset() if keep else frozenset().union(*(part.ids for part in parts)),
        next((part.marks for part in parts if part.marks.ids), Marks()),
        keep,
        next((part.thoughts for part in parts if part.thoughts is not None), None),
    )
    return stops if stops.strings or stops.patterns or stops.ids else None


def _from_table(table: dict[str, Any], context: StoppingContext) -> NamedCriterion:
    use, keys = table["use"], {name: value for name, value in table.items() if name != "use"}
    if use not in _MAKERS:
        offered = {"tokenizer": context.tokenizer, "decode": context.decode}
        return NamedCriterion(use, make(use, keys, offered, allowed=context.allow_plugins))
    values = {"min_tokens": MIN_TOKENS, **vars(context.generation), **keys}
    if use not in keys and values[use] in (None, [], ()):
        raise ValueError(f"{use} has no value: set {use} in this table or in the preset")
    return _MAKERS[use](values, context)


# -- the criteria of knobs, with what they cut from the text -----------------------------------------------------------


def _max_time(values: dict[str, Any], context: StoppingContext) -> NamedCriterion:
    """End a row with the first token after more than `max_time` seconds since the lane began."""
    seconds = float(values["max_time"])
    stop = Stop("time", f"max_time {seconds:g} s")
    return NamedCriterion("max_time", lambda written: stop if written.elapsed > seconds else None)


def _stop_strings(values: dict[str, Any], context: StoppingContext) -> NamedCriterion:
    """End a row with the first token after which its text has a stop string, wherever the tokens begin and end."""
    stops = values["stop_strings"]
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if not stops:
        raise ValueError("the list is empty")
    if "" in stops:
        raise ValueError("an empty text is in every text: every row would end at its first token")
    for stop in stops:
        if BROKEN in stop:
            raise ValueError(f"{quoted(stop)} has U+FFFD, the sign for an incomplete character")
    return _in_text("stop_strings", context, strings=context.marks.strings(stops))


def _stop_regex(values: dict[str, Any], context: StoppingContext) -> NamedCriterion:
    """End a row with the first token after which the pattern matches in the last 4096 characters of its text.

    The pattern sees only the text so far: `$` matches after every token.
    """
    return _in_text("stop_regex", context, patterns=(Pattern(values["stop_regex"], context.marks),))


def _in_text(name: str, context: StoppingContext, **searched: Any) -> NamedCriterion:
    if context.decode is None:
        raise ValueError("needs a tokenizer to read the text, and this checkpoint has none")
    thoughts = None
    if context.tags is not None:
        opening, closing = (context.marks.strings([tag]) for tag in context.tags[:2])
        thoughts = Thoughts(opening, closing, context.in_thought)
    stops = Stops(**searched, marks=context.marks, thoughts=thoughts)

    def criterion(written: Written) -> Stop | None:
        assert written.text is not None
        match = stops.find(written.text.whole(), written.text.since)
        return None if match is None else Stop("stop", match.what, match.kind)

    return NamedCriterion(name, criterion, stops)


def _stop_token_ids(values: dict[str, Any], context: StoppingContext) -> NamedCriterion:
    """End a row with one of these ids, which stays in the row."""
    ids = frozenset(values["stop_token_ids"])
    if not ids:
        raise ValueError("the list is empty")
    if min(ids) < 0:
        raise ValueError(f"an id is at least 0, not {min(ids)}")

    def criterion(written: Written) -> Stop | None:
        return Stop("stop", str(written.token), "token") if written.token in ids else None

    return NamedCriterion("stop_token_ids", criterion, Stops(ids=ids))


def _stop_mean_logprob(values: dict[str, Any], context: StoppingContext) -> NamedCriterion:
    """End a row whose mean log-probability (the model's own, in nats) over at least `min_tokens` is below the floor."""
    floor, least = float(values["stop_mean_logprob"]), values["min_tokens"]
    if type(least) is not int or least < 1:  # not a knob, so not checked yet
        raise ValueError(f"min_tokens is a whole number of at least 1, not {least!r}")

    def criterion(written: Written) -> Stop | None:
        mean = written.logprob / written.count
        if written.count < least or not mean < floor:
            return None
        shown = f"{mean:.4g}" if float(f"{mean:.4g}") < floor else repr(mean)
        return Stop("stop", f"mean log-probability {shown} below {floor}", "floor")

    return NamedCriterion("stop_mean_logprob", criterion)


def _stop_repeat_ngram(values: dict[str, Any], context: StoppingContext) -> NamedCriterion:
    """End a row whose last tokens are the same n-gram `stop_repeat_times` times in a row."""
    size, times = values["stop_repeat_ngram"], values["stop_repeat_times"]

    def criterion(written: Written) -> Stop | None:
        if written.count < size * times:
            return None
        tail = written.tail(size * times)
        if tail[size:] != tail[:-size]:  # equal to itself shifted by one n-gram: all n-grams are equal
            return None
        return Stop("stop", f"the same {size}-gram {times} times", "repetition")

    return NamedCriterion("stop_repeat_ngram", criterion)


_MAKERS: dict[str, Callable[[dict[str, Any], StoppingContext], NamedCriterion]] = {
    "max_time": _max_time,
    "stop_strings": _stop_strings,
    "stop_token_ids": _stop_token_ids,
    "stop_regex": _stop_regex,
    "stop_mean_logprob": _stop_mean_logprob,
    "stop_repeat_ngram": _stop_repeat_ngram,
}


# -- special tokens that stops name ------------------------------------------------------------------------------------


def _marks(context: StoppingContext) -> Marks:
    """The marks of the special tokens that stop strings, patterns or the tags of thoughts name."""
    if context.decode is None:
        return Marks()

    def given(name: str) -> list[str]:
        values = [getattr(context.generation, name), *(table.get(name) for table in context.explicit or ())]
        parts = [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]
        return [part for part in parts if isinstance(part, str)]

    stops, patterns = given("stop_strings"), given("stop_regex")
    if not stops and not patterns:
        return Marks()
    added = added_tokens(context.tokenizer).items()
    special = {token for token, added_token in added if getattr(added_token, "special", False)}
    special |= set(getattr(context.tokenizer, "all_special_ids", ()))
    skipped = [token for token in sorted(special) if not context.decode([token])]
    return marks(context.tokenizer, skipped, [*stops, *(context.tags or ())[:2]], patterns)


REASONS = ("eos", "length", "stop", "time")


def make(use: str, arguments: Mapping[str, Any], offered: Mapping[str, Any], *, allowed: bool) -> Criterion:
    """A criterion from a user's class or function and the keys of its table (see `genctl.config.listed_knobs.make`).

    `offered` (the tokenizer, the decoder) is passed to parameters of that name. Raises UsageError.
    """
    criterion = listed_knobs.make("stopping criterion", use, arguments, allowed=allowed, offered=offered)
    # by name, so that transformers is not imported for other criteria
    names = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(criterion).__mro__}
    is_transformers = "transformers.StoppingCriteria" in names
    return partial(_call, use, partial(_with_tensors, criterion) if is_transformers else criterion)


def _call(use: str, criterion: Callable[[Written], Any], written: Written) -> Stop | None:
    try:
        answer = criterion(written)
    except Exception as error:
        raise UsageError(f"the stopping criterion {use} failed at token {written.count}: {raised(error)}") from error
    if answer is None or answer is False:
        return None
    if answer is True:
        return Stop("stop", use, "plugin")
    if isinstance(answer, str):
        return Stop("stop", answer, "plugin")
    if isinstance(answer, tuple) and len(answer) == 2 and answer[0] in REASONS and isinstance(answer[1], str):
        return Stop(*answer, "plugin" if answer[0] == "stop" else "")
    raise UsageError(
        f"the stopping criterion {use} answered {answer!r}, not None, a truth value, a text, "
        f"or a pair of {'|'.join(REASONS)} and a text"
    )


def _with_tensors(criterion: Callable[..., Any], written: Written) -> bool:
    import torch

    answer = criterion(torch.tensor([written.tail(written.count)]), None)
    return bool(answer.all()) if isinstance(answer, torch.Tensor) else bool(answer)
