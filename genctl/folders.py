"""The user's folder of what can be computed again, and folders in it that nobody else may write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from genctl.errors import UsageError, printable


def cache() -> Path | None:
    """`$XDG_CACHE_HOME/genctl`, `~/.cache/genctl` by default; None where there is no home folder."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # ignore a relative folder (XDG Base Directory Specification)
        folder = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    except (RuntimeError, ValueError):
        return None
    return folder / "genctl"


def make_private(folder: Path, hint: str) -> None:
    """Make `folder`, for its owner only, if it is not there.

    Raises OSError where that fails, and UsageError for a link and for a folder that others own or may write to.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    wrong = ""
    if not stat.S_ISDIR(state.st_mode):
        wrong = "is a link"
    elif hasattr(os, "geteuid") and state.st_uid != os.geteuid():
        wrong = "belongs to another user"
    elif os.name == "posix" and state.st_mode & 0o022:
        wrong = "can be written to by others"
    if wrong:
        raise UsageError(f"{printable(str(folder))} {wrong}, and code is run from there", hint=hint)
    if os.name == "posix" and state.st_mode & 0o077:
        folder.chmod(0o700)
