"""The line editor of a chat: prompt_toolkit's, with completion of commands and a history of all chats."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from genctl.commands.chat import slash
from genctl.commands.chat.line_input import MORE, SIGN, LineCleared
from genctl.config import presets
from genctl.config.check import known
from genctl.io.sessions import sessions_folder
from genctl.terminal.widgets import visible

KEYS = KeyBindings()


@KEYS.add("enter")
@KEYS.add("c-j")
def _enter(event: KeyPressEvent) -> None:
    """Send the text, or begin a new line after a backslash."""
    buffer = event.current_buffer
    if buffer.document.current_line_before_cursor.endswith("\\") and not buffer.document.text_after_cursor:
        buffer.delete_before_cursor(1)
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


@KEYS.add("escape", "enter")
def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


@KEYS.add(Keys.BracketedPaste)
def _paste(event: KeyPressEvent) -> None:
    # an empty last line would scroll a long one before it out of view
    pasted = event.data.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
    event.current_buffer.insert_text(pasted)


class Commands(Completer):
    """The names of commands, and of what they take; files."""

    _paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """What the line may continue with."""

        def paths(typed: str) -> list[str]:
            found = self._paths.get_completions(Document(typed), complete_event)
            return [typed + each.text for each in found if each.text.isprintable()]

        named = (preset.name for preset in presets.available())
        before = document.text_before_cursor
        for word, length in slash.completions(before, known(), named, paths):
            yield Completion(word, -length)


class SafeHistory(FileHistory):
    """A history that a full disk or a lost folder does not end the chat for."""

    def store_string(self, string: str) -> None:
        """Append a text."""
        with suppress(OSError):
            super().store_string(string)


class LineEditor:
    """Edits inline: what was typed stays above what follows it, however long it is.

    Enter sends, Alt-Enter begins a new line, and so does Enter after a backslash. It has the methods of `PlainLines`,
    and `read` raises LineCleared after Ctrl-C where something is typed.
    """

    def __init__(self, *, color: bool) -> None:
        history = history_file(sessions_folder().parent)
        self._editor: PromptSession[str] = PromptSession(
            [("class:sign", SIGN)],
            multiline=True,
            prompt_continuation=[("class:sign", MORE)],
            completer=Commands(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            history=InMemoryHistory() if history is None else SafeHistory(str(history)),
            key_bindings=KEYS,
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            style=Style.from_dict({"sign": "bold"} if color else {}),
            enable_suspend=True,
            erase_when_done=True,
        )
        self._sign = "\x1b[1m{}\x1b[0m" if color else "{}"

    def read(self, text: str = "") -> str:
        """A turn or a command; `text` is there already, to be changed."""
        end = ""
        try:
            return self._editor.prompt(default=text, handle_sigint=False)
        except KeyboardInterrupt:
            if not self._editor.default_buffer.text:
                raise
            end = "^C"  # as a shell shows a line that it does not run
            raise LineCleared from None
        finally:  # write all that was typed: the editor leaves no more of it than fits the screen
            typed = visible(self._editor.default_buffer.text)
            sign, more = self._sign.format(SIGN), self._sign.format(MORE)
            sys.stdout.write(f"{sign}{typed}".replace("\n", f"\n{more}") + f"{end}\n")
            sys.stdout.flush()

    @contextmanager
    def waiting(self) -> Iterator[Callable[[], object]]:
        """While an answer is written: what is typed does not appear until the next prompt shows it.

        Gives what restores the terminal at once; called twice, it does no harm.
        """
        try:
            import termios
        except ImportError:  # Windows
            yield lambda: None
            return
        try:
            descriptor = sys.stdin.fileno()
            before = termios.tcgetattr(descriptor)
        except (OSError, ValueError, termios.error):
            yield lambda: None
            return

        def restore() -> None:
            with suppress(termios.error):
                termios.tcsetattr(descriptor, termios.TCSANOW, before)

        quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        try:
            with suppress(termios.error):
                termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
            yield restore
        finally:
            restore()


def history_file(folder: Path) -> Path | None:
    """The file of what was typed in all chats, readable by its owner only; None where there can be none."""
    path = folder / "chat_history"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600))
    except OSError:
        return None
    return path
