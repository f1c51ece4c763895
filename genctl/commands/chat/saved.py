"""The chats that are saved on this machine: the list of them, and the last one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from genctl.commands.chat.log import ChatLog, NotAChat
from genctl.commands.chat.options import ChatOptions
from genctl.commands.messages import Messages
from genctl.errors import Exit, GenctlError, InputError, printable
from genctl.io.sessions import sessions_folder
from genctl.io.writers import to_json, tsv_cell
from genctl.terminal.console import make_consoles


def saved_chats() -> Iterator[tuple[Path, ChatLog | GenctlError]]:
    """Each chat in the folder of sessions, or why it cannot be read; the newest change comes first."""
    found = [path for path in sessions_folder().glob("*.jsonl") if path.is_file()]
    for path in sorted(found, key=lambda path: (path.stat().st_mtime, path), reverse=True):
        try:
            yield path, ChatLog.look(path)
        except NotAChat:
            continue
        except GenctlError as error:
            yield path, error


def last_chat() -> Path:
    """The chat that was changed last. Raises InputError where there is none."""
    path, chat = next(saved_chats(), (None, None))
    if path is None:
        raise InputError(f"there is no chat to continue in {printable(str(sessions_folder()))}")
    if isinstance(chat, GenctlError):
        raise InputError(chat.message, hint="genctl chat --list lists the others, and --open continues one")
    return path


def write_list(options: ChatOptions) -> int:
    """Write the list: when each chat was changed, its model, its turns, how it begins, its file. Returns the status."""
    out, found = make_consoles(options.color)[0].file, False
    for path, chat in saved_chats():
        found, when = True, datetime.fromtimestamp(path.stat().st_mtime).astimezone()
        record: dict[str, Any] = {"date": when.isoformat(timespec="seconds"), "model": "", "turns": 0, "words": ""}
        if isinstance(chat, ChatLog):
            words = next((message.content for message in chat.here if message.role == "user"), "")
            record |= {"model": chat.header.model, "turns": chat.turns_to(chat.end), "words": words, "path": str(path)}
        else:
            record |= {"path": str(path), "error": chat.message}
        if options.format == "jsonl":
            out.write(f"{to_json(record)}\n")
        else:
            words = record.get("error", record["words"])
            cells = (f"{when:%Y-%m-%d %H:%M}", record["model"], record["turns"], words, record["path"])
            out.write("\t".join(map(tsv_cell, cells)) + "\n")
    if not found:
        Messages(quiet=options.quiet).note(f"no chat is saved in {printable(str(sessions_folder()))}")
    return int(Exit.DONE)
