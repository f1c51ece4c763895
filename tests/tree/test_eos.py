"""A text ends with EOS: nothing continues after it unless a token is taken there, and what is shown there says so."""

from __future__ import annotations

import pytest

from genctl.commands.explore.formats import lines_of
from genctl.tree.commands import Shown, Why
from genctl.tree.explorer import Explorer
from tests.tree.trees import explorer, stories

ENDS = "the text ends here (EOS); take or edit continues after it"
AFTER = "after EOS: the text ends at node 3"


def ended(**knobs: object) -> Explorer:
    """A tree whose third token is EOS."""
    made = explorer(**knobs)
    for line in ("generate 2", f"take id:{stories().planner.eos[0]} 4"):
        list(made.do(line))
    assert made.tree.tip == made.tree.cursor == 3
    return made


def notes(made: Explorer, line: str) -> list[str]:
    return [result.note for result in list(made.do(line)) if hasattr(result, "note") and result.note]


@pytest.mark.parametrize("line", ["generate 2", "sample 2 2", "beams 2 2", "expand depth=2"])
def test_a_text_that_has_ended_is_not_continued_without_a_word(line: str) -> None:
    made = ended()
    steps = len(made.tree.steps)
    assert notes(made, line) == [ENDS]
    assert (len(made.tree), len(made.tree.steps)) == (3, steps)
    for by_hand in ("take 1 0", "edit  cat"):
        list(made.do("goto 3"))
        assert notes(made, by_hand) == [AFTER]
    assert notes(made, line) == [AFTER]  # what was taken there is continued


def test_the_tokens_after_an_end_are_marked_where_they_are_listed_and_searched() -> None:
    made = ended()
    for line in ("show 3", "find a", "why"):
        (result,) = list(made.do(line))
        assert isinstance(result, (Shown, Why))
        assert result.after_eos
        assert "after EOS" in next(lines_of(result))
        list(made.do("left"))
        (before,) = list(made.do(line))
        assert isinstance(before, (Shown, Why))
        assert not before.after_eos
        list(made.do("right"))


def test_what_ends_a_text_is_the_setting() -> None:
    made = ended(eos_token_id=[5])
    assert made.tree.nodes[3].id != 5
    assert not notes(made, "generate 2")
