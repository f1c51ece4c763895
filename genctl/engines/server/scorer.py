"""`genctl score` on servers: they echo a text with its log-probabilities."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from genctl.engines.protocol import Key
from genctl.engines.scored_text import Options, Scored, TextToScore, ranked
from genctl.engines.server.answer import EchoedPrompt, echoed, scored_after
from genctl.engines.server.failure import MALFORMED, Trouble
from genctl.engines.server.server import Server
from genctl.engines.server.whole_answers import in_order, patiently
from genctl.errors import BackendError, InputError, UsageError
from genctl.events import Token

if TYPE_CHECKING:
    from genctl.engines.protocol import Outcome


class RemoteScorer:
    """Scores texts on servers. Raises BackendError where they cannot, UsageError for options that they lack."""

    def __init__(self, servers: Sequence[Server], options: Options, unable: Sequence[str] = ()) -> None:
        """`unable`: flags that are set and that no server has. As many requests are in flight as `batch_size` says."""
        if unable:
            raise UsageError(f"{' and '.join(unable)} cannot be done on a server, which reads each text as it is")
        for server in servers:
            if why := server.why_no_prompt_scores():
                raise BackendError(f"{server.name}: genctl score needs prompt log-probabilities, but the server {why}")
        self._servers, self._options = servers, options

    def score(
        self, wanted: Iterable[tuple[Key, TextToScore]], interrupted: Callable[[], object] = lambda: False
    ) -> Iterator[tuple[Key, Outcome]]:
        """As `Scorer.score`: one outcome for each text, in order. Raises BackendError where none can succeed."""
        rows = ((key, partial(self._scored, text)) for key, text in wanted)
        return in_order(self._servers, rows, self._options.batch_size, interrupted)

    async def _scored(self, item: TextToScore, server: Server) -> list[Scored]:
        """A text, or its candidates, best first. Raises InputError, or BackendError for trouble that ends the run."""
        deadline = None if self._options.row_timeout is None else time.monotonic() + self._options.row_timeout
        if item.target is not None:
            raise InputError("a target is for encoder-decoders, and a server continues texts")
        if not item.candidates:
            return [await self._one(item.context or "", item.text, server, deadline)]
        if not item.context:
            raise InputError("candidates need a context: the server has no score for the first token of a text")
        found = []
        for place, candidate in enumerate(item.candidates, 1):
            try:
                one = await self._one(item.context, candidate, server, deadline)
            except InputError as error:
                raise InputError(f"candidate {place}: {error.message}") from error
            found.append(one)
        return ranked(found, self._options.by)

    async def _one(self, context: str, text: str, server: Server, deadline: float | None) -> Scored:
        whole = context + text
        body = {"model": server.model, "prompt": whole, "max_tokens": 1, "temperature": 0.0, "echo": True}
        body["logprobs"] = max(self._options.detail.top, 1)

        async def ask() -> tuple[int, list[Token], float]:
            answer = await server.client.post("/completions", body, deadline=deadline)
            first, tokens = scored_after(_prompt_of(answer, whole, self._options.detail.top), len(context))
            return first, tokens, math.fsum(-token.logprob for token in tokens) + 0.0

        late = f"no score within row_timeout = {self._options.row_timeout or 0:g} s"
        first, tokens, nll = await patiently(server, ask, seed=len(whole), deadline=deadline, late=late)
        return Scored(
            text,
            (),
            nll,
            len(tokens),
            len(whole[first:].encode("utf-8")),
            tuple(tokens),
            whole[len(context) : first],
            backend=server.name,
        )


def _prompt_of(answer: Any, text: str, top: int) -> EchoedPrompt:
    """The echoed prompt. Raises Trouble where the answer has none."""
    try:
        return echoed(answer, text, top)
    except MALFORMED:
        raise Trouble("the answer does not echo the prompt with its log-probabilities", again=True) from None
