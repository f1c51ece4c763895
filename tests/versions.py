"""What tests need to know about older versions of torch and transformers (`scripts/test --oldest` installs those)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genctl import compat

NEWEST = compat.TESTED_TRANSFORMERS[-1]
OLDER = compat.older_transformers()
OLDER_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def needs_newest(why: str) -> pytest.MarkDecorator:
    """Skip a test whose expectation older versions cannot give: `why` says what they do instead."""
    return pytest.mark.skipif(OLDER, reason=f"needs transformers {NEWEST}: older versions {why}")


def corrected(config: Any) -> Any:
    """A config of transformers, with what genctl corrects in it. Raises ModelError as genctl does."""
    compat.correct_config(config.model_type, config)
    return config


def as_loaded(model: Any) -> Any:
    """The model, with the attention with which genctl loads it."""
    for name in compat.attention_for(model.config).values():
        for part in model.modules():  # an encoder and a decoder have configs of their own
            if hasattr(part, "config"):
                part.config._attn_implementation = name
    return model
