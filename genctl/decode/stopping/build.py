"""Build the stopping criteria of the knobs, in order.

Without a `[[stopping]]` list the order is transformers', then genctl's own: max_time, stop_strings, stop_token_ids,
stop_regex, stop_mean_logprob, stop_repeat_ngram. With one, the list comes first, in its own order, and then the other
knobs that are set. If several would end a row at the same token, the first is reported.

A table of the list has `use`: the name of a knob, of an installed criterion, or `package.module:Class`. Its other keys
are that knob's (defaulting to the values set elsewhere) or the arguments of the class. `config` has checked names, keys
and the values of knobs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl.config.listed_knobs import criteria_of, make
from genctl.decode.stopping import Criterion, Stop, Written
from genctl.decode.stopping.stops import BROKEN, Marks, Pattern, Stops, Tags, Thoughts, added_tokens, marks, quoted
from genctl.errors import PresetError, UsageError, raised
from genctl.params import Generation

MIN_TOKENS = 5  # a mean over fewer tokens is too noisy
REASONS = ("eos", "length", "stop", "time")


@dataclass(frozen=True)
class StoppingContext:
    """The input for building criteria."""

    generation: Generation
    tokenizer: Any = None  # used only for the ids that decoding skips
    decode: Callable[[list[int]], str] | None = None  # new tokens -> their text, special tokens skipped
    explicit: tuple[dict[str, Any], ...] | None = None  # a preset's [[stopping]] tables
    allow_plugins: bool = False
    tags: Tags | None = None  # the thinking tags, between which stop strings and patterns do not count
    in_thought: bool = False  # whether the new text begins between them
    marks: Marks = field(default_factory=Marks)  # set by `build`


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
    """The stops at which the criteria cut a lane's texts; None if there are none. With `keep`, cut after the stop."""
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
        return NamedCriterion(use, _of_user(use, keys, context))
    values = {"min_tokens": MIN_TOKENS, **vars(context.generation), **keys}
    if values[use] in (None, [], ()):
        if use in keys:
            raise ValueError("the list is empty")
        raise ValueError(f"{use} has no value: set {use} in this table or in the preset")
    return NamedCriterion(use, *_MAKERS[use](values, context))


# -- the criteria of knobs, and where they cut the text ----------------------------------------------------------------


def _max_time(values: dict[str, Any], context: StoppingContext) -> tuple[Criterion]:
    """End a row with the first token after more than `max_time` seconds since the lane began."""
    seconds = float(values["max_time"])
    stop = Stop("time", f"max_time {seconds:g} s")
    return (lambda written: stop if written.elapsed > seconds else None,)


def _stop_strings(values: dict[str, Any], context: StoppingContext) -> tuple[Criterion, Stops]:
    """End a row with the first token after which its text contains a stop string, whatever the token boundaries."""
    stops = values["stop_strings"]
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if "" in stops:
        raise ValueError("an empty text is in every text: every row would end at its first token")
    for stop in stops:
        if BROKEN in stop:
            raise ValueError(f"{quoted(stop)} has U+FFFD, the sign for an incomplete character")
    return _in_text(context, strings=context.marks.strings(stops))


def _stop_regex(values: dict[str, Any], context: StoppingContext) -> tuple[Criterion, Stops]:
    """End a row with the first token after which the pattern matches in the last 4096 characters of its text.

    The pattern sees only the text so far: `$` matches after every token.
    """
    return _in_text(context, patterns=(Pattern(values["stop_regex"], context.marks),))


def _in_text(context: StoppingContext, **searched: Any) -> tuple[Criterion, Stops]:
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

    return criterion, stops


def _stop_token_ids(values: dict[str, Any], context: StoppingContext) -> tuple[Criterion, Stops]:
    """End a row with one of these ids, which stays in the row."""
    ids = frozenset(values["stop_token_ids"])
    if min(ids) < 0:
        raise ValueError(f"an id is at least 0, not {min(ids)}")
    stops = {id: Stop("stop", str(id), "token") for id in ids}
    return lambda written: stops.get(written.token), Stops(ids=ids)


def _stop_mean_logprob(values: dict[str, Any], context: StoppingContext) -> tuple[Criterion]:
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

    return (criterion,)


def _stop_repeat_ngram(values: dict[str, Any], context: StoppingContext) -> tuple[Criterion]:
    """End a row whose last tokens are one n-gram repeated `stop_repeat_times` times."""
    size, times = values["stop_repeat_ngram"], values["stop_repeat_times"]
    stop = Stop("stop", f"the same {size}-gram {times} times", "repetition")

    def criterion(written: Written) -> Stop | None:
        if written.count < size * times:
            return None
        tail = written.tail(size * times)
        return stop if tail[size:] == tail[:-size] else None  # the tail equals itself shifted by one n-gram

    return (criterion,)


_MAKERS: dict[str, Callable[[dict[str, Any], StoppingContext], tuple[Any, ...]]] = {
    "max_time": _max_time,
    "stop_strings": _stop_strings,
    "stop_token_ids": _stop_token_ids,
    "stop_regex": _stop_regex,
    "stop_mean_logprob": _stop_mean_logprob,
    "stop_repeat_ngram": _stop_repeat_ngram,
}


def _marks(context: StoppingContext) -> Marks:
    """The marks of the special tokens that occur in stop strings, patterns or thinking tags."""
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


# -- criteria of users -------------------------------------------------------------------------------------------------


def _of_user(use: str, arguments: Mapping[str, Any], context: StoppingContext) -> Criterion:
    """A criterion from a user's class or function and the keys of its table (see `genctl.config.listed_knobs.make`).

    It is called as `criterion(written)`; it returns None or False to continue, and True, a text, or a pair of finish
    reason and text to stop. A subclass of transformers' StoppingCriteria is called with the new tokens as `input_ids`
    [1, T] and `scores` None. Both must depend only on their arguments: rows are reordered, forked and rolled back.
    """
    offered = {"tokenizer": context.tokenizer, "decode": context.decode}  # for parameters of that name
    made = make("stopping criterion", use, arguments, allowed=context.allow_plugins, offered=offered)
    # by name, so that transformers is not imported for other criteria
    names = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(made).__mro__}
    takes_tensors = "transformers.StoppingCriteria" in names

    def criterion(written: Written) -> Stop | None:
        try:
            if takes_tensors:
                import torch

                answer = made(torch.tensor([written.tail(written.count)]), None)
                answer = bool(answer.all() if isinstance(answer, torch.Tensor) else answer)
            else:
                answer = made(written)
        except Exception as error:
            why = raised(error)
            raise UsageError(f"the stopping criterion {use} failed at token {written.count}: {why}") from error
        if answer is None or answer is False:
            return None
        if answer is True or isinstance(answer, str):
            return Stop("stop", use if answer is True else answer, "plugin")
        if isinstance(answer, tuple) and len(answer) == 2 and answer[0] in REASONS and isinstance(answer[1], str):
            return Stop(*answer, "plugin" if answer[0] == "stop" else "")
        raise UsageError(
            f"the stopping criterion {use} answered {answer!r}, not None, a truth value, a text, "
            f"or a pair of {'|'.join(REASONS)} and a text"
        )

    return criterion
