"""The texts of recorded rows, which are forked with them as the core does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from genctl.decode.stopping.row_text import RowText, Words
from genctl.decode.stopping.stops import Stops
from genctl.events import Ended, Event, Row, Stepped, Token, advance

Grown = tuple[RowText, tuple[Token, ...], str]  # a row's text, its newest tokens with theirs, and the whole at its end


def with_texts(stream: Iterable[Event], words: Words, stops: Stops | None = None) -> list[Event]:
    """The events with the texts of their tokens, and of the rows that ended."""
    rows: dict[str, list[Grown]] = {}
    filled: list[Event] = []
    for event in stream:
        if isinstance(event, Stepped):
            before = rows.get(event.lane, [(RowText(words, stops), (), "")])
            rows[event.lane], gone = advance(before, event, _grown)
            live = [
                dataclasses.replace(row, written=new[1]) for row, new in zip(event.rows, rows[event.lane], strict=True)
            ]
            ended = [
                dataclasses.replace(row, written=new[1], hypothesis=dataclasses.replace(row.hypothesis, text=new[2]))
                for row, new in zip(event.ended, gone, strict=True)
            ]
            event = dataclasses.replace(event, rows=tuple(live), ended=tuple(ended))
        filled.append(event)
    return filled


def _grown(before: Grown, row: Row | Ended) -> Grown:
    text, written, whole = before[0].fork(), [], ""
    for place, token in enumerate(row.written, 1):
        text.push(token.id)
        if isinstance(row, Ended) and place == len(row.written):
            shown, whole = text.finish(row.hypothesis.reason)
        else:
            shown = text.show()
        written.append(dataclasses.replace(token, text=shown))
    return text, tuple(written), whole
