"""Keys in the order in which they are pressed: what one stands for is done before the next one is looked at.

Textual passes a key from widget to widget and opens a line for typing later, so that of keys which arrive together (a
fast hand, a script) the last ones would act on what is not there yet. Here a key of the panes or of the line is done at
once. It waits while a brief command runs, an editor opens or the vocabulary is read.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from textual import events
from textual.screen import ModalScreen

from genctl.commands.explore.dialogs import Editor
from genctl.commands.explore.screen_panes import TreeApp

AT_ONCE = ("escape", "ctrl+c")  # do not wait: they stop what is waited for
IN_LINE = ("down", "pageup", "pagedown", "ctrl+c")  # of the keys of the panes, those that act while a line is typed


class OrderedKeys(TreeApp):
    """The panes, with keys that keep their order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.held: deque[events.Key | events.Paste] = deque()

    @property
    def must_wait(self) -> bool:
        """Whether the next key would come too early."""
        return self.is_brief or (isinstance(self.screen, Editor) and self.screen.focused is None)

    async def on_event(self, event: events.Event) -> None:
        """Do a key, or hold it."""
        if not isinstance(event, (events.Key, events.Paste)) or event.is_forwarded:
            await super().on_event(event)
        elif isinstance(event, events.Key) and event.key in AT_ONCE:
            self.held.clear()
            await self._press(event)
        elif self.held or self.must_wait:
            self.held.append(event)
        else:
            await self._press(event)

    async def release_keys(self) -> None:
        """Do the keys that were held, as far as they no longer have to wait."""
        while self.held and not self.must_wait:
            await self._press(self.held.popleft())

    async def on_descendant_focus(self) -> None:
        """An editor is open: the keys for it are no longer held."""
        await self.release_keys()

    async def _press(self, event: events.Key | events.Paste) -> None:
        if isinstance(self.screen, ModalScreen):
            await super().on_event(event)
            return
        typing = self.focused is self.prompt
        if isinstance(event, events.Paste):
            if typing:
                self.prompt.write(event.text.partition("\n")[0].rstrip("\r"))
            return
        self.app_focus = True
        if typing and event.is_printable and event.character is not None:
            self.prompt.write(event.character)
            return
        found = self.screen.active_bindings.get(event.key)
        if found is None or not found.enabled:
            return
        if not typing or found.node is self.prompt or event.key in IN_LINE:
            await self.run_action(found.binding.action, found.node)
