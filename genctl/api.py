"""The Python interface: `genctl.load(...)`, `genctl.generate(...)`, events and results."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from warnings import warn

from genctl import events
from genctl.config.conflicts import CHAT_KNOBS
from genctl.config.layers import Layer, Resolved, overlay, resolve, row_layer
from genctl.engines.protocol import Flow, Report, Request
from genctl.engines.session import Session
from genctl.errors import GenctlError, UsageError
from genctl.events.history import GrowingText
from genctl.events.results import Collector, Result
from genctl.params import Runtime, knobs

if TYPE_CHECKING:
    from genctl.io.rows import InputRow

# a text, token ids, the messages of a conversation, or a row with one of the three (`{"prompt": "…", "params": {…}}`)
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


class Model:
    """A loaded checkpoint, returned by `load`. `generate` returns results, `stream` yields events and texts."""

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

        The `text` of an event is its addition to the first text of its lane (its prompt), "" for most kinds:
        `for piece in model.stream("Once"): print(piece.text, end="")` prints the text while it grows. A search adds
        only text that it can no longer change.

        A prompt is a text, a list of token ids, a list of chat messages, or a row as in `--input`: a dict with
        `prompt`, `prompt_ids` or `messages`, and optionally `id` (the name of its lane) and `params`. Several prompts
        are decoded together (`batch_size`). `settings` are those of presets (`do_sample=True`, `max_new_tokens=40` …).
        `top_logprobs` adds K alternatives to each token, `scores` its rank and entropy. `watch` names tokens, by their
        text or as "id:N": their log-probability and rank are added to every step (`Token.watched`).

        Raises
        ------
        PresetError
            If settings are unknown, out of bounds or contradictory: all mistakes at once.
        UsageError
            If an item of `watch` is not a single token of this checkpoint, or a prompt is invalid.
        """
        return _with_texts(self._stream(_rows(prompts), top_logprobs, watch, settings, scores=scores))

    def _stream(
        self,
        rows: Sequence[InputRow],
        top_logprobs: int,
        watch: str | Sequence[str],
        settings: dict[str, Any],
        *,
        scores: bool,
    ) -> Iterator[events.Event]:
        layers = [*self._layers, Layer("argument", settings, {key: f"argument {key}" for key in settings}, "command")]
        resolved = self._session.resolve(layers)
        seed = resolved.runtime.seed
        if seed is None:
            from genctl.io.rows import random_seed

            seed = random_seed()
        requests = [_request(row, resolved, seed) for row in rows]
        watched = self._session.watched([watch] if isinstance(watch, str) else watch)
        report = Report(top_logprobs, scores or top_logprobs > 0, watch=watched)
        width = self._session.width(resolved, 16)
        stream = self._session.stream(iter(requests), report, Flow(width, ahead=2 * width if width > 1 else 0))
        return _with_columns(stream, {row.id: row.columns for row in rows if row.columns})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        top_logprobs: int = 0,
        scores: bool = False,
        watch: str | Sequence[str] = (),
        **settings: Any,
    ) -> list[Result]:
        """Decode and return one Result per prompt, in their order. The arguments are those of `stream`.

        Raises GenctlError for the first prompt that fails, after all others are done.
        """
        collector = Collector()
        results: dict[str, Result] = {}
        rows = _rows(prompts)
        for event in self._stream(rows, top_logprobs, watch, settings, scores=scores):
            result = collector.feed(event)
            if result is not None:
                results[result.lane] = result
        for row in rows:
            if (error := results[row.id].error) is not None:
                raise GenctlError(f"{row.where} of {len(rows)}: {error.message}" if len(rows) > 1 else error.message)
        return [results[row.id] for row in rows]


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

    `settings` apply to loading (`dtype`, `device` …) and to everything generated with the model. `preset` names
    presets, which `settings` override. Raises ModelError or PresetError.
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


def _request(row: InputRow, resolved: Resolved, start: int) -> Request:
    """The request of a row with its own settings; `start` is the seed of the run. Raises PresetError."""
    from genctl.io.rows import row_seed

    own = {**row.params, **{key: value for key, value in row.extra.items() if key != "reference"}}
    settings = overlay(resolved, row_layer(own, row.where)) if own else resolved
    seed = settings.runtime.seed if "seed" in row.params else None
    seed = row_seed(start, row.id, row.index) if seed is None else seed
    return Request(row.id, settings, seed, row.prompt, row.prompt_ids, row.messages, row.place, row.index)


def _with_texts(stream: Iterator[events.Event]) -> Iterator[events.Event]:
    """The same events, each with its addition to the first text of its lane."""
    lanes: dict[str, GrowingText] = {}
    for event in stream:
        if isinstance(event, events.Began):
            lanes[event.lane] = GrowingText(event.lane)
        if isinstance(event, (events.Began, events.Stepped, events.Finished)):
            text = lanes[event.lane].feed(event)
            if text and not isinstance(event, events.Began):
                event = replace(event, text=text)
        if isinstance(event, (events.Finished, events.Failed)):
            lanes.pop(event.lane, None)
        yield event


def _with_columns(
    stream: Generator[events.Event, None, None], columns: Mapping[str, dict[str, Any]]
) -> Iterator[events.Event]:
    with closing(stream):
        for event in stream:
            if isinstance(event, events.Began) and event.lane in columns:
                event = replace(event, input=columns[event.lane])
            yield event


def _rows(prompts: Any) -> list[InputRow]:
    """A row for each prompt. Raises UsageError for an invalid prompt, naming its place."""
    from genctl.io import jsonl
    from genctl.io.readers import Remarks
    from genctl.io.rows import InputRow, RefusedRow

    ids = jsonl.UsedIds()
    remarks = Remarks(lambda line: warn(line.removeprefix("warning: "), stacklevel=5))
    rows = []
    for index, prompt in enumerate(_several(prompts)):
        where = f"prompt {index + 1}"
        try:
            own, columns = jsonl.ROW.split(_own(prompt), None)
            remarks.columns(columns, jsonl.ROW, where, ())
            id = jsonl.row_id(own)
            ids.claim(id, index, "prompt")
            fields = jsonl.ROW.fields(own, columns) if isinstance(prompt, Mapping) else own
            name = str(index) if id is None else id
            rows.append(InputRow(name, index, columns=columns, where=where, own_id=id is not None, **fields))
        except RefusedRow as error:
            raise UsageError(f"{where}: {error}") from None
    return rows


def _several(prompts: Any) -> list[Any]:
    """The prompts as a list; a single prompt becomes a list of one. Raises UsageError."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise UsageError(f"{PROMPT}, or several of them; got {type(prompts).__name__}")
    items = list(prompts)
    if not items:
        raise UsageError("there is no prompt")
    return [items] if _are_ids(items) or all(map(_is_message, items)) else items


def _own(prompt: Any) -> dict[str, Any]:
    """A prompt as the keys of a row. Raises RefusedRow."""
    from genctl.io.rows import RefusedRow

    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping) and not _is_message(prompt):
        return {key: list(value) if isinstance(value, tuple) else value for key, value in prompt.items()}
    items = tuple(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)) else (None,)
    if items and all(map(_is_message, items)):
        return {"messages": items}
    if _are_ids(items):
        return {"prompt_ids": items}
    raise RefusedRow(f"{PROMPT}; got {type(prompt).__name__}")


PROMPT = 'a prompt is a text, a list of token ids, a list of chat messages, or a row such as {"prompt": "Hi"}'


def _are_ids(items: Sequence[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and "role" in item and item.keys().isdisjoint(("prompt", "prompt_ids", "messages"))
