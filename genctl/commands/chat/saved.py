"""The chats that are saved on this machine: the list of them, the last one, and the names by which they are called."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.text import Text

from genctl.commands.chat.log import ChatLog, NotAChat
from genctl.commands.chat.options import ChatOptions
from genctl.commands.messages import Messages
from genctl.errors import Exit, GenctlError, InputError, OutputError, count, printable
from genctl.io.sessions import made_folder, sessions_folder
from genctl.io.writers import to_json, tsv_cell
from genctl.terminal import theme, widgets
from genctl.terminal.console import make_consoles

LINK = ".link"  # the suffix of a link to a chat elsewhere


@dataclass(frozen=True)
class SavedChat:
    """A chat of this machine."""

    path: Path
    changed: datetime
    model: str = ""
    turns: int = 0
    words: str = ""  # of the first turn
    error: str = ""  # why it cannot be read

    @property
    def name(self) -> str:
        """What --open and /load call it."""
        here = self.path.parent == sessions_folder().resolve()
        return self.path.stem if here else str(self.path)


def remember(path: Path) -> None:
    """Let the folder of sessions have a link to a chat that is saved elsewhere, by which it is found again."""
    with suppress(OSError, OutputError):  # the chat is saved all the same; the link may be there
        path, folder = path.resolve(), made_folder()
        if path.parent != folder.resolve():
            digest = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
            (folder / f"{digest}{LINK}").symlink_to(path)


def saved_chats() -> Iterator[SavedChat]:
    """Each chat in the folder of sessions, or elsewhere with a link in it; the newest change comes first."""
    found = {}
    for path in (path for suffix in (".jsonl", LINK) for path in sessions_folder().glob(f"*{suffix}")):
        with suppress(OSError, RuntimeError):  # a link to a file that is gone
            whole = path.resolve()
            found[whole] = whole.stat().st_mtime
    for path, changed in sorted(found.items(), key=lambda item: (item[1], item[0]), reverse=True):
        when = datetime.fromtimestamp(changed).astimezone()
        try:
            log = ChatLog.look(path)
        except NotAChat:
            continue
        except GenctlError as error:
            yield SavedChat(path, when, error=error.message)
            continue
        words = next((message.content for message in log.here if message.role == "user"), "")
        yield SavedChat(path, when, log.header.model, log.turns_to(log.end), words)


def last_chat() -> Path:
    """The chat that was changed last. Raises InputError where there is none."""
    last = next(saved_chats(), None)
    if last is None:
        raise InputError(f"there is no chat to continue in {printable(str(sessions_folder()))}")
    if last.error:
        raise InputError(last.error, hint="genctl chat --list lists the others, and --open continues one")
    return last.path


def path_of(name: str) -> Path:
    """The file of a chat: a path, or the name of one in the folder of sessions."""
    path = Path(name).expanduser()
    if path.parent == Path() and not path.exists():
        for known in (sessions_folder() / name, sessions_folder() / f"{name}.jsonl"):
            if known.exists():
                return known
    return path


def names(typed: str) -> list[str]:
    """The names of saved chats that begin so, newest first."""
    return [
        path.stem for path in sorted(sessions_folder().glob("*.jsonl"), reverse=True) if path.stem.startswith(typed)
    ]


def paths(typed: str) -> list[str]:
    """The paths that begin so; a folder ends with /."""
    before, slash, start = typed.rpartition("/")
    try:
        with os.scandir(Path(f"{before}{slash}" or ".").expanduser()) as entries:
            here = sorted((entry.name, "/" if entry.is_dir() else "") for entry in entries)
    except (OSError, RuntimeError, ValueError):
        return []
    shown = (name + end for name, end in here if name.startswith(start) and name.isprintable())
    return [f"{before}{slash}{name}" for name in shown if start or not name.startswith(".")]


def write_list(options: ChatOptions) -> int:
    """Write the list. Returns the exit status."""
    out, chat = make_consoles(options.color)[0], None
    for chat in saved_chats():
        if options.format == "jsonl":
            record = {"date": chat.changed.isoformat(timespec="seconds"), "model": chat.model, "turns": chat.turns}
            record |= {"words": chat.words, "path": str(chat.path), **({"error": chat.error} if chat.error else {})}
            out.file.write(f"{to_json(record)}\n")
            continue
        date = f"{chat.changed:%Y-%m-%d %H:%M}"
        if not out.is_terminal:
            cells = (date, chat.model, chat.turns, chat.error or chat.words, chat.path)
            out.file.write("\t".join(map(tsv_cell, cells)) + "\n")
            continue
        facts = f"{date}  " + (chat.error or f"{chat.model}  {count(chat.turns, 'turn')}  ")
        room = max(out.width - len(facts), 0)
        words = widgets.first_words(chat.words, room) if room > 8 else ""
        out.print(widgets.fit(Text(widgets.visible(facts)).append(words), out.width))
        out.print(Text(f"  {widgets.visible(shlex.quote(chat.name))}", theme.DIM), soft_wrap=True)
    if chat is None:
        Messages(quiet=options.quiet).note(f"no chat is saved in {printable(str(sessions_folder()))}")
    elif out.is_terminal and not options.quiet:
        Messages().print("genctl chat --continue continues the first, --open NAME another")
    return int(Exit.DONE)
