"""Searches to draw, written down step by step, and random ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from genctl.events import Began, Ended, Event, Finished, Hypothesis, Prefilled, Row, Stepped, Token

Live = tuple[int, str, float]  # the row it continues, what it writes, its log-probability
End = tuple[int, str, float, str]  # the same and why it ended

# Two rows, a third that dies, one that ends early and one that pushes it out.
STEPS: list[tuple[list[Live], list[End]]] = [
    ([(0, " the", -0.4), (0, " a", -1.2), (0, " one", -2.5)], []),
    ([(0, " old", -0.3), (0, " young", -1.4), (1, " fox", -0.9)], []),
    ([(0, " badger", -0.2), (0, " fox", -1.9), (2, " sat", -0.2)], []),
    ([(0, " slept", -0.8), (0, " sang", -0.9), (2, " down", -0.1)], [(1, "", -0.1, "eos"), (2, ".", -2.0, "eos")]),
    ([(0, " under", -0.3), (1, " under", -0.2), (0, " in", -1.6)], [(2, "", -0.3, "eos")]),
    ([(0, " the hill", -0.2), (1, " the hill", -0.2), (1, " the moon", -1.1)], []),
    ([], [(0, ".", -0.1, "eos"), (1, ".", -0.1, "eos"), (2, ".", -0.2, "length")]),
]


def search(
    steps: Sequence[tuple[Sequence[Live], Sequence[End]]] = STEPS,
    *,
    lane: str = "0",
    prompt: str = "Under the old oak",
    kind: str = "beam",
    kept: int = 3,
    returned: int = 1,
    penalty: float = 1.0,
    told: bool = True,
    notes: Sequence[str] = (),
) -> Iterator[Event]:
    """The events of a beam search whose steps are given. Totals are the sums of the log-probabilities."""
    settings: dict[str, Any] = {"num_beams": kept, "length_penalty": penalty} if told else {}
    yield Began(lane, prompt, kind, "builtin:stories", None, settings, int(lane) + 1)
    yield Prefilled(lane, 5, 0.02)
    rows: list[tuple[tuple[int, ...], str, float]] = [((), "", 0.0)]
    done: list[Hypothesis] = []
    for number, (live, ends) in enumerate(steps):
        grown, made, ended = [], [], []
        for place, (parent, text, logprob) in enumerate(live):
            ids, before, total = rows[parent]
            token = Token(10 * number + place, logprob, text)
            grown.append(((*ids, token.id), before + text, total + logprob))
            made.append(Row(lane, parent, (token,), total + logprob, total + logprob, note="".join(notes[:1])))
        for place, (parent, text, logprob, reason) in enumerate(ends):
            ids, before, total = rows[parent]
            token = Token(10 * number + 5 + place, logprob, text)
            every = (*ids, token.id)
            score = (total + logprob) / len(every) ** penalty
            done.append(Hypothesis(every, total + logprob, total + logprob, reason, score, text=before + text))
            ended.append(Ended(lane, parent, (token,), done[-1]))
        rows = grown
        yield Stepped(lane, number, tuple(made), tuple(ended))
    best = sorted(done, key=lambda one: -one.score)
    yield Finished(lane, tuple(best[:returned]), 5, 0.125, 0.04, len(steps))


@st.composite
def random_searches(draw: st.DrawFn) -> tuple[str, list[Event], str]:
    """A search at random: its strategy, its events, and the text that comes first in the end."""
    kind = draw(st.sampled_from(["beam", "diverse-beam", "constrained-beam", "contrastive", "new"]))
    ranked = kind in ("beam", "diverse-beam")
    pieces = st.sampled_from(["a", "b", "a b", "", "\n", "é"])
    numbers = st.integers(-4, 0).map(float)
    events: list[Event] = [Began("0", "p", kind), Prefilled("0", 1)]
    texts, ids = [""], [()]
    done: list[Hypothesis] = []
    for step in range(draw(st.integers(1, 7))):
        rows, ended, after, following = [], [], [], []
        for place in range(draw(st.integers(0, 3))):
            parent = draw(st.integers(0, len(texts) - 1))
            token = Token(100 * step + place, -1.0, draw(pieces))
            rows.append(Row("0", parent, (token,), -1.0, draw(numbers)))
            after.append(texts[parent] + token.text)
            following.append((*ids[parent], token.id))
        for place in range(draw(st.integers(0, 2)) if rows or done else 1):
            parent = draw(st.integers(0, len(texts) - 1))
            token = Token(100 * step + 50 + place, -1.0, draw(pieces))
            more = draw(st.sampled_from(["", "!"])) if not token.text else ""  # a character that stayed open
            text = texts[parent] + token.text + more
            done.append(Hypothesis((*ids[parent], token.id), -1.0, -1.0, "eos", draw(numbers), text=text))
            ended.append(Ended("0", parent, (token,), done[-1]))
        events.append(Stepped("0", step, tuple(rows), tuple(ended)))
        texts, ids = after, following
        if not rows:
            break
    if texts and (not done or draw(st.booleans())):  # what lived was cut short
        parent = draw(st.integers(0, len(texts) - 1))
        token = Token(9999, -1.0, draw(pieces))
        done.append(
            Hypothesis((*ids[parent], token.id), -1.0, -1.0, "length", draw(numbers), text=texts[parent] + token.text)
        )
        events.append(Stepped("0", 99, (), (Ended("0", parent, (token,), done[-1]),)))
    best = max(one.score for one in done)
    first = draw(st.sampled_from([one for one in done if one.score == best] if ranked else done))
    events.append(Finished("0", (first,)))
    return kind, events, first.text
