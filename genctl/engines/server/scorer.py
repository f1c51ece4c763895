"""`genctl score` on servers: they echo a text with its log-probabilities, or are asked for one token after another."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from genctl.engines.protocol import Key, Scored, ScoringOptions, TextToScore, ranked
from genctl.engines.server.answer import EchoedPrompt, echoed, scored_after
from genctl.engines.server.failure import MALFORMED, Trouble
from genctl.engines.server.server import Server
from genctl.engines.server.told import TOPS, Questions
from genctl.engines.server.whole_answers import in_order, patiently
from genctl.errors import BackendError, InputError, UsageError, quote
from genctl.events import UNKNOWN_ID, Token

if TYPE_CHECKING:
    from genctl.engines.protocol import Outcome


class RemoteScorer:
    """Scores texts on servers. Raises BackendError where they cannot, UsageError for options that they lack."""

    def __init__(self, servers: Sequence[Server], options: ScoringOptions, unable: Sequence[str] = ()) -> None:
        """`unable`: flags that are set and that no server has. As many requests are in flight as `batch_size` says."""
        if unable:
            raise UsageError(f"{' and '.join(unable)} cannot be done on a server, which reads each text as it is")
        self._mute = set[Server]()  # they echo nothing: texts are read as they are written
        for server in servers:
            if why := server.why_no_prompt_scores():
                if not (server.endpoint(chat=False).logprobs and server.takes_ids and server.tells_tokens):
                    raise BackendError(
                        f"{server.name}: genctl score needs prompt log-probabilities, but the server {why}",
                        hint="a server without an echo is asked for each token if it takes ids and has /tokenize",
                    )
                self._mute.add(server)
        self._questions = Questions(servers, max(options.detail.top, TOPS[0]))
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

        late: dict[str, Any] = {
            "deadline": deadline,
            "late": f"no score within row_timeout = {self._options.row_timeout or 0:g} s",
        }

        async def ask() -> EchoedPrompt:
            if server in self._mute:
                return await self._written(context, text, server, late)
            return _prompt_of(
                await server.client.post("/completions", body, deadline=deadline), whole, self._options.detail.top
            )

        prompt = await patiently(server, ask, seed=len(whole), **late)
        first, tokens = scored_after(prompt, len(context))
        nll = math.fsum(-token.logprob for token in tokens) + 0.0
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

    async def _written(self, context: str, text: str, server: Server, late: Mapping[str, Any]) -> EchoedPrompt:
        """A text behind its context, asked for token by token. Raises Trouble and InputError."""
        read = await server.tokenised(context + text, late["deadline"])
        whole, joined = (context + text).encode(), b"".join(piece for _, piece in read)
        begin = len(joined) - len(whole)  # behind BOS, or a space that the tokenizer puts before
        if not read or not joined.endswith(whole) or begin > len(read[0][1]) + 1:
            raise InputError("the tokens that the server tells of do not add up to the text")
        ids, names = [id for id, _ in read], dict(read)
        ends = [end - begin for end in itertools.accumulate(len(piece) for _, piece in read)]
        known = max(sum(end <= len(context.encode()) for end in ends), 1)

        def is_text(id: int, shown: str) -> bool:
            return shown.encode() == names[id] or ("\ufffd" in shown and not names[id].isascii())

        told = await self._questions.written(server, ids[:known], ids[known:], is_text, **late)
        tokens = list[tuple[int, Token]]()
        for at, end, token in zip([-begin, *ends], ends, [Token(UNKNOWN_ID, math.nan)] * known + told, strict=False):
            start, after = (len(whole[: max(place, 0)].decode(errors="ignore")) for place in (at, end))
            shown = (context + text)[start:after]
            if math.isnan(token.logprob) and at >= len(context.encode()) and len(tokens):
                raise InputError(
                    f"the server does not tell the log-probability of {quote(shown)}, at character {start + 1}"
                )
            if end > 0:
                token = replace(token, id=UNKNOWN_ID, text=shown, top=token.top[: self._options.detail.top])
                tokens.append((start, token))
        return EchoedPrompt(context + text, tuple(tokens))


def _prompt_of(answer: Any, text: str, top: int) -> EchoedPrompt:
    """The echoed prompt. Raises Trouble where the answer has none."""
    try:
        return echoed(answer, text, top)
    except MALFORMED:
        raise Trouble("the answer does not echo the prompt with its log-probabilities", again=True) from None
