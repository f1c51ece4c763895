"""Trees of the built-in model, for tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from genctl.config.layers import Layer
from genctl.engines.session import Session
from genctl.params import Runtime
from genctl.tree.explorer import Explorer

PROMPT = "Once upon a time"


@cache
def stories() -> Session:
    return Session.load(Runtime(model="builtin:stories"))


def explorer(path: Path | None = None, *, session: Any = None, memory: int | None = None, **knobs: Any) -> Explorer:
    session = session or stories()
    ids = session.loaded.tokenizer(PROMPT)["input_ids"]
    layers = [Layer("flag", knobs, declared="command", typed=True)] if knobs else []
    made = Explorer.begin(session, PROMPT, ids, layers, seed=7, path=path)
    session.keep_texts(memory)
    return made
