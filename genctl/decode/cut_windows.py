"""Windows whose cache and mask disagree: what a token sees depends on how a text is cut into passes.

transformers makes a cache with windows of any `sliding_window` in config.json. A model without windows (Llama) masks
only the future: within a prompt all earlier tokens are visible, and a later token sees the columns that the cache still
has. A window of 1 is the opposite: the mask of a prompt hides all but the token itself, and the cache drops nothing (it
keeps `[-window + 1:]`), so that a later token sees the whole text. genctl does the same as `generate()` in both cases.

Sparse attention with an indexer (DeepSeek) sees the `index_topk` tokens with the best scores. Scores below zero are cut
to zero, so many are equal, and which of them `topk` takes depends on the shape of its input.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

_NAMES = ("sliding_window", "attention_chunk_size")
# transformers' functions that make masks with windows
_MAKERS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate")


@dataclass(frozen=True)
class CutWindow:
    """A window whose results depend on where a text is cut."""

    name: str  # of its field in config.json
    size: int
    architecture: str
    stray: bool = False  # the architecture has no windows
    indexed: bool = False  # it is the number of tokens that an indexer chooses

    @property
    def bound(self) -> int:
        """The length up to which texts may be cut anywhere."""
        return 0 if self.size == 1 else self.size

    @property
    def note(self) -> str:
        """The note for users; "" if the window does not change texts."""
        if self.indexed:
            return ""
        if not self.stray:
            return (
                f"{self.name} = {self.size}: as in generate(), each token of a prompt sees itself alone, and each new "
                "token sees the whole text"
            )
        if self.size == 1:  # nothing is dropped, nothing is masked
            return ""
        return (
            f"{self.name} = {self.size} is in config.json, but {self.architecture} has no windows: as in generate(), "
            "the cache drops older tokens that the model would see; --cache off keeps them"
        )


def of_model(model: Any) -> CutWindow | None:
    """The cut window of a transformers model; None if there is none."""
    chosen = [module.index_topk for module in model.modules() if type(getattr(module, "index_topk", None)) is int]
    if chosen:
        return CutWindow("index_topk", min(chosen), str(model.config.model_type), indexed=True)
    return of_config(model.config, masked=_masks_windows(model))


def of_config(config: Any, *, masked: bool = True) -> CutWindow | None:
    """The cut window of a transformers config. `masked`: whether the model's code makes masks with windows."""
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds):
        return None
    for name in _NAMES:
        size = getattr(config, name, None)
        if type(size) is int and size > 0:
            stray = not masked or _is_stray(config, name)
            return CutWindow(name, size, str(config.model_type), stray) if stray or size == 1 else None
    return None


def _masks_windows(model: Any) -> bool:
    """Whether one of the files that a model's classes come from makes masks with windows, or is not transformers'."""
    files = {type(module).__module__ for module in model.modules() if ".modeling_" in type(module).__module__}
    return not all(file.startswith("transformers.") for file in files) or any(
        hasattr(sys.modules[file], maker) for file in files for maker in _MAKERS
    )


def _is_stray(config: Any, name: str) -> bool:
    """Whether a field comes from config.json alone: the architecture does not define it."""
    architecture = type(config)
    if hasattr(architecture, name):
        return False
    try:
        return not hasattr(architecture(), name)
    except Exception:  # third-party code
        return False
