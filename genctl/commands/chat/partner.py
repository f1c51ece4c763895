"""Who answers: a checkpoint on this machine, whose prompts are token ids, or a server, which makes them itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from genctl.commands.chat import thinking
from genctl.config.layers import Resolved
from genctl.engines.protocol import Engine, Request
from genctl.errors import GenctlError, ModelError, UsageError

if TYPE_CHECKING:
    from genctl.engines.planner import Prompt
    from genctl.engines.session import Session

# chat: messages in a template; text: one growing text; alone: each turn without those before it
Kind = Literal["chat", "text", "alone"]
Messages = Sequence[Mapping[str, str]]
_TRIAL = {"role": "user", "content": "x"}


class Partner:
    """A checkpoint here (`session`), or a server (None)."""

    def __init__(self, engine: Engine, session: Session | None, memory: int | None = None) -> None:
        """`memory`: bytes for the caches of what was read, where they are bounded. Raises ModelError or UsageError."""
        self.engine, self.session, self.memory = engine, session, memory
        self.name = engine.about.name
        self.template = ""
        if session is None:
            self.kind: Kind = "chat"
            return
        from genctl.models import chat

        if session.loaded.tokenizer is None:
            raise ModelError(f"{self.name} has no tokenizer, so there is nothing to chat with")
        try:
            self.template = chat.check_template(session.loaded.tokenizer, self.name)
        except ModelError:
            self.template = ""
        self.kind = "alone" if session.about.is_encoder_decoder else "chat" if self.template else "text"
        if not session.about.is_encoder_decoder:
            session.keep_texts(memory)
        elif memory is not None:
            raise UsageError(
                f"--memory bounds the caches of earlier turns, and {self.name} keeps none: it is an encoder-decoder"
            )

    @property
    def note(self) -> str:
        """What is unusual of the chat, in words; "" where nothing is."""
        if self.kind == "text":
            return f"{self.name} has no chat template: it continues the text, and what you type is added to it"
        if self.kind == "alone":
            return f"{self.name} is an encoder-decoder: it answers each turn on its own, without those before it"
        if self.session is None:
            return "a server keeps the model: /prompt, /tokens and settings of its own processors are not there"
        return ""

    @property
    def context(self) -> int | None:
        """The most tokens of a prompt and its answer; None where there is no limit, or a server knows it."""
        return None if self.session is None or self.kind == "alone" else self.session.planner.context

    def check_system(self, system: str | None, where: str) -> None:
        """Raises UsageError where the checkpoint cannot be given a system message."""
        if system is None or self.session is None:
            return
        if not self.template:
            raise UsageError(f"{where} sets a system message, but {self.name} has no chat template for it")
        from genctl.models import chat

        tokenizer: Any = self.session.loaded.tokenizer
        try:
            chat.render_chat_text(tokenizer, [_TRIAL], name=self.name)
        except ModelError:
            return  # the first turn says what is wrong
        try:
            chat.render_chat_text(tokenizer, [_TRIAL], system=system, name=self.name)
        except ModelError as error:
            raise UsageError(
                f"{where} sets a system message, but {error.message.replace('the', 'the checkpoint’s', 1)}",
                hint="say it in the first turn",
            ) from None

    def request(
        self,
        name: str,
        resolved: Resolved,
        seed: int,
        messages: Messages,
        prefill: str,
        *,
        place: int = 0,
        index: int = 0,
    ) -> Request:
        """The request for the answer to the last of `messages`."""
        sent = [dict(message) for message in messages]
        if self.kind == "alone":
            sent = sent[-1:]
        if self.template or self.session is None:
            said = tuple(self._of_history(message) for message in sent)
            return Request(name, resolved, seed, messages=said, prefill=prefill, place=place, index=index)
        text = "".join(message["content"] for message in sent) + prefill
        return Request(name, resolved, seed, prompt=text, place=place, index=index)

    def read(self, request: Request) -> Prompt:
        """The prompt of a request. Raises UsageError for a server, and what planning raises."""
        if self.session is None:
            raise UsageError("the server makes the prompt of the messages, and does not tell it")
        return self.session.planner.read(request)

    def first_token(self, base: Resolved) -> tuple[int, ...]:
        """The token that every prompt begins with, as a template or a tokenizer puts it there; () where there is none.

        It is the root of the chat's tree.
        """
        if self.session is None or self.kind == "alone":
            return ()
        found = set()
        for system, text in ((None, "x"), (None, "Why?"), ("Be kind.", "x")):
            said = [{"role": "user", "content": text}]
            if system is not None:
                said.insert(0, {"role": "system", "content": system})
            with suppress(GenctlError):  # a template that knows no system message
                request = self.request("", replace(base, runtime=replace(base.runtime, system=None)), 0, said, "")
                ids = self.read(request).ids
                found.add(ids[:1] if len(ids) > 1 else ())
        return found.pop() if len(found) == 1 else ()

    def _of_history(self, message: dict[str, str]) -> dict[str, str]:
        """A message as the template wants it: with its thought apart, where it does not take it out itself."""
        if message["role"] != "assistant" or "reasoning_content" not in self.template or "</think>" in self.template:
            return message
        thought, answer = thinking.split(message["content"])
        return {**message, "content": answer, "reasoning_content": thought} if thought else message


def local_session(engine: Engine) -> Session | None:
    """The session of an engine that computes in this process."""
    from genctl.engines.session import Session

    return engine if isinstance(engine, Session) else None
