"""The files of chats and trees: how they are opened, and the folder for those that the user does not name."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from genctl.errors import InputError, cannot_read, printable
from genctl.io.file_lock import NotOurs, open_regular
from genctl.io.output import unwritable


def sessions_folder() -> Path:
    """Where sessions are saved: `$XDG_STATE_HOME/genctl/sessions`, `~/.local/state/genctl/sessions` by default."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    base = home if home.is_absolute() else Path("~/.local/state").expanduser()
    return base / "genctl" / "sessions"


def made_folder() -> Path:
    """The folder of sessions, created if it is missing. Raises OutputError."""
    folder = sessions_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise unwritable(error, folder) from None
    return folder


def new_file(kind: str, prompt: str) -> Path:
    """A new name in the folder of sessions: the time, the command and the prompt's first words. Raises OutputError."""
    folder = made_folder()
    words = "-".join(re.findall(r"[a-z0-9]+", prompt.lower()))[:32].strip("-")
    name = "-".join(part for part in (time.strftime("%Y%m%d-%H%M%S"), kind, words) if part)
    path = folder / f"{name}.jsonl"
    number = 2
    while os.path.lexists(path):
        path = folder / f"{name}-{number}.jsonl"
        number += 1
    return path


def open_session(path: Path, flags: int) -> int:
    """The descriptor of the file of a chat or a tree, which is never a link. Raises InputError."""
    name = printable(str(path))
    try:
        return open_regular(path, flags)
    except NotOurs as error:
        raise InputError(f"{name} {error}") from None
    except (OSError, ValueError) as error:
        raise InputError(cannot_read(name, error)) from None
