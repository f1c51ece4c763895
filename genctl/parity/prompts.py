"""The tokens of a trace's prompts and completions, and the prompts that an engine may have read in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from genctl.config.conflicts import check_is_chat, variables_of
from genctl.config.layers import Resolved, overlay, row_layer
from genctl.config.shapes import BadShape
from genctl.errors import GenctlError, InputError, ModelError, count, quote
from genctl.models import chat
from genctl.models.hub import LoadedModel
from genctl.models.text import continuation, decode, detokenizer, encode, encode_prompt
from genctl.params import Runtime
from genctl.parity.causes import Impossible
from genctl.parity.trace_rows import TracePiece, TraceRow, with_ids
from genctl.parity.values import Text

Ids: TypeAlias = "tuple[int, ...]"
# Well-known chat templates, for one turn
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
    """A row as tokens. `tops` has the numbers of listed tokens at each position, without the chosen one."""

    text: Text
    numbers: tuple[float, ...]  # NaN where there is none
    tops: tuple[Mapping[int, float], ...]
    trace: TraceRow


class TokenNames:
    """How servers spell a token: as in the text, decoded alone, or as in the vocabulary."""

    def __init__(self, tokenizer: Any, piece: Callable[[int], str]) -> None:
        """`tokenizer` is a transformers tokenizer; `piece` returns the text of a token within a text."""
        self._tokenizer = tokenizer
        self.ways = (piece, self._alone, self._raw)
        self._ids: dict[int, dict[str, int | None]] = {}

    def _alone(self, id: int) -> str:
        return str(self._tokenizer.decode([id], clean_up_tokenization_spaces=False))

    def _raw(self, id: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(id))

    def way_of(self, ids: Sequence[int], texts: Iterable[str]) -> int:
        """The spelling that most tokens have. Parts of a character are spelled in many ways, and do not count."""
        pairs = [(id, text) for id, text in zip(ids, texts, strict=False) if "\ufffd" not in text]
        return max(range(len(self.ways)), key=lambda way: sum(self.ways[way](id) == text for id, text in pairs))

    def text_of(self, ids: Sequence[int]) -> str | None:
        """The text that tokenises to these ids; None if there is none."""
        text = str(self._tokenizer.decode([*ids], skip_special_tokens=True))
        return text if text and [*self._tokenizer(text)["input_ids"]] == [*ids] else None

    def id_of(self, way: int, text: str) -> int | None:
        """The only token with this text; None if there are several, or none."""
        if way not in self._ids:
            found: dict[str, int | None] = {}
            for id in sorted(self._tokenizer.get_vocab().values()):
                name = self.ways[way](id)
                found[name] = None if name in found else id
            self._ids[way] = found
        return None if "\ufffd" in text else self._ids[way].get(text)

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that servers may leave out at the end."""
        return frozenset(self._tokenizer.all_special_ids)


class AuditPrompts:
    """Tokenises rows with the reference's tokenizer, and changes their prompts."""

    def __init__(self, loaded: LoadedModel, resolved: Resolved, *, bos: int | None) -> None:
        """`resolved`: how chats are rendered. `bos`: the model's, if the tokenizer has none."""
        self._loaded, self._resolved = loaded, resolved
        self._tokenizer: Any = loaded.tokenizer
        own = getattr(self._tokenizer, "bos_token_id", None)
        self._bos = bos if own is None else own
        self._names = None
        if self._tokenizer is not None:
            self._names = TokenNames(self._tokenizer, detokenizer(self._tokenizer).piece)
        self.dropped = 0  # listed tokens whose text belongs to several tokens or none
        self.impossible = Impossible(loaded.vocab_size)

    # -- as they should be ---------------------------------------------------------------------------------------------

    def row(self, row: TraceRow) -> AuditRow | None:
        """A row as tokens; None if the reference can read none of it. Raises InputError or ModelError."""
        name, prompt = row.name, self._read(row)
        if self.impossible.known(name, None, prompt) < len(prompt):
            return None
        if all(piece.number is None for piece in row.pieces):
            raise InputError("it has no log-probabilities: ask the engine for them")
        pieces, ids, way = self._tokens(row)
        ids = ids[: self.impossible.known(name, 0, ids)]
        numbers, tops = [], list[Mapping[int, float]]()
        for index, (id, piece) in enumerate(zip(ids, pieces, strict=False)):
            found: dict[int, float] = {}
            for other, shown, value, _ in piece.top:
                known_id = other if other is not None else id if shown == piece.text else self._id_of(way, shown)
                if known_id is None:
                    self.dropped += 1
                elif self.impossible.known(name, index, (known_id,)) and value is not None:
                    found[known_id] = value
            number = self.impossible.number(name, index, piece.number, unlisted=bool(piece.top) and id not in found)
            listed = self.impossible.listed(name, index, {id: number, **found} if number == number else found)
            tops.append({other: value for other, value in listed.items() if other != id})
            numbers.append(number)
        if all(number != number for number in numbers) and not any(tops):
            return None
        return AuditRow(Text(name, prompt, ids, row.prompt or ""), tuple(numbers), tuple(tops), row)

    def _read(self, row: TraceRow) -> Ids:
        if row.prompt_ids is not None:
            if not row.prompt_ids:
                raise InputError("its prompt has no token")
            return row.prompt_ids
        if (messages := self._messages(row)) is not None:
            return self._rendered(row, messages)
        if row.prompt is None:
            raise InputError("it does not say what was read: --prompts FILE has the prompts")
        check_is_chat(self._resolved.runtime)
        given = tuple(encode_prompt(self._loaded, row.prompt))
        once = given  # servers and trainers log a prompt with the BOS that was read
        while len(once) > 1 and once[0] == once[1] == self._bos:
            once = once[1:]
        if not row.prompt_tokens:
            return once
        ways = (given, once, tuple(encode(self._tokenizer, row.prompt, add_special_tokens=False)))
        for ids in ways if row.is_exact else (once,):
            if abs(len(ids) - row.prompt_tokens) <= (not row.is_exact):  # an engine may leave BOS out, or double it
                return ids
        counted = count(row.prompt_tokens, "token")
        raise InputError(
            f"which tokens were read is not known: {counted}, and its prompt is the text of {len(once)}",
            hint="records that genctl writes now have prompt_ids; --prompts FILE has the prompts of others",
        )

    def _runtime(self, row: TraceRow) -> Runtime:
        """The chat template settings for a row. Raises PresetError."""
        return overlay(self._resolved, row_layer(row.settings, f"row {row.name}")).runtime

    def _messages(self, row: TraceRow) -> list[dict[str, Any]] | None:
        """The conversation of a row; None if the prompt is plain. Raises InputError and PresetError."""
        runtime = self._runtime(row) if row.messages is not None or row.settings else self._resolved.runtime
        messages = None if row.messages is None else list(row.messages)
        if messages is None and row.prompt is not None and (row.is_chat or runtime.is_chat):
            messages = [{"role": "user", "content": row.prompt}]
        return None if messages is None else chat.check_messages(messages, runtime.system)

    def _rendered(self, row: TraceRow, messages: list[dict[str, Any]], **variables: Any) -> Ids:
        if self._tokenizer is None:
            raise ModelError(f"{self._loaded.name} has no tokenizer: give prompt_ids instead of text")
        runtime = self._runtime(row)
        text = chat.render_chat_text(
            self._tokenizer,
            messages,
            name=self._loaded.name,
            variables={**variables_of(runtime), **variables},
            template=runtime.chat_template,
        )
        return tuple(encode(self._tokenizer, text, add_special_tokens=False))

    def _id_of(self, way: int, text: str | None) -> int | None:
        return None if text is None or self._names is None else self._names.id_of(way, text)

    def _tokens(self, row: TraceRow) -> tuple[Sequence[TracePiece], Ids, int]:
        """All tokens, their ids, and the spelling of their texts. Raises InputError."""
        ids, way = self._ids(row)
        text = row.text or ""
        if self._names is None or not text:
            return row.pieces, ids, way
        written = decode(self._tokenizer, (id for id in ids if id < self._loaded.vocab_size)).rstrip("\ufffd")
        if written.count("\ufffd") <= text.count("\ufffd"):
            return row.pieces, ids, way
        # the list leaves out tokens that end within a character
        special = [id for id in ids if id in self._names.special]
        pieces = [piece._replace(id=id) for piece, id in zip(row.pieces, ids, strict=True)]
        try:
            pieces = [*with_ids(pieces, [*continuation(self._tokenizer, text), *special], "")]
        except BadShape:
            raise InputError(
                "tokens that end within a character are left out of its list, and its text does not say which",
                hint="ask for the ids of all tokens (llama-server: return_tokens)",
            ) from None
        return pieces, tuple(piece.id for piece in pieces if piece.id is not None), way

    def _ids(self, row: TraceRow) -> tuple[Ids, int]:
        """The ids of pieces, and the spelling of their texts."""
        given = [piece.id for piece in row.pieces]
        known = tuple(id for id in given if id is not None)
        if self._names is None:
            if len(known) < len(given):
                raise ModelError(f"{self._loaded.name} has no tokenizer, and the row has no token ids")
            return known, 0
        texts = [piece.text or "" for piece in row.pieces]
        if len(known) == len(given):
            in_vocabulary = all(id < self._loaded.vocab_size for id in known)
            return known, self._names.way_of(known, texts) if in_vocabulary else 0
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
        """Key and parameter of each cause, and the prompts of all rows with it; causes without effect are left out."""
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
            return self._rendered(row.trace, messages, add_generation_prompt=False)
        one = [{"role": "user", "content": "Hello"}]
        with_it, without = (self._rendered(row.trace, one, **how) for how in ({}, {"add_generation_prompt": False}))
        end, ids = with_it[len(without) :], row.text.prompt_ids
        return ids[: -len(end)] if end and with_it[: len(without)] == without and ids[-len(end) :] == end else None

    def _bare(self, row: AuditRow, form: str = "{}") -> Ids | None:
        messages = self._messages(row.trace)
        if messages is None:
            return None
        contents = [one["content"] for one in messages if isinstance(one.get("content"), str)]
        if not contents:
            return None
        text = form.replace("{}", "\n".join(contents) if form == "{}" else contents[-1])
        return tuple(encode_prompt(self._loaded, text))

    def _templated(self, row: AuditRow) -> Ids | None:
        if self._messages(row.trace) is not None or (text := self._text(row)) is None:
            return None
        return self._rendered(row.trace, [{"role": "user", "content": text}])

    def _without_system(self, row: AuditRow) -> Ids | None:
        messages = self._messages(row.trace) or []
        left = [one for one in messages if one.get("role") != "system"]
        return self._rendered(row.trace, left) if left and len(left) < len(messages) else None

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
        """The text of a plain prompt; None if no text has these tokens."""
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
        return self._rendered(row.trace, content)


def with_prompts(rows: Sequence[AuditRow], prompts: Sequence[Ids]) -> list[Text]:
    """The texts of rows with other prompts."""
    return [replace(row.text, prompt_ids=prompt) for row, prompt in zip(rows, prompts, strict=True)]
