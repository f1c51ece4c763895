"""The prompts of requests as token ids: tokenised, truncated, and healed at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.config import conflicts
from genctl.engines.protocol import trained_length_note
from genctl.errors import InputError, ModelError, UsageError, count
from genctl.params import DEFAULT_NEW_TOKENS, Generation, Runtime

if TYPE_CHECKING:
    from genctl.config.layers import Resolved
    from genctl.engines.protocol import Request
    from genctl.models.hub import LoadedModel


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids."""

    ids: tuple[int, ...]
    text: str  # as recorded
    shown: str = ""  # the messages, for a conversation
    note: str = ""  # a remark for the user
    spelled: tuple[int, ...] | None = None  # the ids of `text`, if the prompt was given as plain text


class PromptReader:
    """Reads prompts with one checkpoint's tokenizer and chat template."""

    def __init__(self, loaded: LoadedModel, runtime: Runtime, context: int | None, trained: int | None) -> None:
        self.loaded, self.runtime, self.context, self.trained = loaded, runtime, context, trained
        defaults = loaded.model.generation_config
        self.bos, self.eos = defaults.bos_token_id, ids_of(defaults.eos_token_id)
        self.translating: tuple[Resolved, Generation] | None = None  # the last settings, and `in_language` of them

    def read(self, request: Request) -> Prompt:
        """The request's prompt as token ids. Raises InputError, ModelError or UsageError."""
        from genctl.models import text
        from genctl.models.tokenizer_alone import reading

        tokenizer, runtime = self.loaded.tokenizer, request.resolved.runtime
        if request.prompt is not None:
            conflicts.check_is_chat(runtime)
        if request.prompt_ids is not None:
            text.check_ids(request.prompt_ids, self.loaded.vocab_size)
            words = "" if tokenizer is None else text.decode(tokenizer, request.prompt_ids)
            return Prompt(request.prompt_ids, words, note=self._note(request.prompt_ids))
        if tokenizer is None:
            raise ModelError(f"{self.loaded.name} has no tokenizer: give prompt_ids instead of text")
        if request.prompt is not None and not runtime.is_chat:
            with reading(tokenizer, runtime.src_lang):
                ids = tuple(text.encode_prompt(self.loaded, request.prompt))
            note = self._note(ids, "the tokenizer writes it before each prompt")
            return Prompt(ids, request.prompt, note=note, spelled=ids)
        from genctl.models import chat

        if runtime.src_lang is not None:
            raise UsageError("src_lang would change nothing: the prompt is a chat, whose template writes all of it")
        messages, how = conversation(request)
        if request.prefill:
            rendered = chat.render_prefilled(tokenizer, messages, request.prefill, name=self.loaded.name, **how)
        else:
            rendered = chat.render_chat_text(tokenizer, messages, name=self.loaded.name, **how)
        # the template contains the special tokens
        ids = tuple(text.encode(tokenizer, rendered, add_special_tokens=False))
        note = self._note(ids, "the chat template writes it before a message that begins with it")
        if how["variables"] and how["variables"] != conflicts.variables_of(self.runtime):  # set by this row
            unused = self.unused_variables(runtime)
            note = note or (f"the chat template does not use {' or '.join(unused)}" if unused else "")
        return Prompt(ids, rendered, events.conversation(messages, runtime.system), note)

    def unused_variables(self, runtime: Runtime) -> list[str]:
        """The variables that the chat template does not use. Raises ModelError if there is no template."""
        from genctl.models.chat import check_template

        tokenizer: Any = self.loaded.tokenizer
        tools = "tools" in conflicts.variables_of(runtime)
        return conflicts.unused_variables(
            check_template(tokenizer, self.loaded.name, runtime.chat_template, tools=tools), runtime
        )

    def _note(self, ids: Sequence[int], why: str = "") -> str:
        """A note if a prompt begins with BOS twice (for the reason `why`), or is longer than the training texts."""
        from genctl.models.text import doubled_bos

        tokenizer: Any = self.loaded.tokenizer
        if why and (doubled := doubled_bos(tokenizer, ids, (self.bos, tokenizer.bos_token_id), why)):
            return doubled
        is_longer = self.trained is not None and len(ids) > self.trained and not self.loaded.is_encoder_decoder
        return trained_length_note(self.trained) if is_longer else ""

    def truncated(self, prompt: Prompt, request: Request, generation: Generation) -> Prompt:
        """The prompt after `truncate`; its text is unchanged. Raises InputError if nothing of it would be left.

        Leaves room for max_new_tokens, at most half of the context (or max_length); an encoder-decoder's
        new tokens have a separate context. Special tokens that the tokenizer puts around a prompt stay: BOS, and an
        encoder's EOS.
        """
        side, ids, encoder = request.resolved.runtime.truncate, prompt.ids, self.loaded.is_encoder_decoder
        limit = None if encoder or generation.max_new_tokens is not None else generation.max_length
        bound = min((size for size in (self.context, limit) if size is not None), default=sys.maxsize)
        keep = bound if encoder else bound - min(generation.max_new_tokens or DEFAULT_NEW_TOKENS, bound // 2)
        if side is None or len(ids) <= keep:
            return prompt
        head = int(ids[0] == self.bos)
        left = keep - head - int(encoder and ids[-1] in self.eos)
        if left < 1:
            has = count(len(ids), "token")
            raise InputError(f"the prompt has {has}, and truncate would leave none of it in {bound}")
        first = head + {"left": 0, "right": left, "middle": (left + 1) // 2}[side]
        return replace(prompt, ids=ids[:first] + ids[len(ids) - (keep - first) :])

    def healed(self, ids: tuple[int, ...], generation: Generation, vocab_size: int) -> tuple[tuple[int, ...], str]:
        """The prompt without the tokens to heal, and their text, which the continuation must begin with.

        `vocab_size`: the entries of the output distribution. Raises ModelError and UsageError.
        """
        if not generation.token_healing:
            return ids, ""
        if self.loaded.is_encoder_decoder:
            raise ModelError("token_healing repairs the end of the prompt, which an encoder-decoder does not continue")
        if self.loaded.tokenizer is None:
            raise ModelError(f"token_healing needs a tokenizer, and {self.loaded.name} has none")
        from genctl.decode.prompts import heal

        given = generation.stop_strings or ()
        stops = (given,) if isinstance(given, str) else given
        healed = heal(self.loaded.tokenizer, ids, vocab_size, stops)
        return healed.ids, healed.text

    def in_language(self, resolved: Resolved) -> Generation:
        """The settings, with `tgt_lang` as forced first token. Raises UsageError for a language that is not there."""
        if self.translating is not None and self.translating[0] is resolved:
            return self.translating[1]
        from genctl.models.tokenizer_alone import language_id

        generation = resolved.generation
        for name in ("src_lang", "tgt_lang"):
            if (language := getattr(resolved.runtime, name)) is not None:
                setting = f"{name} = {language} ({resolved.origins.get(name, 'default')})"
                id = language_id(self.loaded.tokenizer, setting, language, self.loaded.name)
                if name == "tgt_lang":
                    generation = replace(generation, forced_bos_token_id=id)
        self.translating = resolved, generation
        return generation


def conversation(request: Request) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of a chat, and the arguments for rendering them."""
    runtime = request.resolved.runtime
    messages = request.messages or ({"role": "user", "content": request.prompt or ""},)
    variables = conflicts.variables_of(runtime)
    return list(messages), {"system": runtime.system, "variables": variables, "template": runtime.chat_template}


def ids_of(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """The ids of a setting that holds one, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
