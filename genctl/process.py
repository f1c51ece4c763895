"""This process and its children: versions, the environment of children, ignored signals, the cache folder.

Python puts the working directory first on the path of `python -c` and `python -m`, and libraries start both: torch's
compiler, multiprocessing, Ray. No child, including those of libraries, may import anything from there.

`__main__` imports this file before anything else: its top level only imports modules that no file there can replace.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

TYPE_CHECKING = False  # `typing` is a file
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

__version__ = "0.3.0"
SAFE = "PYTHONSAFEPATH"
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_HERE = os.path.realpath(__file__).rpartition(os.sep)[0]  # not pathlib: it takes time to import
_paused = False


def protect_children() -> None:
    """Give all later children a safe path. For programs only: it changes this process's environment for good."""
    os.environ[SAFE] = "1"


class ProtectedChildren:
    """A context in which children get a safe path. For use as a library: the environment is restored afterwards."""

    def __enter__(self) -> None:
        self._before = os.environ.get(SAFE)
        protect_children()

    def __exit__(self, *_: Any) -> None:
        if self._before is None:
            os.environ.pop(SAFE, None)
        else:
            os.environ[SAFE] = self._before


def forget_working_directory() -> None:
    """Remove the working directory, added by `python -m`, from this process's path, unless genctl is in it."""
    here = os.path.realpath(os.curdir)
    if sys.path and os.path.realpath(sys.path[0]) == here and here != _HERE.rpartition(os.sep)[0]:
        del sys.path[0]


def stays_ignored(number: int) -> bool:
    """Whether a signal is ignored and stays so: SIGHUP under `nohup`, SIGINT for jobs that a shell script starts in the
    background.

    SIGINT is not left ignored if standard input is a terminal, where Ctrl-C can be pressed: such a background
    job does not read from a terminal, though it may write to one.
    """
    import signal

    if signal.getsignal(number) is not signal.SIG_IGN:
        return False
    return number != signal.SIGINT or not os.isatty(0)


def pause_collector() -> None:
    """Disable garbage collection until `resume_collector`. Call it before any import, and only in our own process.

    Importing torch creates half a million objects, none of them garbage. Python's cyclic collector would scan them
    repeatedly during the import, and again at exit: a fifth of the time of `import torch`, and as much again at
    the end.
    """
    global _paused
    gc.disable()
    _paused = True


def resume_collector() -> None:
    """Enable collection again; objects that exist now are never scanned. Without `pause_collector`, do nothing."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()


def use_own_compile_cache() -> None:
    """Let torch keep compiled code in a private folder, unless TORCHINDUCTOR_CACHE_DIR names one.

    Torch's default, which it also writes to that variable, is a folder with a predictable name in the shared temporary
    folder. Raises UsageError for a folder into which other users could have put code.
    """
    import shutil
    import tempfile

    named = os.environ.get(COMPILED, "")
    if named and not named.startswith(f"{tempfile.gettempdir()}{os.sep}torchinductor_"):
        return

    base = cache_folder()
    hint = f"{COMPILED}=FOLDER names another"
    try:
        if base is None:
            raise OSError
        for folder in (base, base / "compiled"):
            make_private(folder, hint)
        os.environ[COMPILED] = str(folder)
    except OSError:  # no home, or not writable
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="genctl-")
        atexit.register(shutil.rmtree, os.environ[COMPILED], ignore_errors=True)


def cache_folder() -> Path | None:
    """The user's cache folder: `$XDG_CACHE_HOME/genctl`, `~/.cache/genctl` by default.

    None if there is no home folder.
    """
    from pathlib import Path

    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # ignore a relative folder (XDG Base Directory Specification)
        folder = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    except (RuntimeError, ValueError):
        return None
    return folder / "genctl"


def make_private(folder: Path, hint: str) -> None:
    """Make `folder` if it does not exist, and let only its owner access it.

    Raises OSError if that fails, and UsageError for a link and for a folder that others own or can write to.
    """
    import stat

    from genctl.errors import UsageError, printable

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


def versions(*packages: str) -> dict[str, str]:
    """The versions of genctl and of `packages`."""
    from importlib import metadata

    found = {"genctl": __version__}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def sources() -> str:
    """A digest of genctl's own sources, as installed."""
    from hashlib import sha256
    from pathlib import Path

    home = Path(__file__).parent
    whole = sha256()
    for path in sorted(path for kind in ("py", "c", "h") for path in home.rglob(f"*.{kind}")):
        whole.update(f"{path.relative_to(home).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:12]
