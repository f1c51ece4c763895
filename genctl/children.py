"""What the children of this process inherit, libraries' too: they import nothing from the working directory.

Python puts the working directory first on the path of `python -c` and `python -m`, and libraries start both: torch's
compiler, multiprocessing, Ray.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # `__main__` imports this file before anything else
if TYPE_CHECKING:
    from typing import Any

SAFE = "PYTHONSAFEPATH"
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_HERE = os.path.realpath(__file__).rpartition(os.sep)[0]  # no pathlib: nothing that takes time is imported yet


def protect() -> None:
    """Give all later children a safe path. For programs: it changes this process's environment to its end."""
    os.environ[SAFE] = "1"


class Protected:
    """A context in which children get a safe path, for libraries: the environment is the caller's own afterwards."""

    def __enter__(self) -> None:
        self._before = os.environ.get(SAFE)
        protect()

    def __exit__(self, *_: Any) -> None:
        if self._before is None:
            os.environ.pop(SAFE, None)
        else:
            os.environ[SAFE] = self._before


def forget_working_directory() -> None:
    """Take the working directory, which `python -m` put there, off this process's path, unless genctl is in it."""
    here = os.path.realpath(os.curdir)
    if sys.path and os.path.realpath(sys.path[0]) == here and here != _HERE.rpartition(os.sep)[0]:
        del sys.path[0]


def use_own_compile_cache() -> None:
    """Let torch keep compiled code in a folder of the user's own, where TORCHINDUCTOR_CACHE_DIR names no other.

    Torch's own choice, which it writes into that variable, is one beside everybody's temporary files, with a name that
    is known before it is there. Raises UsageError for a folder that somebody else could have put code into.
    """
    import shutil
    import tempfile

    from genctl.folders import cache, make_private

    named = os.environ.get(COMPILED, "")
    if named and not named.startswith(f"{tempfile.gettempdir()}{os.sep}torchinductor_"):
        return

    base = cache()
    hint = f"{COMPILED}=FOLDER names another"
    try:
        if base is None:
            raise OSError
        for folder in (base, base / "compiled"):
            make_private(folder, hint)
        os.environ[COMPILED] = str(folder)
    except OSError:  # no home, or none that can be written to
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="genctl-")
        atexit.register(shutil.rmtree, os.environ[COMPILED], ignore_errors=True)
