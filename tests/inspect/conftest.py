from __future__ import annotations

from tests.cli.conftest import clean_environment, gpt2, t5

__all__ = ["clean_environment", "gpt2", "t5"]
