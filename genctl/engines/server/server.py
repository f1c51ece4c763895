"""One server: its model, and what a probe of it says that it can do."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from genctl.engines.server import failure
from genctl.engines.server.address import Address
from genctl.engines.server.answer import echoed, tokens_of
from genctl.engines.server.body import described, kind_of, known
from genctl.engines.server.client import Client
from genctl.engines.server.failure import MALFORMED, Late, Trouble, one_line
from genctl.errors import BackendError, InputError

T = TypeVar("T")
PROMPT = "Hello"
TOLERANCE = 0.1  # nats, between a token that is read and the same one that is written: passes differ a little
UNABLE = (500, 501)  # what servers answer, besides 400, to what they cannot do
LISTED = 8  # models named in a message
PROBE_S = 30.0  # for all questions of the probe together, their pauses and further attempts included


@dataclass(frozen=True)
class Endpoint:
    """One of a server's two ways in: plain prompts, or chats."""

    path: str
    fields: frozenset[str]
    logprobs: bool  # it answers with the log-probabilities of its tokens


def logprob_fields(top: int, *, chat: bool) -> dict[str, Any]:
    """The fields that ask for log-probabilities. At least one alternative: for none, some servers tell nothing."""
    return {"logprobs": True, "top_logprobs": max(top, 1)} if chat else {"logprobs": max(top, 1)}


class Server:
    """A server that has answered. Raises BackendError where it cannot be used."""

    def __init__(self, address: Address, model: str | None, say: Callable[[str], object] = lambda line: None) -> None:
        self.client = Client(address, say)
        self.name = address.name
        self._left = PROBE_S
        self._endpoints: dict[bool, Endpoint] = {}
        self._able: dict[str, bool] = {}
        try:
            self.model, owner = self._model(model)
            self._description = self._openapi()
        except BaseException as error:
            self.close()
            if isinstance(error, Trouble):
                raise self.error(error) from None
            raise
        self.kind = kind_of(self._description, owner)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def error(self, trouble: Trouble) -> BackendError:
        """The error that ends a run."""
        return BackendError(f"{self.name}: {trouble.message}")

    def endpoint(self, *, chat: bool) -> Endpoint:
        """The way in for chats or for plain prompts, probed once. Raises BackendError where there is none."""
        if chat not in self._endpoints:
            self._endpoints[chat] = self._probed(chat)
        return self._endpoints[chat]

    @property
    def takes_ids(self) -> bool:
        """Whether a plain prompt may be token ids."""
        return self._can("ids", {"prompt": [1, 2]})

    @property
    def gives_several(self) -> bool:
        """Whether one request can ask for several sequences. Some servers accept the field and do not look at it."""
        return self._can("n", {"n": 2, "temperature": 1.0}, lambda data: len(data.get("choices", ())) == 2)

    async def tokenised(self, text: str, deadline: float | None = None) -> list[tuple[int, bytes]]:
        """The ids and bytes of a prompt, where a server says how it reads it (llama-server). Raises Trouble."""
        body = {"content": text, "add_special": True, "parse_special": True, "with_pieces": True}
        answer = await self.client.post("/tokenize", body, root=True, deadline=deadline)
        try:
            pieces = [(int(one["id"]), one["piece"]) for one in answer["tokens"]]
            return [(id, piece.encode() if isinstance(piece, str) else bytes(piece)) for id, piece in pieces]
        except MALFORMED:
            raise Trouble("the server does not say which tokens it reads (/tokenize)") from None

    @cached_property
    def tells_tokens(self) -> bool:
        """Whether it says which tokens a text has."""
        try:
            return bool(self._ask(lambda deadline: self.tokenised(PROMPT, deadline), UNABLE, attempts=1))
        except Trouble:
            return False

    def why_no_prompt_scores(self) -> str:
        """Why the log-probabilities of a prompt cannot be had, in words; "" if they can.

        A token is generated, and then read as the end of a prompt: it must have the same log-probability both times.
        Some servers shift the numbers by one token where a model has no BOS.
        """
        asked: dict[str, Any] = {"model": self.model, "max_tokens": 1, "temperature": 0.0, "logprobs": 1}
        path, prompt = self.endpoint(chat=False).path, f"{PROMPT}, {PROMPT}"
        try:
            answer = self._post(path, {**asked, "prompt": prompt}, UNABLE)
            written = tokens_of(answer["choices"][0].get("logprobs"), 0, set())
            if not written:
                return "gives no log-probabilities"
            whole = prompt + written[0].text
            answer = self._post(path, {**asked, "prompt": whole, "echo": True}, UNABLE)
            read = echoed(answer, whole).tokens
        except Trouble as trouble:
            if trouble.fatal:
                raise self.error(trouble) from None
            return "gives no log-probabilities of a prompt"
        except (*MALFORMED, InputError):
            return "gives no log-probabilities of a prompt"
        start, token = read[-1]
        if start != len(prompt):
            return ""  # it is read as another token, so there is nothing to compare
        near = abs(token.logprob - written[0].logprob) < TOLERANCE
        return "" if near else "gives log-probabilities of a prompt that contradict those of its own text"

    # -- the probe -----------------------------------------------------------------------------------------------------

    def _model(self, wanted: str | None) -> tuple[str, str]:
        """The model's name and its owner, who tells the kind of server."""
        try:
            listed = self._ask(lambda deadline: self.client.get("/models", deadline=deadline)).get("data")
        except Trouble as trouble:
            if wanted is None or trouble.status != 404:
                raise
            return wanted, ""  # it lists no models
        models = {
            entry["id"]: str(entry.get("owned_by", ""))
            for entry in (listed if isinstance(listed, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        }
        names = ", ".join([*map(one_line, list(models)[:LISTED]), *(["…"] if len(models) > LISTED else [])])
        if wanted is not None:
            if models and wanted not in models:
                raise Trouble(f"there is no model {wanted}; there are: {names}", fatal=True)
            return wanted, models.get(wanted, "")
        if not models:
            raise Trouble("the server lists no model; name one with --model", fatal=True)
        if len(models) > 1:
            raise Trouble(f"the server has {len(models)} models; name one with --model: {names}", fatal=True)
        return next(iter(models.items()))

    def _openapi(self) -> Any:
        """The server's description of itself, if it has one."""
        try:
            return self._ask(
                lambda deadline: self.client.get("/openapi.json", root=True, deadline=deadline), attempts=1
            )
        except Trouble:
            return {}

    def _probed(self, chat: bool) -> Endpoint:
        path = "/chat/completions" if chat else "/completions"
        fields = described(self._description, f"/v1{path}") or known(self.kind, chat=chat)
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
        most = "max_tokens" if "max_tokens" in fields else "max_completion_tokens"
        asked |= {"model": self.model, most: 1}
        try:
            self._post(path, asked)
        except Trouble as trouble:
            if trouble.status == 404 and not chat:
                raise BackendError(
                    f"{self.name}: no plain prompts ({trouble.message})", hint="--chat sends each prompt as a chat"
                ) from None
            raise self.error(trouble) from None
        try:
            answer = self._post(path, {**asked, **logprob_fields(1, chat=chat)}, UNABLE)
            told = bool(tokens_of(answer["choices"][0].get("logprobs"), 0, set()))
        except (Trouble, *MALFORMED):
            told = False
        return Endpoint(path, fields, told)

    def _can(self, what: str, asked: dict[str, Any], holds: Callable[[dict[str, Any]], bool] = bool) -> bool:
        """Whether the server answers a request for one token as it should."""
        if what not in self._able:
            path = self.endpoint(chat=False).path
            try:
                body = {"model": self.model, "prompt": PROMPT, "max_tokens": 1, **asked}
                self._able[what] = holds(self._post(path, body, UNABLE))
            except Trouble as trouble:
                if trouble.fatal:
                    raise self.error(trouble) from None
                self._able[what] = False
            except MALFORMED:
                self._able[what] = False
        return self._able[what]

    def _post(self, path: str, body: dict[str, Any], final: Sequence[int] = ()) -> dict[str, Any]:
        """The answer to a request of the probe; see `_ask`."""
        return self._ask(lambda deadline: self.client.post(path, body, deadline=deadline), final)

    def _ask(
        self, ask: Callable[[float], Awaitable[T]], final: Sequence[int] = (), *, attempts: int = failure.ATTEMPTS
    ) -> T:
        """The answer, asked for again while the server is busy or still loads its model. `ask` gets the deadline.

        `final`: statuses that also mean that a server cannot do the request. Raises Trouble, and BackendError once the
        questions have taken `PROBE_S` together.
        """
        began = time.monotonic()
        deadline = began + self._left

        def hopeless(trouble: Trouble) -> bool:
            return trouble.status in final or trouble.message.startswith("no connection")

        try:
            return self.client.wait(
                failure.patiently(
                    lambda: ask(deadline),
                    seed=0,
                    deadline=deadline,
                    say=self.client.note_pause,
                    hopeless=hopeless,
                    attempts=attempts,
                    counts=False,
                )
            )
        except Late:
            raise BackendError(f"{self.name}: the probe got no answer within {PROBE_S:g} s") from None
        finally:
            self._left -= time.monotonic() - began
