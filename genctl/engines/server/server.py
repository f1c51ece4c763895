"""One server: its model, the fields of its requests, and what it cannot do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from genctl.config.layers import Resolved
from genctl.engines.server import body as bodies
from genctl.engines.server.address import Address
from genctl.engines.server.answer import pieces_of
from genctl.engines.server.client import Client
from genctl.engines.server.failure import Disconnected, ServerError, TimedOut, one_line
from genctl.errors import BackendError

PROMPT = "Hello"
UNABLE = (500, 501)  # what servers answer, besides 400, to what they cannot do
REFUSED = (400, 422, *UNABLE)
LISTED = 8  # models named in a message
PROBE_S = 30.0  # for a probe, with its pauses and further attempts


class Server:
    """A server that has answered. Raises BackendError where it cannot be used.

    What it can do is taken for granted. Only where it refuses a request, or a job cannot do without, is it probed with
    a request for one token.
    """

    def __init__(self, address: Address, model: str | None, note: Callable[[str], object] = lambda line: None) -> None:
        self.client = Client(address, note)
        self.name = address.name
        self.most_sequences = 1 << 16  # that one request may have
        self._able: dict[tuple[str, bool], bool] = {}  # by feature, and whether it is of chats
        self._lock = threading.Lock()
        try:
            self.model, owner = self._model(model)
            self._description: Any = {}
            with suppress(ServerError, TimedOut):  # few describe themselves
                fetch = partial(self.client.fetch, "/openapi.json", root=True, deadline=time.monotonic() + PROBE_S)
                self._description = self.client.wait(fetch)
        except BaseException:
            self.client.close()
            raise
        self.kind = bodies.kind_of(self._description, owner)

    def fields(self, *, chat: bool) -> frozenset[str]:
        """The fields of requests for chats or for plain prompts."""
        return bodies.fields_of(self._description, self.kind, chat=chat)

    def sampling_fields(self, resolved: Resolved, *, chat: bool) -> tuple[dict[str, Any], list[str]]:
        """The fields of a row's settings, and what the server cannot do."""
        return bodies.sampling_fields(resolved, self.fields(chat=chat), chat=chat, kind=self.kind)

    def probe(
        self, path: str, body: Mapping[str, Any] | None = None, *, final: tuple[int | None, ...] = UNABLE
    ) -> dict[str, Any]:
        """The answer to a request, sent again while the server is busy or still loads its model.

        `final`: statuses that also mean that a server cannot do the request. Raises ServerError.
        """
        deadline = time.monotonic() + PROBE_S
        try:
            return self.client.retry(
                partial(self.client.fetch, path, body, deadline=deadline), deadline=deadline, final=final
            )
        except TimedOut:
            raise ServerError(f"{self.name}: the probe got no answer within {PROBE_S:g} s", fatal=True) from None

    # -- what it can do ------------------------------------------------------------------------------------------------

    def can(self, feature: str, *, chat: bool = False) -> bool:
        """Whether it takes token `ids`, or gives `logprobs`: probed once. Raises ServerError."""
        with self._lock:
            if (feature, chat) not in self._able:
                self._able[feature, chat] = self._probed(feature, chat)
            return self._able[feature, chat]

    def may(self, feature: str, *, chat: bool = False) -> bool:
        """Whether it is not known to be unable."""
        return self._able.get((feature, chat), True)

    def lacks(self, body: Mapping[str, Any], error: ServerError) -> bool:
        """Whether a refused request asks for something that the server cannot do. Raises ServerError."""
        chat = "messages" in body
        has = (("logprobs", bool(body.get("logprobs"))), ("ids", isinstance(body.get("prompt"), list)))
        return error.status in REFUSED and any(there and not self.can(one, chat=chat) for one, there in has)

    def fewer_sequences(self, count: int) -> int:
        """How many sequences to request where `count` are refused: the slots of llama-server, else half of them."""
        slots = None
        with suppress(ServerError, TimedOut, Disconnected):
            slots = self.client.fetch("/props", root=True, deadline=time.monotonic() + PROBE_S).get("total_slots")
        return slots if isinstance(slots, int) and 0 < slots < count else count // 2

    def _probed(self, feature: str, chat: bool) -> bool:
        most = "max_tokens" if "max_tokens" in self.fields(chat=chat) else "max_completion_tokens"
        body: dict[str, Any] = {"model": self.model, most: 1}
        body |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
        body |= {"prompt": [1, 2]} if feature == "ids" else bodies.logprob_fields(1, chat=chat)
        try:
            answer = self.probe(bodies.path_of(chat=chat), body)
        except ServerError as error:
            if error.fatal or error.status not in REFUSED:
                raise
            return False
        with suppress(ServerError):  # of a thought, some servers list no token
            return feature == "ids" or any(piece.counted or piece.thought for piece in pieces_of(answer, 0))
        return False

    # -- what it is ----------------------------------------------------------------------------------------------------

    def _model(self, wanted: str | None) -> tuple[str, str]:
        """The model's name and its owner, by whom the kind of server is known."""
        try:
            listed = self.client.wait(partial(self.probe, "/models", final=(None,))).get("data")
        except ServerError as error:
            if wanted is None or error.status != 404:
                raise
            return wanted, ""  # it lists no models
        models = {
            entry["id"]: str(entry.get("owned_by", ""))
            for entry in (listed if isinstance(listed, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        }
        if wanted is not None and (wanted in models or not models):
            return wanted, models.get(wanted, "")
        if len(models) == 1 and wanted is None:
            return next(iter(models.items()))
        names = ", ".join([*map(one_line, list(models)[:LISTED]), *(["…"] if len(models) > LISTED else [])])
        words = f"the server has {len(models)} models; name one with --model: {names}"
        if wanted is not None:
            words = f"there is no model {wanted}; there are: {names}"
        elif not models:
            words = "the server lists no model; name one with --model"
        raise BackendError(f"{self.name}: {words}")
