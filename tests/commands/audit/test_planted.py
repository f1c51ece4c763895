"""Causes that scripts/make_traces.py plants in weights, caches, adapters, soft caps and chats are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import make_traces
from tests.commands.audit.test_audit import PROMPTS, audit, causes, ids_of, written

pytestmark = [
    pytest.mark.usefixtures("clean_environment"),
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
]

STORIES = make_traces.BUILTIN / "stories"
PLANTED = (
    "int8-weights", "int4", "int4-128", "nf4", "fp8", "cache-fp8", "cache-bfloat16", "adapter-missing",
    "adapter-doubled", "softcap-missing", "window-off-by-one", "system-lost", "no-generation-prompt",
    "special-as-text", "template-missing", "template-other",
)  # fmt: skip


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[make_traces.Rows, dict[str, Any]]]:
    engine = make_traces.Transformers(STORIES)
    same = [(ids_of(text),) * 2 for text in PROMPTS]

    def make(prompts: Any = same, engine: Any = engine) -> make_traces.Rows:
        return make_traces.rows(engine, prompts, 100, 0, each=25)

    folder: Path = tmp_path_factory.mktemp("planted")
    return {cause: (rows, asked) for _, cause, rows, asked in make_traces.planted(STORIES, folder, make)}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_named(cause: str, planted: Any, tmp_path: Path) -> None:
    rows, asked = planted[cause]
    words = [f"--{key}={value}" for key, value in asked.items() if key != "model"]
    done = audit(written(tmp_path, rows), *words, model=asked["model"])
    assert causes(done) == [cause], done.records[0]["reason"]
