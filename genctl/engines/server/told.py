"""What a server tells of distributions before tokens whose ids are known: it is sent ids, and answers with texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

from genctl.engines.server.answer import tokens_of
from genctl.engines.server.failure import MALFORMED, Trouble, one_line
from genctl.engines.server.server import UNABLE, Server
from genctl.engines.server.whole_answers import in_order, patiently
from genctl.errors import BackendError, GenctlError, InputError
from genctl.events import UNKNOWN_ID, Token

TOPS = (20, 5)  # tokens asked for of each distribution: the second where a server gives no more, as OpenAI's
MOST = 1.001  # that listed probabilities may add up to: servers round log-probabilities
Ids: TypeAlias = Sequence[int]
Asked: TypeAlias = tuple[str, str, Ids, Ids]  # a text: its id, what messages call it, the ids of its prompt and its own


@dataclass(frozen=True)
class ToldTop:
    """A distribution before a token, as far as a server tells it."""

    token: int
    logprob: float  # of `token`; NaN where it is not told
    top: tuple[tuple[int | None, float], ...]  # the best first; None: a text that several tokens have

    @property
    def known(self) -> dict[int, float]:
        """All tokens whose log-probability is known."""
        told = {} if math.isnan(self.logprob) else {self.token: self.logprob}
        return {**{id: value for id, value in self.top if id is not None}, **told}

    @property
    def has_first(self) -> bool:
        """Whether the most probable token is known."""
        if not self.top:
            return not math.isnan(self.logprob)
        return self.top[0][0] is not None or self.logprob > self.top[0][1]


@dataclass(frozen=True)
class OwnText:
    """Where a server's own greedy text parts from a given one: at `index`, with `token`; None: it ended there."""

    index: int
    token: int | None
    known: dict[int, float]  # the log-probabilities that it tells of there


class TokenNames:
    """The ways in which servers write a token: as in the text, decoded alone, or as the vocabulary has it."""

    def __init__(self, tokenizer: Any, piece: Callable[[int], str]) -> None:
        """`tokenizer` is one of transformers; `piece` gives a token as it stands in a text."""
        self._tokenizer = tokenizer
        self.ways = (piece, self._alone, self._raw)
        self._ids: dict[int, dict[str, int | None]] = {}

    def _alone(self, id: int) -> str:
        return str(self._tokenizer.decode([id], clean_up_tokenization_spaces=False))

    def _raw(self, id: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(id))

    def fits(self, way: int, id: int, text: str) -> bool:
        """Whether a text is that of a token. A part of a character is written in many ways, and never told apart."""
        return text in (self.ways[way](id), self.ways[1](id) if "\ufffd" in text else None)

    def id_of(self, way: int, text: str) -> int | None:
        """The only token with this text; None where there are several, or none."""
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


def answers(
    servers: Sequence[Server], requests: Sequence[tuple[str, str, dict[str, Any]]], interrupted: Callable[[], object]
) -> Iterator[tuple[str, dict[str, Any] | GenctlError]]:
    """The answers to requests: id, path and fields. `logprobs` are fewer where a server gives no more."""
    tops = dict.fromkeys(servers, TOPS[0])

    async def answer(path: str, fields: dict[str, Any], server: Server) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            key = "top_logprobs" if "top_logprobs" in fields else "logprobs"
            try:
                return await server.client.post(path, {"model": server.model, **fields, key: tops[server]})
            except Trouble as trouble:
                if tops[server] == TOPS[1] or trouble.status not in (400, 422, *UNABLE):
                    raise
                tops[server] = TOPS[1]
                return await ask()

        return await patiently(server, ask, seed=fields["max_tokens"])

    return in_order(servers, ((id, partial(answer, path, fields)) for id, path, fields in requests), 8, interrupted)


class ToldDistributions:
    """Asks servers. Raises BackendError where they cannot tell, or have another tokenizer."""

    def __init__(self, servers: Sequence[Server], names: TokenNames, reference: str, *, width: int, hint: str) -> None:
        """`reference` names the owner of the tokenizer in messages, `hint` says what else can be done."""
        for server in servers:
            if not server.endpoint(chat=False).logprobs:
                why = "the server gives no log-probabilities"
                raise BackendError(f"{server.name}: parity needs log-probabilities, but {why}", hint=hint)
            if not server.takes_ids:
                raise BackendError(
                    f"{server.name}: takes no token ids, so that it might read other tokens than {reference}", hint=hint
                )
        self._servers, self._names, self._reference = servers, names, reference
        self._width, self._hint, self._tops = width, hint, dict.fromkeys(servers, TOPS[0])
        self.mute = frozenset(server for server in servers if server.why_no_prompt_scores())  # they echo nothing

    def read(
        self, texts: Sequence[Asked], interrupted: Callable[[], object]
    ) -> Iterator[tuple[str, list[ToldTop] | GenctlError]]:
        """What is told of each token of texts, by the ids of these."""
        rows = ((id, partial(self._read, name, prompt, ids)) for id, name, prompt, ids in texts)
        return in_order(self._servers, rows, self._width, interrupted)

    def write(
        self, texts: Sequence[Asked], interrupted: Callable[[], object]
    ) -> Iterator[tuple[str, OwnText | GenctlError | None]]:
        """Where the text that a server writes greedily after each prompt parts from the given one; None: nowhere."""
        rows = ((id, partial(self._write, prompt, ids)) for id, _, prompt, ids in texts)
        return in_order(self._servers, rows, self._width, interrupted)

    async def _read(self, name: str, prompt: Ids, ids: Ids, server: Server) -> list[ToldTop]:
        if server in self.mute:
            return await self._written(prompt, ids, server)
        whole = [*prompt, *ids]
        tokens, _ = await self._ask(server, {"prompt": whole, "max_tokens": 1, "echo": True}, len(whole))
        way = self._way(server, name, whole, tokens)
        found = []
        for place in range(len(prompt), len(whole)):
            if math.isnan(tokens[place].logprob):
                raise InputError(f"{server.name}: has no log-probability for token {place - len(prompt) + 1}")
            found.append(self._told(server, way, whole[place], tokens[place]))
        return found

    async def _written(self, prompt: Ids, ids: Ids, server: Server) -> list[ToldTop]:
        """The same of a server without an echo: what it tells as it writes; where it parts, it is asked to go on."""
        found: list[ToldTop] = []
        while len(found) < len(ids):
            left = ids[len(found) :]
            tokens, _ = await self._ask(server, {"prompt": [*prompt, *ids[: len(found)]], "max_tokens": len(left)}, 0)
            texts = [token.text for token in tokens]
            agree = [_shared(self._names, way, left, texts) for way in range(len(self._names.ways))]
            same, way = max(agree), agree.index(max(agree))
            found += [self._told(server, way, id, token) for id, token in zip(left[:same], tokens, strict=False)]
            if same == len(left):
                break
            if same == len(tokens):  # it ended
                found.append(ToldTop(left[same], math.nan, ()))
                continue
            own = self._own(way, tokens[same], server)
            told = self._told(server, way, own, tokens[same])
            found.append(ToldTop(left[same], told.known.get(left[same], math.nan), told.top))
        return found

    def _own(self, way: int, token: Token, server: Server) -> int:
        """The id of a token that a server wrote. Raises InputError."""
        id = self._names.id_of(way, token.text)
        if id is None:
            raise InputError(f"{server.name}: several tokens or none of {self._reference} are “{one_line(token.text)}”")
        return id

    async def _write(self, prompt: Ids, ids: Ids, server: Server) -> OwnText | None:
        tokens, finish = await self._ask(server, {"prompt": [*prompt], "max_tokens": len(ids)}, 0)
        texts = [token.text for token in tokens]
        agree = [_shared(self._names, way, ids, texts) for way in range(len(self._names.ways))]
        same = max(agree)
        way = agree.index(same)
        if same == len(ids):
            return None
        if same == len(tokens):
            left_out = finish == "stop" and same == len(ids) - 1 and ids[same] in self._names.special
            return None if left_out else OwnText(same, None, {})
        id = self._own(way, tokens[same], server)
        return OwnText(same, id, self._told(server, way, id, tokens[same]).known)

    async def _ask(self, server: Server, fields: dict[str, Any], least: int) -> tuple[list[Token], str]:
        """The tokens of an answer, at least so many, and why it ended."""

        async def ask() -> tuple[list[Token], str]:
            top = self._tops[server]
            body = {"model": server.model, "temperature": 0.0, "logprobs": top, **fields}
            try:
                answer = await server.client.post("/completions", body)
            except Trouble as trouble:
                if top == TOPS[1] or trouble.status not in (400, 422, *UNABLE):
                    raise
                self._tops[server] = TOPS[1]
                return await ask()
            doubts: set[str] = set()
            try:
                choice = answer["choices"][0]
                tokens = tokens_of(choice["logprobs"], top, doubts)
            except MALFORMED:
                raise Trouble("the answer does not tell the log-probabilities of its tokens", again=True) from None
            if doubts:
                raise InputError(f"{server.name}: gives a log-probability that is not a number up to 0")
            if len(tokens) < least:
                raise InputError(f"{server.name}: was sent {least} tokens and tells of {len(tokens)}")
            return tokens, str(choice.get("finish_reason"))

        return await patiently(server, ask, seed=len(fields["prompt"]))

    def _way(self, server: Server, name: str, ids: Ids, tokens: Sequence[Token]) -> int:
        """The way in which a server writes tokens. Raises BackendError, which names the first one that fits none."""
        texts = [token.text for token in tokens]
        agree = [_shared(self._names, way, ids, texts) for way in range(len(self._names.ways))]
        at = max(agree)
        if at < len(ids):
            shown = f"“{one_line(texts[at])}”, and that of {self._reference} “{one_line(self._names.ways[0](ids[at]))}”"
            raise BackendError(
                f"{server.name}: another tokenizer: token {at + 1} of text {name} is {shown}", hint=self._hint
            )
        return agree.index(at)

    def _told(self, server: Server, way: int, id: int, token: Token) -> ToldTop:
        top = tuple(
            (id if other == UNKNOWN_ID else self._names.id_of(way, text), value) for other, text, value in token.top
        )
        told = ToldTop(id, token.logprob, top)
        listed = [*told.known.values(), *(value for other, value in top if other is None)]
        if math.fsum(map(math.exp, listed)) > MOST:
            raise InputError(f"{server.name}: gives probabilities that add up to more than 1")
        return told


def _shared(names: TokenNames, way: int, ids: Ids, texts: Sequence[str]) -> int:
    """How many tokens agree from the beginning."""
    pairs = enumerate(zip(ids, texts, strict=False))
    return next((at for at, (id, text) in pairs if not names.fits(way, id, text)), min(len(ids), len(texts)))
