"""Two distributions side by side, keys while the model runs, and what the processors did."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from genctl.commands.explore.options import told_apart
from genctl.commands.explore.screen_app import ExploreApp
from genctl.commands.explore.screen_source import TreeSource
from genctl.engines.session import Session
from genctl.errors import UsageError
from genctl.params import Runtime
from genctl.tree.beside import Second
from tests.commands.explore.app import Shown, play
from tests.tree.trees import explorer, stories


def test_other_settings_are_shown_beside_and_where_they_part_is_marked() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "home")
        app, tree = shown.app, shown.tree
        source = app.source
        assert app.look is not None
        space = source.explorer.space  # type: ignore[attr-defined]
        beside = space.aside({"repetition_penalty": 3.0})
        parting = [
            node
            for node in (0, *tree.branch()[:-1])
            if space.distribution(node, 0).processed.argmax() != space.distribution(node, beside).processed.argmax()
        ]
        assert parting
        assert len(parting) < len(tree.branch())
        marked = [piece.node for piece in app.place.pieces if piece.differs]
        assert [tree.nodes[node].parent for node in marked] == parting
        app.place.go(app.place.piece(tree.depths[parting[0]] + 1))
        app._moved()
        await shown.settled()
        rows = [line for line in shown.lines if "≠" in line]
        assert len(rows) == 2  # what each would write
        assert "A  final      B  final" in shown.text
        assert "A: the tree's settings · B: without repetition" in shown.text

    made = explorer(max_new_tokens=12, do_sample=False)
    play(part, made, other_settings={"repetition_penalty": 3.0}, names=("the tree's settings", "without repetition"))


def test_another_model_with_the_same_tokens_is_read_on_the_same_tree() -> None:
    other = Session.load(Runtime(model="builtin:stories"))

    async def part(shown: Shown) -> None:
        await shown.press("space", "left")
        look = shown.app.look
        assert look is not None
        for id in look.first.order[:20]:
            assert look.other.of(int(id)).logprob == pytest.approx(look.first.of(int(id)).logprob, abs=1e-5)
        assert not any(piece.differs for piece in shown.app.place.pieces)

    play(part, other_model=other, names=("A", "B"))


def test_a_model_with_other_tokens_cannot_share_a_tree() -> None:
    other = Session.load(Runtime(model="builtin:numbers"))
    with pytest.raises(UsageError, match="do not have the same tokens"):
        Second(explorer(session=stories()).space, session=other)


def test_keys_are_answered_while_the_model_runs_and_space_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = threading.Semaphore(0)
    do = TreeSource.do

    def slow(self: TreeSource, line: str, /) -> Iterator[Any]:
        for result in do(self, line):
            turns.acquire()
            yield result

    monkeypatch.setattr(TreeSource, "do", slow)

    async def tokens(shown: Shown, app: ExploreApp, count: int) -> None:
        turns.release(count)
        while app.written < count:
            await shown.pilot.pause(0.01)

    async def part(shown: Shown) -> None:
        app = shown.app
        await shown.pilot.press("space")
        await tokens(shown, app, 3)
        assert app.running == "generate"
        assert "Space stops" in shown.text
        end = app.place.cursor
        await shown.pilot.press("left")
        assert app.place.cursor == shown.tree.nodes[end].parent
        await shown.pilot.press("b")
        assert "one command at a time" in shown.text
        await shown.pilot.press("question_mark")
        assert len(app.screen_stack) == 2
        await shown.pilot.press("escape", "space")
        turns.release(1000)
        await shown.settled()
        assert app.answer == "stopped"
        assert 3 <= len(shown.tree) < 40

    play(part, explorer(max_new_tokens=60, do_sample=False))


def test_what_removed_a_token_and_how() -> None:
    made = explorer(do_sample=True, top_k=40, top_p=0.9, repetition_penalty=1.2)
    list(made.do("generate 12"))
    list(made.do("left 6"))
    source = TreeSource(made)
    look = source.look(made.tree.cursor)
    gone = [int(id) for id in look.first.order if look.first.of(int(id)).processed == float("-inf")]
    by = {look.first.of(id).removed_by: look.first.how(id) for id in reversed(gone)}
    assert set(by) == {"top_k", "top_p"}
    words = by["top_p"].split(", ")[-1].split()
    assert words[:3] == ["top_p", "0.9", "at"]
    assert 0.9 <= float(words[3]) <= 1.0
    assert "top_k 40 at 41" in {look.first.how(id).split(", ")[-1] for id in gone}
    written = made.tree.nodes[made.tree.branch()[0]].id
    assert look.first.how(written).startswith("repetition_penalty × 1.2")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("/models/a/stories", "/models/a/stories-2"), ("stories", "stories-2")),
        (("/models/a/stories", "/models/b/stories"), ("a/stories", "b/stories")),
        (("builtin:stories", "gpt2"), ("builtin:stories", "gpt2")),
    ],
)
def test_names_of_two_models_are_short_and_distinct(names: tuple[str, str], shown: tuple[str, str]) -> None:
    assert told_apart(names) == shown
