"""The full screen without a terminal, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

from textual import events
from textual.pilot import Pilot

from genctl.commands.explore.screen import ExploreApp
from genctl.tree.explorer import Explorer
from tests.tree.trees import explorer

Play = Callable[["Shown"], Awaitable[None]]


class Shown:
    """A running screen. `press` waits until everything has been handled."""

    def __init__(self, app: ExploreApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    @property
    def tree(self) -> Any:
        return self.app.shown_tree

    @property
    def lines(self) -> list[str]:
        """The screen's text, row by row."""
        return [
            "".join(segment.text for segment in strip).rstrip() for strip in self.app.screen._compositor.render_strips()
        ]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def settled(self) -> None:
        for _ in range(2):
            await self.pilot.pause(0)  # until all widgets have handled their messages; `pause()`: until the CPU is idle
            behind = self.app.model.submit(int)  # done after all the model's earlier work
            while not behind.done() or self.app.waiting or self.app.arrived or self.app.stale:
                await self.pilot.pause(0.01)
            await self.pilot.pause(0)
        await self.pilot.pause()

    async def send(self, *keys: str) -> None:
        """Send keys as fast as a terminal: Textual's pilot waits twice after each of them until the CPU is idle."""
        with patch("textual.app.wait_for_idle", _at_once):
            await self.pilot.press(*keys)

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.send(key)
            await self.settled()

    async def type(self, text: str) -> None:
        """Type into the open input line."""
        names = {" ": "space", "=": "equals_sign", ".": "full_stop", ",": "comma", "_": "underscore"}
        await self.send(*(names.get(character, character) for character in text))
        await self.settled()

    async def burst(self, text: str) -> None:
        """Send all keys of a text at once, as a program would."""
        named = {"\r": "enter", "?": "question_mark", "\x1b": "escape", ":": "colon", "/": "slash", " ": "space"}
        for character in text:
            self.app.post_message(events.Key(named.get(character, character), character))
        await self.settled()

    async def answer(self, text: str) -> None:
        await self.type(text)
        await self.press("enter")


async def _at_once(*_: float) -> None:
    await asyncio.sleep(0.001)


def played(
    made: Callable[[], Explorer] = lambda: explorer(max_new_tokens=6, do_sample=False),
) -> Callable[[Play], Callable[[], None]]:
    """A decorator: makes a test of actions on the screen of a tree."""

    def decorate(part: Play) -> Callable[[], None]:
        def test() -> None:
            play(part, made())

        test.__name__ = getattr(part, "__name__", "test")
        return test

    return decorate


def play(part: Play, made: Explorer | None = None, size: tuple[int, int] = (140, 40), **options: Any) -> ExploreApp:
    """Show a tree, run `part` on its screen, and close."""
    app = ExploreApp(made or explorer(max_new_tokens=6, do_sample=False), **options)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            shown = Shown(app, pilot)
            await shown.settled()
            await part(shown)

    asyncio.run(run())
    app.stop()
    app.model.shutdown(cancel_futures=True)
    return app
