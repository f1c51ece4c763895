"""Pages for tests: made of events, and taken apart again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any

from genctl.comparing.side_by_side import SideBySide
from genctl.events import Began, Ended, Event, Finished, Hypothesis, Row, Stepped, Token, Trace
from genctl.pages.page import PageData, page


class Parts(HTMLParser):
    """The elements of a page, the text outside scripts and styles, and the contents of both."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._open = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in self.inside:
            self.inside[self._open][-1] += data
        else:
            self.texts.append(data)

    @property
    def policy(self) -> str:
        return next(dict(found)["content"] or "" for tag, found in self.elements if "http-equiv" in found)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.inside["script"][0])


def page_of(events: Iterable[Event], **given: Any) -> str:
    data, runs = PageData(**given), SideBySide()
    for event in events:
        data.feed(event)
        runs.feed(event)
    data.comparison = runs.part()
    return page(data).decode()


def parts_of(events: Iterable[Event], **given: Any) -> Parts:
    return Parts(page_of(events, **given))


def search(steps: int, beams: int = 8, top: int = 3, seed: int = 1) -> list[Event]:
    """A made-up beam search: at each step rows continue random rows; two of the last step are returned."""
    draw = random.Random(seed)
    words = [f" word{number}" for number in range(2000)]

    def token() -> Token:
        others = tuple((id, words[id], -draw.random() * 5) for id in draw.sample(range(2000), top))
        id = draw.randrange(2000)
        trace = (Trace("top_p", draw.randrange(50), draw.random(), False, 0.5, 0.25),)
        return Token(id, -draw.random() * 4, words[id], draw.randrange(1, 50), draw.random() * 5, others, trace)

    events: list[Event] = [Began("0", "A prompt", "beam", "made-up", settings={"length_penalty": 1.0}, place=1)]
    totals: list[float] = [0.0]
    written: list[list[Token]] = [[]]
    for step in range(steps):
        parents = [draw.randrange(len(totals)) for _ in range(beams)]
        new = [token() for _ in parents]
        totals = [totals[parent] + one.logprob for parent, one in zip(parents, new, strict=True)]
        written = [[*written[parent], one] for parent, one in zip(parents, new, strict=True)]
        rows = [Row("0", parent, (one,), total, total) for parent, one, total in zip(parents, new, totals, strict=True)]
        ending = (
            [_ended(row, tokens) for row, tokens in zip(rows[:2], written, strict=False)] if step + 1 == steps else []
        )
        events.append(Stepped("0", step, tuple(rows[len(ending) :]), tuple(ending)))
    return [*events, Finished("0", tuple(one.hypothesis for one in ending))]


def _ended(row: Row, tokens: list[Token]) -> Ended:
    ids, text = tuple(one.id for one in tokens), "".join(one.text for one in tokens)
    return Ended(
        "0", row.parent, row.written, Hypothesis(ids, row.total, row.total, "length", row.total / len(ids), text=text)
    )


def sentence(
    lane: str, words: Iterable[str], prompt: str = "A prompt", strategy: str = "sample", eos: str = "", **more: Any
) -> list[Event]:
    """A lane with one row, a token for each word, which ends by itself; `eos` is the name of the last token."""
    tokens = [Token(number, -0.5, word, 1, 0.5) for number, word in enumerate(words)]
    events: list[Event] = [Began(lane, prompt, strategy, "made-up", **more)]
    for step, token in enumerate(tokens):
        events.append(Stepped(lane, step, (Row(lane, 0, (token,), -0.5 * (step + 1), -0.5 * (step + 1)),)))
    total = -0.5 * (len(tokens) + 1)
    text = "".join(token.text for token in tokens)
    ids = (*(token.id for token in tokens), 99)
    ended = Hypothesis(ids, total, total, "eos", score=-0.5, text=text)
    last = Token(99, -0.5, top=((99, eos, -0.5),) if eos else ())
    events.append(Stepped(lane, len(tokens), (), (Ended(lane, 0, (last,), ended),)))
    return [*events, Finished(lane, (ended,), prompt_tokens=3, seconds=0.5)]
