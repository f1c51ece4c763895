"""A text of a grammar that is written in several commands: it goes on where the last one left it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from genctl.errors import UsageError
from tests.tree.trees import explorer

WORDS = r"( [a-z]+){3} [A-Z][a-z]*\."


def written(*lines: str, **knobs: Any) -> str:
    """The text that commands write after the prompt."""
    tree = explorer(do_sample=False, **knobs)
    try:
        for line in lines:
            list(tree.do(line))
        return tree.text(tree.tree.tip)
    finally:
        tree.close()


@pytest.mark.parametrize("place", [1, 2, 4])
def test_a_text_that_is_continued_in_its_middle_is_what_one_command_writes(place: int) -> None:
    """The grammar began anew there: three words and a name followed, whatever was before."""
    whole = written("generate 24", regex=WORDS)
    assert re.fullmatch(WORDS, whole)
    assert written("generate 24", "start", f"right {place}", "generate 24", regex=WORDS) == whole


@pytest.mark.parametrize("command", ["take 2 24", "sample 2 24", "beams 2 24"])
def test_every_command_goes_on_with_the_text(command: str) -> None:
    assert re.fullmatch(WORDS, written("generate 24", "start", "right 2", command, regex=WORDS))


def test_tokens_that_are_taken_by_hand_are_of_the_text() -> None:
    tree = explorer(do_sample=False, regex=WORDS)
    list(tree.do("generate 24"))
    first, second = (tree.tree.nodes[node].id for node in tree.tree.path(tree.tree.tip)[:2])
    whole = tree.text(tree.tree.tip)
    tree.close()
    assert written(f"take id:{first} 0", "end", f"take id:{second} 22", regex=WORDS) == whole


def test_the_rest_of_a_text_needs_no_room_for_all_of_it() -> None:
    text = written("generate 24", "left 2", "generate 3", regex=WORDS)
    assert re.fullmatch(WORDS, text)


@pytest.mark.parametrize("line", ["edit 42:", 'set regex=" [0-9]{3}"'])
def test_tokens_that_no_text_of_the_grammar_begins_with_are_refused(line: str) -> None:
    with pytest.raises(UsageError, match=r"^regex: no text of it begins with the tokens after the prompt"):
        written("generate 24", "start", "right 2", line, "generate 24", regex=WORDS)


def test_what_may_follow_a_part_is_what_the_grammar_has_next() -> None:
    tree = explorer(do_sample=False, regex=" [0-9]{3}")
    list(tree.do("generate 9"))
    list(tree.do("start"))
    list(tree.do("right 2"))
    best = tree.distribution(tree.tree.cursor).processed
    allowed = {tree.piece(id) for id in (best > -float("inf")).nonzero()[0].tolist()}
    assert not any(text.startswith(" ") for text in allowed)
    tree.close()
