"""transformers' reader of GGUF files: which tensors it reads, and its progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from genctl.errors import ModelError


def reads(model: Any, architecture: str) -> Callable[[str], bool] | None:
    """Whether a tensor of a GGUF file goes into `model`, by its name; None if transformers reports those left out."""
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        if is_gguf_arch_supported(architecture):
            return None
    except ImportError:  # an older transformers has only the other reader
        pass
    try:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )
    except ImportError as error:
        raise ModelError(f"this transformers does not say which tensors of a GGUF file it reads: {error}") from error
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    names = {*get_gguf_hf_weights_map(model, processor)}

    def goes_in(name: str) -> bool:
        # stacked experts have no suffix in the map; GPT-2's head is read under its own name
        return (
            name in names or name.removesuffix(".weight") in names or (architecture, name) == ("gpt2", "output.weight")
        )

    return goes_in


@contextmanager
def progress_bar(bar: Callable[..., Any]) -> Iterator[None]:
    """Replace the progress bar of transformers' reader of GGUF files, which has no setting."""
    try:
        from transformers import modeling_gguf_pytorch_utils as reader
    except ImportError:
        yield
        return
    before = getattr(reader, "tqdm", None)
    reader.tqdm = bar  # type: ignore[attr-defined, unused-ignore]
    try:
        yield
    finally:
        reader.tqdm = before  # type: ignore[attr-defined, unused-ignore]
