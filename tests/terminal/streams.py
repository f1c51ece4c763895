"""Streams of events to draw, a clock that is told the time, and screens to compare with."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyte
from rich.console import Console

from genctl.events import Alternative, Began, Ended, Event, Finished, Hypothesis, Prefilled, Row, Stepped, Token, Trace
from genctl.events.history import LaneHistory
from tests import screens

SCREENS = Path(__file__).parent / "screens"
STORY = re.findall(
    r" ?\w+|\W",
    " there lived an old badger in a burrow under the hill. Every evening she put on her lantern, counted the stars,"
    " and wrote the number in a little blue book.\nOne night a star was missing.",
)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(width: int = 80, height: int = 24, *, terminal: bool = False, colour: bool = False) -> Console:
    """A console that writes to a string of its own."""
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=terminal or colour,
        force_interactive=terminal,
        color_system="truecolor" if colour else None,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
        _environ={"TERM": "xterm-256color"},
    )


def written(to: Console) -> str:
    """Everything that went to a console, escape codes included."""
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


class Terminal:
    """A terminal with a long scroll-back, for what escape codes make of a screen."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.screen = pyte.HistoryScreen(width, height, history=10_000, ratio=0.1)
        self.stream = pyte.Stream(self.screen)
        self.console = console(width, height, terminal=True)
        self._read = 0

    def _catch_up(self) -> None:
        text = written(self.console)
        self.stream.feed(text[self._read :].replace("\n", "\r\n"))
        self._read = len(text)

    def visible(self) -> list[str]:
        """The lines that can be seen now."""
        self._catch_up()
        return [line.rstrip() for line in self.screen.display]

    def everything(self) -> str:
        """Scroll-back and screen, as one text without empty lines at its end."""
        shown = self.visible()
        width = self.screen.columns
        above = ["".join(line[x].data for x in range(width)).rstrip() for line in self.screen.history.top]
        return "\n".join(above + shown).rstrip() + "\n"


def check_screen(name: str, text: str) -> None:
    screens.check_screen(SCREENS / f"{name}.txt", text)


def token(step: int, text: str, *, trace: bool = False) -> Token:
    """A token with made-up but plausible numbers, the same at every call."""
    probability = (0.91, 0.42, 0.07, 0.66, 0.003)[step % 5]
    rank = (1, 2, 3, 1, 41)[step % 5]
    rest = 1.0 - probability
    own: Alternative = (step, text, math.log(probability))
    others: list[Alternative] = [(900, " the", math.log(rest * 0.6)), (901, "\n", math.log(rest * 0.2))]
    top = tuple(sorted([own, *others], key=lambda entry: -entry[2]))
    traces = (
        Trace("repetition_penalty", 0, 0.04 * (step % 3), step % 5 == 1, probability, probability * 0.8, 12e-6),
        Trace("min_new_tokens", 0, 0.0, False, probability * 0.8, probability * 0.8, 1e-6),
        Trace("no_repeat_ngram_size", step % 2, 0.001 * (step % 2), False, probability * 0.8, probability * 0.8, 8e-6),
        Trace("top_k", 1998, 0.09, False, probability * 0.8, probability * 0.9, 31e-6),
        Trace("temperature", 0, 0.0, False, probability * 0.9, probability * 0.9, 2e-6),
    )
    return Token(step, math.log(probability), text, rank, 0.4 * (step % 7), top, traces if trace else ())


def hypothesis(tokens: list[Token], *, reason: str = "eos", slot: int | None = None, stop: str = "") -> Hypothesis:
    total = sum(one.logprob for one in tokens)
    text = "".join(one.text for one in tokens)
    return Hypothesis(tuple(one.id for one in tokens), total, total, reason, total / len(tokens), slot, stop, text)


def lane(
    name: str,
    texts: list[list[str]],
    *,
    prompt: str = "Under the old oak",
    reasons: tuple[str, ...] = ("eos", "length"),
    trace: bool = False,
    seed: int = 7,
) -> Iterator[Event]:
    """One prompt whose sequences are written side by side, one row each, until the last has ended."""
    tokens = [[token(step, text, trace=trace) for step, text in enumerate(pieces)] for pieces in texts]
    yield Began(name, prompt, "sample", "builtin:stories", seed, place=int(name) + 1 if name.isdecimal() else 0)
    yield Prefilled(name, 5, 0.02)
    live = [0] * len(texts)  # the row that each sequence continues
    done: dict[int, Hypothesis] = {}
    for step in range(max(map(len, texts))):
        rows: list[Row] = []
        ended: list[Ended] = []
        after = list(live)
        for slot, pieces in enumerate(tokens):
            if slot in done:
                continue
            if step + 1 == len(pieces):
                done[slot] = hypothesis(pieces, reason=reasons[slot % len(reasons)], slot=slot)
                ended.append(Ended(name, live[slot], (pieces[step],), done[slot]))
            else:
                after[slot] = len(rows)
                rows.append(Row(name, live[slot], (pieces[step],), pieces[step].logprob, pieces[step].logprob, slot))
        live = after
        yield Stepped(name, step, tuple(rows), tuple(ended))
    best = tuple(done[slot] for slot in sorted(done))
    yield Finished(name, best, 5, 0.125, 0.04, len(tokens[0]))


def woven(*lanes: Iterator[Event]) -> Iterator[Event]:
    """The events of several lanes in turn, as continuous batching gives them."""
    waiting = list(lanes)
    while waiting:
        for one in list(waiting):
            event = next(one, None)
            if event is None:
                waiting.remove(one)
            else:
                yield event


def history(events: Iterable[Event]) -> LaneHistory:
    """What the events of one lane come to."""
    found = LaneHistory("0")
    for event in events:
        found = found.after(event)
    return found
