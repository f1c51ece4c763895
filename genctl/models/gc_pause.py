"""Pause Python's cyclic garbage collector while a command starts and ends.

Importing torch creates half a million objects, none of them garbage. The collector would scan them repeatedly during
the import, and again when the interpreter ends: a fifth of `import torch`, and as much again at the end.
"""

from __future__ import annotations

import gc

_paused = False


def pause() -> None:
    """Collect nothing until `resume`. Call it before anything is imported, in a process of our own."""
    global _paused
    gc.disable()
    _paused = True


def resume() -> None:
    """Collect from now on; what was imported so far is never scanned. Without `pause`, do nothing."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()
