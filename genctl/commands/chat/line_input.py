"""Where a person types: a line editor on a terminal, and plain lines where the terminal can draw nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.commands.chat import saved, slash
from genctl.config import presets
from genctl.config.check import known
from genctl.terminal.widgets import visible

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

SIGN, MORE = "> ", ". "
MOST_HISTORY = 4 * 2**20  # bytes of a history that is read


def line_input(*, color: bool, history: Path | None) -> PlainLines | LineEditor:
    """The line editor, or on a terminal that cannot redraw (TERM=dumb) plain lines."""
    if os.environ.get("TERM", "dumb").lower() in ("", "dumb", "unknown"):
        return PlainLines()
    return LineEditor(color=color, history=history)


class LineCleared(KeyboardInterrupt):
    """Ctrl-C, where something is typed already."""


class PlainLines:
    """Lines as the terminal gives them. One that ends with a backslash continues in the next.

    `read` and `ask` raise EOFError after Ctrl-D and KeyboardInterrupt after Ctrl-C. Of a line that Ctrl-C clears only
    the terminal knows.
    """

    def read(self, text: str = "") -> str:
        """A turn or a command; `text` is there already, to be changed."""
        if text:
            sys.stdout.write("".join(f"{MORE}{line}\n" for line in visible(text).split("\n")))
        lines = [self._line(SIGN)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(MORE))
        return "\n".join(lines)

    def ask(self, question: str) -> str:
        """The answer to a question, on one line. The history does not get it."""
        return self._line(visible(question))

    def waiting(self) -> AbstractContextManager[Callable[[], object]]:
        """While an answer is written. Gives what restores the terminal at once; called twice, it does no harm."""
        return nullcontext(lambda: None)  # the echo is all that is seen of such a line

    def _line(self, sign: str) -> str:
        sys.stdout.write(sign)
        sys.stdout.flush()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            line = sys.stdin.readline()
        finally:
            signal.signal(signal.SIGINT, before)
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


class LineEditor:
    """prompt_toolkit's, inline: what was typed stays above what follows it, however long it is.

    Enter sends, Alt-Enter begins a new line, and so does Enter after a backslash. It does what `PlainLines` does, and
    `read` raises LineCleared after Ctrl-C where something is typed.
    """

    def __init__(self, *, color: bool, history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys
        from prompt_toolkit.output import ColorDepth
        from prompt_toolkit.shortcuts import CompleteStyle
        from prompt_toolkit.styles import Style

        class Commands(Completer):
            """The names of commands, and of what they take; files, and saved chats."""

            def get_completions(self, document: Any, event: Any) -> Iterator[Completion]:
                named = (preset.name for preset in presets.available())
                before = document.text_before_cursor
                for word, length in slash.completions(before, known(), named, saved.paths, saved.names):
                    yield Completion(word, -length)

        class OwnHistory(FileHistory):
            """A history that a full disk or a lost folder does not end the chat for."""

            def store_string(self, string: str) -> None:
                with suppress(OSError):
                    super().store_string(string)

        keys = KeyBindings()

        @keys.add("enter")
        @keys.add("c-j")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.document.current_line_before_cursor.endswith("\\") and not buffer.document.text_after_cursor:
                buffer.delete_before_cursor(1)
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            # an empty last line would scroll a long one before it out of view
            pasted = event.data.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
            event.current_buffer.insert_text(pasted)

        past: History = InMemoryHistory() if history is None else OwnHistory(str(history))
        depth = None if color else ColorDepth.DEPTH_1_BIT
        style = Style.from_dict({"sign": "bold"} if color else {})
        self._editor: PromptSession[str] = PromptSession(
            [("class:sign", SIGN)],
            multiline=True,
            prompt_continuation=[("class:sign", MORE)],
            completer=Commands(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            history=past,
            key_bindings=keys,
            color_depth=depth,
            style=style,
            enable_suspend=True,
            erase_when_done=True,
        )
        self._sign = "\x1b[1m{}\x1b[0m" if color else "{}"
        self._asker: PromptSession[str] = PromptSession(color_depth=depth, reserve_space_for_menu=0)

    def read(self, text: str = "") -> str:
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

    def ask(self, question: str) -> str:
        return self._asker.prompt(question, handle_sigint=False)

    def waiting(self) -> AbstractContextManager[Callable[[], object]]:
        return _without_echo()  # the editor shows what was typed meanwhile


@contextmanager
def _without_echo() -> Iterator[Callable[[], object]]:
    """What is typed does not appear, until this ends or what it gives is called."""
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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600)
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
    except OSError:
        return None
    return path if size <= MOST_HISTORY else None
