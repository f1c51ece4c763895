"""Tokens in lines: a change lays out what follows it, and gives what laying out everything gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from genctl.commands.explore.flow import TextFlow, TextPiece

TEXTS = st.lists(
    st.sampled_from(["a", " b", "cat", " dog", "\n", " ", "", "日本", "long-long-word", ".\n\n", "\t", " e."])
)


def pieces(texts: list[str]) -> list[TextPiece]:
    return [TextPiece(node, text, 0.5) for node, text in enumerate(texts)]


def lines(flow: TextFlow) -> list[list[tuple[int, str]]]:
    return [[(run.piece, run.text) for run in flow.line(number)] for number in range(len(flow))]


@given(TEXTS, TEXTS, TEXTS, st.integers(4, 20))
def test_an_update_gives_what_laying_out_everything_gives(
    same: list[str], before: list[str], after: list[str], width: int
) -> None:
    flow, whole = TextFlow(width), TextFlow(width)
    flow.update(pieces(same + before))
    flow.update(pieces(same + after))
    whole.update(pieces(same + after))
    assert lines(flow) == lines(whole)


@given(TEXTS, st.integers(4, 20))
def test_no_line_is_wider_than_it_may_be_and_every_piece_is_found(texts: list[str], width: int) -> None:
    flow = TextFlow(width)
    flow.update(pieces(texts))
    for number in range(len(flow)):
        assert sum(cell_len(run.text) for run in flow.line(number)) == flow.cells(number) <= width
    for index in range(len(texts)):
        line = flow.line_of(index)
        assert next(run.piece for run in flow.line(line) if run.piece == index) == index
        assert all(run.piece != index for number in range(line) for run in flow.line(number))
        assert flow.at(line, flow.cell_of(index)) == index


def test_words_stay_whole() -> None:
    flow = TextFlow(10)
    flow.update(pieces(["Once", " upon", " a", " ti", "me", "\n", "x"]))
    assert ["".join(run.text for run in flow.line(number)) for number in range(len(flow))] == [
        "Once upon ", "a time↵", "x",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [40, 41, 43])
def test_a_token_at_the_end_lays_out_the_last_word_only(width: int) -> None:
    flow = TextFlow(width)
    texts = [" word"] * 10_000
    flow.update(pieces(texts))
    before = flow.laid_out
    flow.update(pieces([*texts, " more"]))
    assert flow.laid_out - before == 2
