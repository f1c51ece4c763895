"""Events of streams, as servers send them: those of an answer add up to it. Imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from genctl.documents.shapes import BadShape, value_of
from genctl.parity.shapes import Llama, Ollama, OpenAI, SGLang

_TEXTS = ("text", "content", "response")
_OBJECTS = ("logprobs", "message", "meta_info")
_LISTS = (
    "content", "tokens", "token_logprobs", "top_logprobs", "token_ids", "completion_probabilities", "probs", "logprobs",
    "output_token_logprobs", "output_top_logprobs",
)  # fmt: skip
_NUMBERS = ("logprobs", "completion_probabilities", "probs", "meta_info")


class Document(NamedTuple):
    """A JSON value of a file, or why there is none at its place."""

    where: str  # "line 3"
    value: Any
    error: str = ""


class _StreamedAnswer:
    """What the events of an answer add up to."""

    def __init__(self, where: str) -> None:
        self.where, self.error, self.closed = where, "", False
        self.whole: dict[str, Any] = {}
        self.parts: dict[int, dict[str, Any]] = {}  # its choices, of other servers itself
        self.open: set[int] = set()  # parts that have not ended

    def fail(self, error: str) -> None:
        """It cannot be read."""
        self.error = self.error or error

    def add(self, event: dict[str, Any]) -> None:
        """Add an event to those before."""
        self.whole |= {key: value for key, value in event.items() if value is not None}
        for place, part in _parts(event):
            own = self.parts.setdefault(place, {})
            _extend(own, part, repeats="meta_info" in part)
            ends = own.get("finish_reason") or _object(own, "meta_info").get("finish_reason")
            (self.open.discard if ends or True in (own.get("stop"), own.get("done")) else self.open.add)(place)

    def document(self) -> Document:
        """The whole answer."""
        for part in self.parts.values():
            for holder in (part, _object(part, "message")):
                for key in _TEXTS:
                    if isinstance(pieces := holder.get(key), list):
                        holder[key] = "".join(text for text in pieces if isinstance(text, str))
        parts = [part for _, part in sorted(self.parts.items())]
        whole = {**self.whole, "choices": parts} if "choices" in self.whole else parts[0] if parts else None
        return Document(self.where, whole, self.error)


def _parts(event: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    for part in event.get("choices", [event]):
        message = part.get("message") or part.get("delta")
        yield part.get("index") or 0 if "choices" in event else 0, {**part, "message": message, "delta": None}


def _object(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object within a part; empty where there is none."""
    return value if isinstance(value := part.get(key), dict) else {}


def _extend(whole: dict[str, Any], part: Mapping[str, Any], *, repeats: bool) -> None:
    """Add values to those before: texts as lists of parts. SGLang `repeats` what it wrote."""
    for key, value in part.items():
        before = whole.get(key)
        if isinstance(value, str) and key in _TEXTS:
            if repeats or not isinstance(before, list):
                whole[key] = before = []
            before.append(value)
        elif isinstance(value, list) and isinstance(before, list) and key in _LISTS:
            if value[: len(before)] == before and (repeats or len(before) > 1):
                whole[key] = value  # all of it once more
            else:
                before.extend(value)
        elif isinstance(value, dict) and key in _OBJECTS:
            whole[key] = before if isinstance(before, dict) else {}
            _extend(whole[key], value, repeats=repeats)
        elif value is not None:
            whole[key] = value


class Streams:
    """Answers whose events come one by one, those of several among each other; in the order in which they begin."""

    def __init__(self) -> None:
        self._begun: deque[_StreamedAnswer] = deque()
        self._answers: dict[str, _StreamedAnswer] = {}  # that may go on

    def take(self, where: str, event: Any) -> Iterator[Document]:
        """Take an event. Yields what is no part of an answer, and an answer where another one begins in its place."""
        kind = event.get("type") if isinstance(event, dict) else None
        if isinstance(kind, str) and kind.startswith("response."):  # OpenAI's last event of them has all
            if kind in ("response.completed", "response.incomplete"):
                yield Document(where, event.get("response"))
            return
        if (hint := hint_of(event)) is None:
            yield Document(where, event)
            return
        about = _object(event, "meta_info") or event
        key = f"{hint.__name__} {about.get('id')} {about.get('id_slot')}"
        if key not in self._answers and event.get("stop") is True and not event.get("completion_probabilities"):
            # llama-server names its slot in the last event alone
            begun = (name for name, one in self._answers.items() if one.open and name.startswith(hint.__name__))
            key = next(begun, key)
        try:
            event = value_of(hint, event)
        except BadShape as error:
            self.spoil(f"{where}: {error}", key if about.get("id") is not None else "")
            self._answer(key, where).fail(f"{where}: {error}")
            return
        answer = self._answer(key, where)
        has_numbers = any(part.get(name) for _, part in _parts(event) for name in _NUMBERS)
        if has_numbers and any(place in answer.parts and place not in answer.open for place, _ in _parts(event)):
            self._answers.pop(key).closed = True
            answer = self._answer(key, where)
        answer.add(event)
        yield from self._closed()

    def _answer(self, key: str, where: str) -> _StreamedAnswer:
        if key not in self._answers:
            self._answers[key] = _StreamedAnswer(where)
            self._begun.append(self._answers[key])
        return self._answers[key]

    def spoil(self, error: str, key: str = "") -> bool:
        """An event that cannot be read spoils its answer; if nobody knows which, all that are open."""
        spoiled = [one for name, one in self._answers.items() if name == key or (not key and one.open)]
        for one in spoiled:
            one.fail(error)
        return bool(spoiled)

    def has(self, value: Any) -> bool:
        """Whether a value that nobody calls an event is one."""
        if (hint := hint_of(value)) is None:
            return False
        ends = value.get("stop", value.get("done"))
        is_last = ends is True and not value.get("completion_probabilities")
        is_last = is_last and any(one.open for key, one in self._answers.items() if key.startswith(hint.__name__))
        return ends is False or is_last or str(value.get("object", "")).endswith(".chunk")

    def end(self, *, all: bool = True) -> Iterator[Document]:
        """The answers; unless `all`, those that have ended, or the only one."""
        ended = [key for key, one in self._answers.items() if all or not one.open]
        for key in ended or [*self._answers][: len(self._answers) == 1]:
            self._answers.pop(key).closed = True
        yield from self._closed()

    def _closed(self) -> Iterator[Document]:
        while self._begun and self._begun[0].closed:
            yield self._begun.popleft().document()


def hint_of(event: Any) -> Any:
    """The shape of an event of a stream; None if it is none."""
    keys = event.keys() if isinstance(event, dict) else ()
    hints = {OpenAI: ("choices",), SGLang: ("meta_info",), Llama: ("stop", "content"), Ollama: ("done",)}
    return next((hint for hint, names in hints.items() if all(name in keys for name in names)), None)
