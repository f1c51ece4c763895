"""A model built without numbers, by torch's compiled parts alone.

transformers builds a model on the meta device before it reads the weights. torch answers for that device in Python, and
brings in sympy for it, which takes longer than everything else about a small model. Here only the large parameters are
without numbers, as they are made; what a model computes from its config (a rotary table) is computed on the CPU, as it
would be without a checkpoint. transformers makes such tables anew once the weights are there, in both cases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


def saves() -> bool:
    """Whether `built` would save something: what it avoids is not imported yet."""
    return "sympy" not in sys.modules


@contextmanager
def built() -> Iterator[None]:
    """Within, `from_pretrained` builds models so. Imports transformers."""
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import PreTrainedModel

    class Empty(TorchFunctionMode):
        """torch.empty, which makes every large parameter, makes it without numbers."""

        def __torch_function__(
            self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
        ) -> Any:
            keywords = keywords or {}
            if function is torch.empty and keywords.get("device") is None:
                keywords = {**keywords, "device": "meta"}
            return function(*arguments, **keywords)

    original = PreTrainedModel.__dict__["get_init_context"]

    def contexts(cls: type, *arguments: Any, **keywords: Any) -> list[AbstractContextManager[Any]]:
        made = []
        for context in original.__func__(cls, *arguments, **keywords):
            if context == torch.device("meta"):
                made += [no_init_weights(), Empty()]
            else:
                made.append(context)
        return made

    try:
        PreTrainedModel.get_init_context = classmethod(contexts)
        yield
    finally:
        PreTrainedModel.get_init_context = original
