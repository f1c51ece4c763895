"""PYTHONSAFEPATH for Python 3.10, which does not know it: `children.protect` puts this folder on their path.

Python runs `sitecustomize` before it puts the working directory first on the path of `python -c` and `python -m`.
So the first import after that takes it away again.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.realpath(__file__).rpartition(os.sep)[0]


class _WithoutWorkingDirectory:
    """Finds nothing; it is asked before the path is searched."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> None:
        if len(sys.path) > 1 and os.path.realpath(sys.path[1]) == _HERE:
            sys.meta_path.remove(cls)
            if os.path.realpath(sys.path[0]) == os.path.realpath(os.curdir):
                del sys.path[0]


def _other() -> None:
    """Run the `sitecustomize` that this one hides."""
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if os.path.realpath(folder) != _HERE])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if sys.version_info < (3, 11):
    sys.meta_path.insert(0, _WithoutWorkingDirectory)
_other()
