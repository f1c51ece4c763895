"""Python's cyclic garbage collector, out of the way while a command starts and ends.

Importing torch makes half a million objects, none of which is garbage. The collector would look through them again and
again as they come, and once more as the interpreter ends: a fifth of `import torch`, and as much again at the end.
"""

from __future__ import annotations

import gc

_paused = False


def pause() -> None:
    """Collect nothing until `resume`: for a process that is ours, before anything is imported."""
    global _paused
    gc.disable()
    _paused = True


def resume() -> None:
    """Collect again what is made from now on; what was imported so far is never looked at. Without `pause`, nothing."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()
