"""Who answers: a checkpoint on this machine, whose prompts are token ids, or a server, which makes them itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from genctl.commands.chat import thinking
from genctl.commands.chat.log import Message
from genctl.config.layers import Resolved
from genctl.engines.protocol import Engine, Request
from genctl.errors import ModelError, UsageError

if TYPE_CHECKING:
    from genctl.engines.session import Session

# chat: messages in a template; text: one growing text; alone: each turn without those before it
Kind = Literal["chat", "text", "alone"]
Messages = Sequence[dict[str, str]]
_TRIAL = {"role": "user", "content": "x"}


class Partner:
    """A checkpoint here (`session`), or a server (None)."""

    def __init__(self, engine: Engine, memory: int | None, prefill: str) -> None:
        """`memory`: bytes for the caches of what was read, where they are bounded. `prefill` begins each answer.

        Raises ModelError or UsageError.
        """
        from genctl.engines.session import Session

        self.engine, self.name = engine, engine.about.name
        self.session: Session | None = engine if isinstance(engine, Session) else None
        self.template = ""
        self.kind: Kind = "chat"
        if self.session is None:
            return
        from genctl.models import chat

        if self.session.loaded.tokenizer is None:
            raise ModelError(f"{self.name} has no tokenizer, so there is nothing to chat with")
        try:
            self.template = chat.check_template(self.session.loaded.tokenizer, self.name)
        except ModelError:
            self.kind = "text"
        if not self.session.about.is_encoder_decoder:
            self.session.keep_texts(memory)
            return
        self.kind = "alone"
        if memory is not None:
            raise UsageError(
                f"--memory bounds the caches of earlier turns, and {self.name} keeps none: it is an encoder-decoder"
            )
        if prefill:
            raise UsageError(
                f"--prefill begins the answer in the prompt, and {self.name} is an encoder-decoder, "
                "whose answers are apart from their prompts",
                hint="--set prefix=TEXT begins them",
            )

    @property
    def note(self) -> str:
        """What is unusual of the chat, in words; "" where nothing is."""
        if self.kind == "text":
            return f"{self.name} has no chat template: it continues the text, and what you type is added to it"
        if self.kind == "alone":
            return f"{self.name} is an encoder-decoder: it answers each turn on its own, without those before it"
        if self.session is None:
            return "with a server there is no /prompt, no /tokens and no processor of genctl's own"
        return ""

    @property
    def context(self) -> int | None:
        """The most tokens of a prompt and its answer; None where there is no limit, or a server knows it."""
        return None if self.session is None or self.kind == "alone" else self.session.planner.context

    def fingerprint(self) -> str:
        """The identity of the checkpoint; "" for a server."""
        return "" if self.session is None else self.session.loaded.fingerprint()

    def writes(self, message: Message) -> bool:
        """Whether the text of an answer, whose last characters may have been cut off, is that of its tokens here."""
        from genctl.models.text import detokenizer

        ids = message.token_ids
        if self.session is None or not all(0 <= id < self.session.forward.vocab_size for id in ids):
            return False
        text = message.content.removeprefix(message.prefill).strip().rstrip("\ufffd")
        return not ids or detokenizer(self.session.loaded.tokenizer).decode(ids).strip().startswith(text)

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
        self, name: str, resolved: Resolved, seed: int, messages: Messages, prefill: str, *, index: int
    ) -> Request:
        """The request for the answer to the last of `messages`."""
        if self.kind == "alone":
            messages = messages[-1:]
        if self.template or self.session is None:
            history = tuple(self._of_history(message) for message in messages)
            return Request(name, resolved, seed, messages=history, prefill=prefill, place=index + 1, index=index)
        text = "".join(message["content"] for message in messages) + prefill
        return Request(name, resolved, seed, prompt=text, place=index + 1, index=index)

    def _of_history(self, message: dict[str, str]) -> dict[str, str]:
        """A message as the template wants it: with its thought apart, where it does not take it out itself."""
        if message["role"] != "assistant" or "reasoning_content" not in self.template or "</think>" in self.template:
            return message
        thought, answer = thinking.split(message["content"])
        return {**message, "content": answer, "reasoning_content": thought} if thought else message
