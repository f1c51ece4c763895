"""Silence loggers, warnings and progress bars of libraries; progress arrives as events instead."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from genctl.events import Loading

OnEvent: TypeAlias = Callable[[Loading], None]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the loggers and warnings of transformers and huggingface_hub, and restore them after."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub", "accelerate")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    # transformers sets its level as it is imported, which may happen within; none of its records is above CRITICAL
    verbosity = os.environ.get("TRANSFORMERS_VERBOSITY")
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if verbosity is None:
            os.environ.pop("TRANSFORMERS_VERBOSITY", None)
        else:
            os.environ["TRANSFORMERS_VERBOSITY"] = verbosity
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def download_bar(on_event: OnEvent | None, what: str) -> Any:
    """A tqdm class that shows nothing and reports to `on_event`."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]  # it has no types

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no monitor thread

        def __init__(self, *args: Any, **keywords: Any) -> None:
            keywords.pop("name", None)
            keywords.update(file=io.StringIO(), disable=False)
            super().__init__(*args, **keywords)

        def display(self, *args: Any, **keywords: Any) -> None:
            counts_files = self.unit != "B"
            on_the_wire = str(self.desc).startswith("Downloading bytes")  # a second bar for the same bytes
            if on_event is not None and self.total and not counts_files and not on_the_wire:
                on_event(Loading(what, int(self.n), int(self.total), "B"))

    return Bar


@contextmanager
def weights_bar(on_event: OnEvent | None, what: str) -> Iterator[None]:
    """Route transformers' progress bars for weights to `on_event`."""
    from transformers.utils import logging as hf

    def hook(factory: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> _Bar:
        return _Bar(args[0] if args else keywords.get("iterable", ()), on_event, what)

    before = hf.set_tqdm_hook(hook)
    try:
        with gguf_bar(lambda items, **keywords: _Bar(items, on_event, what)):
            yield
    finally:
        hf.set_tqdm_hook(before)


@contextmanager
def gguf_bar(bar: Callable[..., Any]) -> Iterator[None]:
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


class _Bar:
    """A stand-in for a tqdm bar: it iterates and reports; everything else does nothing."""

    def __init__(self, items: Any, on_event: OnEvent | None, what: str) -> None:
        self.items, self.on_event, self.what = items, on_event, what
        self.total = len(items) if hasattr(items, "__len__") else 0

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self.items, 1):
            yield item
            if self.on_event is not None and self.total:
                self.on_event(Loading(self.what, done, self.total, "tensors"))

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **keywords: None
