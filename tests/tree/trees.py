"""Trees of the built-in model, for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from genctl.config.layers import Layer
from genctl.engines.session import Session
from genctl.io.output import open_beside
from genctl.params import Runtime
from genctl.tree import saved
from genctl.tree.explorer import Explorer
from genctl.tree.token_tree import TokenTree

PROMPT = "Once upon a time"


@cache
def stories() -> Session:
    return Session.load(Runtime(model="builtin:stories"))


def explorer(path: Path | None = None, *, session: Any = None, memory: int | None = None, **knobs: Any) -> Explorer:
    session = session or stories()
    ids = session.loaded.tokenizer(PROMPT)["input_ids"]
    layers = [Layer("flag", knobs, declared="command", typed=True)] if knobs else []
    made = Explorer.begin(session, PROMPT, ids, layers, seed=7)
    session.keep_texts(memory)
    if path is not None:
        made.save(open_beside(path))
    return made


def reopened(path: Path, note: Callable[[str], object] = print) -> Explorer:
    return Explorer(stories(), *saved.reopen(path, note))


def read_tree(path: Path) -> TokenTree:
    """The tree in a file that may be open."""
    with path.open("rb") as file:
        return saved.tree_of_lines(file, "the tree", [])
