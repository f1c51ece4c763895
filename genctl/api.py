"""The Python interface: `genctl.load(...)`, `genctl.generate(...)`, events and results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from genctl import events
from genctl.config.chat_settings import KNOBS as CHAT_KNOBS
from genctl.config.layers import Layer, resolve
from genctl.engines.protocol import Flow, Report, Request
from genctl.engines.session import Session
from genctl.errors import GenctlError, UsageError
from genctl.events.results import Collector, Result
from genctl.params import Runtime, knobs

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


class Model:
    """A loaded checkpoint. Created by `load`."""

    def __init__(self, session: Session, layers: Sequence[Layer]) -> None:
        self._session = session
        self._layers = list(layers)

    def __repr__(self) -> str:
        loaded = self._session.loaded
        return f"<genctl.Model {loaded.name}, {loaded.runtime}, on {self._session.forward.device}>"

    @property
    def session(self) -> Session:
        """The engine that computes."""
        return self._session

    @property
    def name(self) -> str:
        return self._session.loaded.name

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        return self._session.loaded.tokenizer

    @property
    def model(self) -> Any:
        """The model: `genctl.native`'s, or transformers' (with `runtime="transformers"`)."""
        return self._session.loaded.model

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        top_logprobs: int = 0,
        scores: bool = False,
        watch: str | Sequence[str] = (),
        **settings: Any,
    ) -> Iterator[events.Event]:
        """Decode and yield events as they happen: Began, Prefilled, Stepped …, Finished, for each prompt.

        A prompt is a text, a list of token ids, or a list of chat messages; several prompts are decoded together
        (`batch_size`). `watch` names tokens, each by its text or as "id:N", whose log-probability and rank are reported
        at every step (`Token.watched`). `settings` are the knobs of presets (`do_sample=True`, `max_new_tokens=40`,
        `seed=7` …).

        Raises
        ------
        PresetError
            If a setting is unknown, out of bounds or contradicts another: all mistakes at once.
        UsageError
            If `watch` names what is not one token of this checkpoint.
        """
        layers = [*self._layers, Layer("argument", settings, {key: f"argument {key}" for key in settings}, "command")]
        resolved = self._session.resolve(layers)
        seed = resolved.runtime.seed
        if seed is None:
            from genctl.io.rows import random_seed

            seed = random_seed()
        requests = self._requests(_several(prompts), resolved, seed)
        watched = self._session.watched([watch] if isinstance(watch, str) else watch)
        report = Report(top_logprobs, scores or top_logprobs > 0, watch=watched)
        width = self._session.width(resolved, 16)
        return self._session.stream(requests, report, Flow(width, ahead=2 * width if width > 1 else 0))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        top_logprobs: int = 0,
        scores: bool = False,
        watch: str | Sequence[str] = (),
        **settings: Any,
    ) -> list[Result]:
        """Decode and return one Result per prompt, in the order of the prompts. The arguments are those of `stream`.

        Raises GenctlError for the first prompt that could not be decoded, after all others are done.
        """
        collector = Collector()
        results: dict[str, Result] = {}
        for event in self.stream(prompts, top_logprobs=top_logprobs, scores=scores, watch=watch, **settings):
            result = collector.feed(event)
            if result is not None:
                results[result.lane] = result
        for place, result in results.items():
            if result.error is not None:
                which = f"prompt {int(place) + 1} of {len(results)}: " if len(results) > 1 else ""
                raise GenctlError(f"{which}{result.error.message}")
        return [results[str(place)] for place in range(len(results))]

    def _requests(self, prompts: Sequence[Prompt], resolved: Any, seed: int) -> Iterator[Request]:
        from genctl.io.rows import row_seed

        for place, prompt in zip(itertools.count(), prompts, strict=False):
            text, ids, messages = _kind(prompt)
            yield Request(str(place), resolved, row_seed(seed, str(place), place), text, ids, messages, place + 1)


def load(
    model: str = "builtin:stories",
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    allow_plugins: bool = False,
    preset: str | Sequence[str] = (),
    **settings: Any,
) -> Model:
    """Load a checkpoint: `builtin:NAME`, a local folder, a GGUF file, or a Hub id.

    `settings` are knobs for all generation with it, `dtype` and `device` among them; `preset` names presets beneath
    them. Raises ModelError with one line, PresetError for settings.
    """
    from genctl.config import presets

    names = [preset] if isinstance(preset, str) else list(preset)
    layers = [*presets.load(names), Layer("load", {"model": model, **settings}, {}, "user", typed=True)]
    runtime: Runtime = resolve(layers, tentative=True).runtime
    session = Session.load(
        runtime, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, allow_plugins=allow_plugins
    )
    return Model(session, layers)


def generate(
    prompts: Prompt | Sequence[Prompt], *, model: str = "builtin:stories", **settings: Any
) -> Iterator[events.Event]:
    """Load `model` and yield the events of decoding `prompts`; see `Model.stream`."""
    loading = {key: settings.pop(key) for key in list(settings) if key in knobs(Runtime) and key not in DECODING}
    return load(model, **loading).stream(prompts, **settings)


DECODING = frozenset(
    {"seed", "batch_size", "draft", "draft_corpus", "chat", "system", "processed_logprobs", *CHAT_KNOBS}
)


def _several(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if not items:
        raise UsageError("there is no prompt")
    if all(isinstance(item, int) for item in items) or all(isinstance(item, dict) for item in items):
        return [items]
    return items


def _kind(prompt: Any) -> tuple[str | None, tuple[int, ...] | None, tuple[dict[str, str], ...] | None]:
    if isinstance(prompt, str):
        return prompt, None, None
    items = tuple(prompt)
    if all(isinstance(item, int) for item in items):
        return None, items, None
    if all(isinstance(item, dict) for item in items):
        return None, None, items
    raise UsageError("a prompt is a text, a list of token ids, or a list of chat messages")
