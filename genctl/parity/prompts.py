"""The tokens of a trace's prompts and completions, and the prompts that an engine may have read in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from genctl.errors import GenctlError, InputError, ModelError, quote
from genctl.models import chat
from genctl.models.hub import LoadedModel
from genctl.models.text import check_ids, continuation, detokenizer, encode, encode_prompt
from genctl.parity.shapes import TraceRow
from genctl.parity.token_names import TokenNames
from genctl.parity.values import Text

Ids: TypeAlias = "tuple[int, ...]"
# Templates of well-known chats, for one turn
_TEMPLATES = {
    "ChatML": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "Llama 2": "[INST] {} [/INST]",
    "Alpaca": "### Instruction:\n{}\n\n### Response:\n",
    "Vicuna": "USER: {} ASSISTANT:",
    "Zephyr": "<|user|>\n{}</s>\n<|assistant|>\n",
    "User and Assistant": "User: {}\nAssistant:",
}


@dataclass(frozen=True)
class AuditRow:
    """A row in tokens. `tops` has the numbers of listed tokens before each, without the chosen one."""

    text: Text
    numbers: tuple[float, ...]  # NaN where there is none
    tops: tuple[Mapping[int, float], ...]
    trace: TraceRow

    @property
    def total(self) -> float:
        """A number for all of it; NaN where tokens have their own."""
        return self.trace.total


class AuditPrompts:
    """Reads rows with the tokenizer of the reference, and changes their prompts."""

    def __init__(self, loaded: LoadedModel, *, as_chat: bool, variables: Mapping[str, Any], bos: int | None) -> None:
        """`as_chat`: plain prompts are a user's message. `bos`: of the model, where the tokenizer names none."""
        self._loaded, self._as_chat, self._variables = loaded, as_chat, dict(variables)
        self._tokenizer: Any = loaded.tokenizer
        own = getattr(self._tokenizer, "bos_token_id", None)
        self._bos = bos if own is None else own
        self._names = None
        if self._tokenizer is not None:
            self._names = TokenNames(self._tokenizer, detokenizer(self._tokenizer).piece)
        self.dropped = 0  # listed tokens whose text several tokens have

    # -- as they should be ---------------------------------------------------------------------------------------------

    def row(self, row: TraceRow, name: str) -> AuditRow:
        """A row in tokens. Raises InputError or ModelError."""
        prompt, text = self._read(row), row.text or ""
        if row.total == row.total:  # a continuation with one number
            whole = encode_prompt(self._loaded, (row.prompt or "") + text)
            known = tuple(whole[len(prompt) :]) if tuple(whole[: len(prompt)]) == prompt else ()
            ids = known or tuple(continuation(self._tokenizer, text))
            nothing: Mapping[int, float] = {}
            return AuditRow(Text(row.id, prompt, ids, row.prompt or "", name), (float("nan"),) * len(ids),
                            (nothing,) * len(ids), row)  # fmt: skip
        if not row.pieces or all(piece.number != piece.number for piece in row.pieces):
            raise InputError("it has no log-probabilities: ask the engine for them")
        ids, way = self._ids(row)
        if (wrong := next((id for id in ids if id >= self._loaded.vocab_size), None)) is not None:
            raise InputError(f"a token has id {wrong}, but the model's ids are 0 to {self._loaded.vocab_size - 1}")
        tops: list[Mapping[int, float]] = []
        for id, piece in zip(ids, row.pieces, strict=True):
            found: dict[int, float] = {}
            for other, shown, value in piece.top:
                known_id = other if other is not None else id if shown == piece.text else self._id_of(way, shown)
                if known_id is None:
                    self.dropped += 1
                elif known_id != id and known_id < self._loaded.vocab_size:
                    found[known_id] = value
            tops.append(found)
        numbers = tuple(piece.number for piece in row.pieces)
        return AuditRow(Text(row.id, prompt, ids, row.prompt or "", name), numbers, tuple(tops), row)

    def _read(self, row: TraceRow) -> Ids:
        if row.prompt_ids is not None:
            check_ids(row.prompt_ids, self._loaded.vocab_size)
            if not row.prompt_ids:
                raise InputError("its prompt has no token")
            return row.prompt_ids
        if (messages := self._messages(row)) is not None:
            return self._rendered(messages)
        if row.prompt is None:
            raise InputError("it does not say what was read: --prompts FILE has the prompts")
        return tuple(encode_prompt(self._loaded, row.prompt))

    def _messages(self, row: TraceRow) -> list[dict[str, Any]] | None:
        if row.messages is not None:
            return list(row.messages)
        is_chat = self._as_chat or row.is_chat
        return [{"role": "user", "content": row.prompt}] if is_chat and row.prompt is not None else None

    def _rendered(self, messages: list[dict[str, Any]], **variables: Any) -> Ids:
        if self._tokenizer is None:
            raise ModelError(f"{self._loaded.name} has no tokenizer: give prompt_ids instead of text")
        text = chat.render_chat_text(
            self._tokenizer, messages, name=self._loaded.name, variables={**self._variables, **variables}
        )
        return tuple(encode(self._tokenizer, text, add_special_tokens=False))

    def _id_of(self, way: int, text: str | None) -> int | None:
        return None if text is None or self._names is None else self._names.id_of(way, text)

    def _ids(self, row: TraceRow) -> tuple[Ids, int]:
        """The ids of pieces, and the way in which their texts are written."""
        given = [piece.id for piece in row.pieces]
        if self._names is None:
            if any(id is None for id in given):
                raise ModelError(f"{self._loaded.name} has no tokenizer, and the row has no token ids")
            return tuple(id for id in given if id is not None), 0
        texts, known = [piece.text or "" for piece in row.pieces], tuple(id for id in given if id is not None)
        if len(known) == len(given):
            return known, self._names.way_of(known, texts)[0]
        ways = range(len(self._names.ways))
        mapped = [[self._names.id_of(way, text) for text in texts] for way in ways]
        way = min(ways, key=lambda way: sum(id is None for id in mapped[way]))
        found = [own if own is not None else id for own, id in zip(given, mapped[way], strict=True)]
        if None in found:
            whole: list[int] = []
            with suppress(GenctlError):
                whole = continuation(self._tokenizer, row.text if row.text else "".join(texts))
            fits = len(whole) == len(found) and all(id in (None, other) for id, other in zip(found, whole, strict=True))
            if not fits:
                place = found.index(None)
                raise InputError(
                    f"token {place + 1} is written {quote(texts[place])}, which is the text of several tokens or none",
                    hint="ask for token ids (vLLM: return_token_ids; llama-server: return_tokens)",
                )
            found = list(whole)
        return tuple(id for id in found if id is not None), way

    # -- as an engine may have read them -------------------------------------------------------------------------------

    def changes(self, rows: Sequence[AuditRow]) -> Iterator[tuple[str, str, list[Ids]]]:
        """Key and parameter of a cause, and the prompts of all rows with it; those that change none are left out."""
        seen = {tuple(row.text.prompt_ids for row in rows)}
        for key, parameter, change in self._kinds():
            prompts = []
            for row in rows:
                changed: Ids | None = None
                with suppress(GenctlError):
                    changed = change(row)
                prompts.append(changed or row.text.prompt_ids)
            if tuple(prompts) not in seen:
                seen.add(tuple(prompts))
                yield key, parameter, prompts

    def _kinds(self) -> Iterator[tuple[str, str, Any]]:
        bos = self._bos
        if bos is not None:
            yield "bos-missing", "", lambda row: row.text.prompt_ids[1:] if self._begins(row) else None
            yield "bos-doubled", "", lambda row: (bos, *row.text.prompt_ids) if self._begins(row) else None
            yield "bos-added", "", lambda row: None if self._begins(row) else (bos, *row.text.prompt_ids)
        if self._tokenizer is None:
            return
        if (eos := getattr(self._tokenizer, "eos_token_id", None)) is not None:
            yield "eos-appended", "", lambda row: (*row.text.prompt_ids, eos)
        yield "no-generation-prompt", "", self._without_generation_prompt
        yield "template-missing", "", self._bare
        yield "system-lost", "", self._without_system
        for name, form in _TEMPLATES.items():
            yield "template-other", name, lambda row, form=form: self._bare(row, form)
        yield "template-added", "", self._templated
        yield "special-as-text", "", self._special_as_text
        yield "spaces", "trimmed", lambda row: self._with_text(row, str.strip)
        yield "spaces", "trimmed at the end", lambda row: self._with_text(row, str.rstrip)
        yield "spaces", "put before the prompt", lambda row: self._with_text(row, lambda text: " " + text)
        yield "spaces", "put behind the prompt", lambda row: self._with_text(row, lambda text: text + " ")

    def _begins(self, row: AuditRow) -> bool:
        return row.text.prompt_ids[0] == self._bos

    def _without_generation_prompt(self, row: AuditRow) -> Ids | None:
        messages = self._messages(row.trace)
        if messages is not None:
            return self._rendered(messages, add_generation_prompt=False)
        one = [{"role": "user", "content": "Hello"}]
        with_it, without = self._rendered(one), self._rendered(one, add_generation_prompt=False)
        end, ids = with_it[len(without) :], row.text.prompt_ids
        return ids[: -len(end)] if end and with_it[: len(without)] == without and ids[-len(end) :] == end else None

    def _bare(self, row: AuditRow, form: str = "{}") -> Ids | None:
        messages = self._messages(row.trace)
        if messages is None:
            return None
        contents = [one["content"] for one in messages if isinstance(one.get("content"), str)]
        text = form.replace("{}", "\n".join(contents) if form == "{}" else contents[-1])
        return tuple(encode_prompt(self._loaded, text))

    def _templated(self, row: AuditRow) -> Ids | None:
        if self._messages(row.trace) is not None or (text := self._text(row)) is None:
            return None
        return self._rendered([{"role": "user", "content": text}])

    def _without_system(self, row: AuditRow) -> Ids | None:
        messages = self._messages(row.trace) or []
        left = [one for one in messages if one.get("role") != "system"]
        return self._rendered(left) if left and len(left) < len(messages) else None

    def _special_as_text(self, row: AuditRow) -> Ids | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "encode_special_tokens"):
            return None
        ids = row.text.prompt_ids
        kept = 1 if self._begins(row) else 0
        text = self._tokenizer.decode(list(ids[kept:]))
        before = backend.encode_special_tokens
        try:
            backend.encode_special_tokens = True
            return (*ids[:kept], *backend.encode(text, add_special_tokens=False).ids)
        finally:
            backend.encode_special_tokens = before

    def _text(self, row: AuditRow) -> str | None:
        """The text of a plain prompt; None where its tokens are not those of any."""
        if row.trace.prompt is not None:
            return row.trace.prompt
        return None if self._names is None else self._names.text_of(row.text.prompt_ids)

    def _with_text(self, row: AuditRow, change: Any) -> Ids | None:
        messages = self._messages(row.trace)
        if messages is None:
            text = self._text(row)
            return None if text is None else tuple(encode_prompt(self._loaded, change(text)))
        content = [
            {**one, "content": change(one["content"])} if isinstance(one.get("content"), str) else one
            for one in messages
        ]
        return self._rendered(content)


def with_prompts(rows: Sequence[AuditRow], prompts: Sequence[Ids]) -> list[Text]:
    """The texts of rows behind other prompts."""
    return [replace(row.text, prompt_ids=prompt) for row, prompt in zip(rows, prompts, strict=True)]
