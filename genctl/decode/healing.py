"""Token healing: the prompt's last tokens are taken back, and the new text must begin with their text.

A prompt that ends in "http:" was cut into tokens without knowing that "//" follows; the model has hardly ever seen
":" before "//", since "://" is one token. So what could be the beginning of a longer token is given back to the model,
which then writes it in the tokens it likes.

transformers' `heal_tokens` intends the same and differs in this: it strips blanks from the prompt's ends; it takes back
one token, and replaces it by one token that greedy search picks with 10 added to the scores of all that begin alike,
whatever the strategy; here as many are taken back as a longer token could cover, nothing is stripped, the strategy
itself (sampling, beams) chooses, and the text is a promise, not a preference: it is spelled exactly, in any number of
tokens, those of the prompt included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genctl import events
from genctl.decode.token_bytes import Spelling, spelling


@dataclass(frozen=True, eq=False)
class Healed:
    """A prompt without its last tokens. `text` is what they said; empty where there was nothing to heal."""

    ids: tuple[int, ...]
    text: str
    words: Spelling

    def hidden(self, first: int) -> int:
        """How many characters of the shown text belong to the prompt, in a row whose first new token is `first`.

        Decoders strip a blank at the beginning: then that one is not shown anyway.
        """
        if not self.text or not 0 <= first < len(self.words.pieces):
            return 0
        return max(0, len(self.text) + len(self.words.at_first(first)) - len(self.words.pieces[first]))


def heal(tokenizer: Any, ids: Sequence[int], vocab_size: int, stops: Sequence[str] = ()) -> Healed:
    """Take back the tokens at the end of `ids` that a longer token could cover. At least one id stays.

    Nothing is taken back across special tokens, inside a character, or where a stop string could begin in it. Raises
    UsageError for tokenizers that cannot be followed token by token.
    """
    words = spelling(tokenizer, vocab_size, "token_healing")
    end = b""
    best = Healed(tuple(ids), "", words)
    for place in range(len(ids) - 1, 0, -1):
        token = ids[place]
        piece = words.pieces[token] if 0 <= token < len(words.pieces) else b""
        end = piece + end
        if not piece or len(end) >= words.longest:
            break
        if not words.extends(end):
            continue
        try:
            text = end.decode()
        except UnicodeDecodeError:
            continue
        if not any(_overlaps(text, stop) for stop in stops):
            best = Healed(tuple(ids[:place]), text, words)
    return best


def _overlaps(text: str, stop: str) -> bool:
    """Whether `stop` is in `text`, or could begin there and go on after it."""
    return stop in text or any(text.endswith(stop[:n]) for n in range(1, len(stop)))


def unhealed(stream: Iterable[events.Event], plans: Mapping[str, Healed]) -> Iterator[events.Event]:
    """The same events, without the text that the prompt has already. `plans`, the healed lanes, may grow meanwhile."""
    lanes: dict[str, list[int | None]] = {}  # characters still to hide in each row; None before its first token
    for event in stream:
        plan = plans.get(event.lane) if not isinstance(event, events.Loading) else None
        if plan is None or not plan.text:
            yield event
        elif isinstance(event, events.Stepped):
            yield _stepped(event, lanes.get(event.lane) or [None], lanes, plan)
        elif isinstance(event, events.Finished):
            lanes.pop(event.lane, None)
            found = tuple(_hypothesis(one, plan) for one in event.hypotheses)
            yield dataclasses.replace(event, hypotheses=found)
        else:
            yield event


def _stepped(
    event: events.Stepped, before: list[int | None], lanes: dict[str, list[int | None]], plan: Healed
) -> events.Stepped:
    ended = []
    for one in event.ended:
        written, _ = _hide(one.written, before[one.parent], plan)
        ended.append(dataclasses.replace(one, written=written, hypothesis=_hypothesis(one.hypothesis, plan)))
    rows, live = [], []
    for row in event.rows:
        written, left = _hide(row.written, before[row.parent], plan)
        rows.append(dataclasses.replace(row, written=written))
        live.append(left)
    lanes[event.lane] = live
    return dataclasses.replace(event, rows=tuple(rows), ended=tuple(ended))


def _hide(
    tokens: tuple[events.Token, ...], left: int | None, plan: Healed
) -> tuple[tuple[events.Token, ...], int | None]:
    if left == 0:
        return tokens, 0
    made = []
    for token in tokens:
        if left is None:
            left = plan.hidden(token.id)
        cut = min(left, len(token.text))
        left -= cut
        made.append(dataclasses.replace(token, text=token.text[cut:]) if cut else token)
    return tuple(made), left


def _hypothesis(hypothesis: events.Hypothesis, plan: Healed) -> events.Hypothesis:
    if not hypothesis.tokens:
        return hypothesis
    return dataclasses.replace(hypothesis, text=hypothesis.text[plan.hidden(hypothesis.tokens[0]) :])
