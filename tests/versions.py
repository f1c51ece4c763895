"""What tests need to know about versions of torch and transformers (`scripts/test --oldest` installs older ones)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from genctl import compat

NEWEST = compat.TESTED_TRANSFORMERS[-1]
OLDER = compat.older_transformers()  # than the first that needs no corrections
# the argument by which models, attention and `generate()` take a cache, where tests call them directly
CACHE = compat.cache_argument(
    GenerationMixin.prepare_inputs_for_generation, GenerationMixin.prepare_inputs_for_generation
)
OLDER_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def needs_newest(why: str) -> pytest.MarkDecorator:
    """Skip a test on older versions, which give another result: `why` says what they do instead."""
    return pytest.mark.skipif(OLDER, reason=f"needs transformers {compat.CORRECTED}: older versions {why}")


def corrected(config: Any) -> Any:
    """A transformers config with genctl's corrections. Raises ModelError as genctl does."""
    compat.correct_config(config.model_type, config)
    return config


def cache_of(output: Any) -> Any:
    """The cache that a model returned. Newer versions warn at the old attribute name; older ones lack the new one."""
    return compat.returned_cache(output)


def as_loaded(model: Any) -> Any:
    """The model, with the attention implementation that genctl loads it with."""
    for name in compat.attention_for(model.config).values():
        for part in model.modules():  # an encoder and a decoder have configs of their own
            if hasattr(part, "config"):
                part.config._attn_implementation = name
    return model
