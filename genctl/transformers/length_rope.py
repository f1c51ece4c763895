"""Rotary positions whose frequencies depend on the length of a text.

"dynamic" (NTK-aware scaling) widens the wavelengths with every token beyond the trained context; "longrope" (Ding et
al. 2024, arXiv:2402.13753) switches to a second set of them there. transformers takes the length from the longest row
of a pass, and keeps the last result in a module, so texts of different lengths affect each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any


class LengthRope:
    """The lengths on which a model's frequencies depend. Up to `bound` they are the same for every text.

    With `reads_again` the full text is read again when it passes the bound of longrope.
    """

    def __init__(self, modules: Iterable[Any] = (), *, reads_again: bool = False) -> None:
        rotary = [module for module in modules if hasattr(module, "original_max_seq_len")]
        self.dynamic = [module for module in rotary if any("dynamic" in kind for kind in _kinds(module))]
        long = [bound for module in rotary for bound in _long_bounds(module)]
        self.bound: float = min([*(module.original_max_seq_len for module in self.dynamic), *long], default=math.inf)
        self.reads_again = bool(long) and reads_again

    def reset(self) -> None:
        """Forget the length of the last pass."""
        for module in self.dynamic:
            for prefix in _prefixes(module):
                module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _kinds(module: Any) -> list[str]:
    kinds = module.rope_type
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


def _prefixes(module: Any) -> Iterator[str]:
    """The prefixes of the module's buffer names: one for each kind of layer if there are several."""
    if not isinstance(module.rope_type, dict):
        yield ""
        return
    yield from (f"{layer}_" for layer, kind in module.rope_type.items() if "dynamic" in kind)


def _long_bounds(module: Any) -> Iterator[int]:
    parameters = module.config.rope_parameters
    nested = isinstance(module.rope_type, dict)
    kinds = module.rope_type.items() if nested else [("", module.rope_type)]
    for layer, kind in kinds:
        if kind == "longrope":
            yield int((parameters[layer] if nested else parameters)["original_max_position_embeddings"])
