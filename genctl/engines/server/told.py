"""What a server tells of distributions before tokens whose ids are known: it is sent ids, and answers with texts."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

from genctl.engines.server.answer import tokens_of
from genctl.engines.server.failure import MALFORMED, RowFailure, Trouble, one_line
from genctl.engines.server.server import TOLERANCE, UNABLE, Server
from genctl.engines.server.whole_answers import in_order, patiently
from genctl.errors import BackendError, GenctlError, InputError
from genctl.events import UNKNOWN_ID, Token

TOPS = (20, 5)  # tokens asked for of each distribution: the second where a server gives no more, as OpenAI's
MOST = 1.001  # that listed probabilities may add up to: servers round log-probabilities
BIAS = 100  # of a token that is to be written: the most that OpenAI's interface takes
LONGER = (1000, 1 << 18)  # lists in which a token is looked for, where a server gives such: llama-server all tokens
Ids: TypeAlias = Sequence[int]
IsText: TypeAlias = Callable[[int, str], bool]  # whether a text is that of a token
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

    def is_text(self, id: int, text: str) -> bool:
        """Whether a text is that of a token, in any way."""
        return any(self.fits(way, id, text) for way in range(len(self.ways)))

    def way_of(self, ids: Ids, texts: Iterable[str]) -> tuple[int, int]:
        """The way in which tokens are written, and how many texts from the beginning are those of `ids` then."""
        pairs = [*zip(ids, texts, strict=False)]
        fits = [[self.fits(way, *pair) for pair in pairs] for way in range(len(self.ways))]
        way = max(range(len(fits)), key=lambda way: sum(fits[way]))
        return way, [*fits[way], False].index(False)

    def text_of(self, ids: Ids) -> str | None:
        """The text that is read as these tokens; None where there is none."""
        text = str(self._tokenizer.decode([*ids], skip_special_tokens=True))
        return text if text and [*self._tokenizer(text)["input_ids"]] == [*ids] else None

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


class Questions:
    """Requests whose answers tell the log-probabilities of tokens. They list fewer where a server gives no more."""

    def __init__(self, servers: Sequence[Server], most: int = TOPS[0]) -> None:
        """`most`: tokens that are listed of each distribution."""
        self._tops = dict.fromkeys(servers, most)
        self._unable: set[tuple[Server, str]] = set()
        self._sound: set[Server] = set()  # a bias does not change the numbers that it tells

    async def answer(
        self, server: Server, path: str, fields: Mapping[str, Any], deadline: float | None = None, late: str = ""
    ) -> dict[str, Any]:
        """An answer. Raises RowFailure and BackendError."""
        key = "top_logprobs" if "top_logprobs" in fields else "logprobs"

        async def ask() -> dict[str, Any]:
            top = self._tops[server]
            try:
                body = {"model": server.model, key: top, **fields}
                return await server.client.post(path, body, deadline=deadline)
            except Trouble as trouble:
                if top <= TOPS[1] or fields.get(key) or trouble.status not in (400, 422, *UNABLE):
                    raise
                self._tops[server] = TOPS[1]
                return await ask()

        return await patiently(server, ask, seed=fields["max_tokens"], deadline=deadline, late=late)

    async def tokens(self, server: Server, fields: Mapping[str, Any], **late: Any) -> tuple[list[Token], str]:
        """The tokens of a greedy answer, and why it ended. Raises GenctlError."""
        answer = await self.answer(server, "/completions", {"temperature": 0.0, **fields}, **late)
        doubts: set[str] = set()
        try:
            choice = answer["choices"][0]
            tokens = tokens_of(choice["logprobs"], int(fields.get("logprobs", self._tops[server])), doubts)
        except MALFORMED:
            words = f"{server.name}: the answer does not tell the log-probabilities of its tokens"
            raise RowFailure(words) from None
        if doubts:
            raise InputError(f"{server.name}: gives a log-probability that is not a number up to 0")
        return tokens, str(choice.get("finish_reason"))

    async def written(
        self, server: Server, prompt: Ids, ids: Ids, is_text: IsText, send: Callable[[Ids], Any] = list, **late: Any
    ) -> list[Token]:
        """What a server without an echo tells of tokens, as it writes them itself behind a prompt.

        Where it writes another token than the given one, it is asked for the log-probability of that one and goes on
        behind it. NaN where it tells none. `is_text`: whether a text is that of a token. `send`: what is sent for ids.
        """
        found: list[Token] = []
        while len(found) < len(ids):
            before, left = send([*prompt, *ids[: len(found)]]), ids[len(found) :]
            tokens, _ = await self.tokens(server, {"prompt": before, "max_tokens": len(left)}, **late)
            agreed = [
                *itertools.takewhile(lambda pair: is_text(pair[0], pair[1].text), zip(left, tokens, strict=False))
            ]
            found += [token for _, token in agreed]
            if len(agreed) < len(left):
                other = tokens[len(agreed)] if len(agreed) < len(tokens) else None
                before = send([*prompt, *ids[: len(found)]])
                found.append(await self._wanted(server, before, left[len(agreed)], other, is_text, late))
        return found

    async def _wanted(
        self, server: Server, prompt: Any, id: int, other: Token | None, is_text: IsText, late: Mapping[str, Any]
    ) -> Token:
        """A token that a server does not write: in the list of the `other` one, written with a bias, or in longer ones.

        A bias must leave the number of the best token as it is: else the number of the wanted one is not raw, either.
        """
        top = () if other is None else other.top
        best, one = _best(other), other
        asks: list[dict[str, Any]] = [{}, {"logit_bias": {str(id): BIAS}}, *({"logprobs": most} for most in LONGER)]
        for ask in asks:
            if (kind := (server, str(ask)[:18])) in self._unable:
                continue
            if ask:
                try:
                    tokens, _ = await self.tokens(server, {"prompt": prompt, "max_tokens": 1, **ask}, **late)
                except (RowFailure, InputError):
                    if late.get("deadline") is not None and time.monotonic() >= late["deadline"]:
                        raise
                    self._unable.add(kind)
                    continue
                one = tokens[0] if tokens else None
            if one is None:
                continue
            now = _best(one)
            near = now[1] == best[1] and abs(now[0] - best[0]) < TOLERANCE
            if "logit_bias" in ask and near:
                self._sound.add(server)
            if "logit_bias" in ask and not near and (best[1] or server not in self._sound):
                continue
            written = is_text(id, one.text)
            own = [value for _, text, value in one.top if "\ufffd" not in text and is_text(id, text)]
            if written or len(own) == 1:
                value, top = one.logprob if written else own[0], top or one.top
                break
        else:
            value = math.nan
        alike = [is_text(id, text) for _, text, _ in top]
        marked = tuple((UNKNOWN_ID if own and sum(alike) == 1 else UNKNOWN_ID - 1 - place, text, number)
                       for place, (own, (_, text, number)) in enumerate(zip(alike, top, strict=True)))  # fmt: skip
        return Token(id, value, rank=alike.index(True) + 1 if sum(alike) == 1 else None, top=marked)


def _best(token: Token | None) -> tuple[float, str]:
    """The number and the text of the most probable token; no text where it is not told."""
    top = () if token is None else token.top
    return max(((value, text) for _, text, value in top), default=(math.nan, ""))


def answers(
    servers: Sequence[Server], requests: Sequence[tuple[str, str, dict[str, Any]]], interrupted: Callable[[], object]
) -> Iterator[tuple[str, dict[str, Any] | GenctlError]]:
    """The answers to requests: id, path and fields."""
    questions = Questions(servers)
    rows = ((id, partial(_answer, questions, path, fields)) for id, path, fields in requests)
    return in_order(servers, rows, 8, interrupted)


async def _answer(questions: Questions, path: str, fields: dict[str, Any], server: Server) -> dict[str, Any]:
    return await questions.answer(server, path, fields)


class ToldDistributions:
    """Asks servers. Raises BackendError where they cannot tell, or have another tokenizer."""

    def __init__(self, servers: Sequence[Server], names: TokenNames, reference: str, *, width: int, hint: str) -> None:
        """`reference` names the owner of the tokenizer in messages, `hint` says what else can be done."""
        for server in servers:
            if not server.endpoint(chat=False).logprobs:
                why = "the server gives no log-probabilities"
                raise BackendError(f"{server.name}: parity needs log-probabilities, but {why}", hint=hint)
        self._servers, self._names, self._reference = servers, names, reference
        self._width, self._hint, self._questions = width, hint, Questions(servers)
        # they echo nothing, or not the tokens that they were sent
        self.mute = frozenset(server for server in servers if not server.takes_ids or server.why_no_prompt_scores())

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
            send = partial(self._sent, server)
            told = await self._questions.written(server, prompt, ids, self._names.is_text, send)
            way, _ = self._names.way_of(ids, (token.text for token in told))
            return [self._told(server, way, id, token) for id, token in zip(ids, told, strict=True)]
        whole = [*prompt, *ids]
        tokens, _ = await self._questions.tokens(server, {"prompt": whole, "max_tokens": 1, "echo": True})
        if len(tokens) < len(whole):
            raise InputError(f"{server.name}: was sent {len(whole)} tokens and tells of {len(tokens)}")
        way, at = self._names.way_of(whole, (token.text for token in tokens))
        if at < len(whole):
            own, shown = one_line(self._names.ways[0](whole[at])), one_line(tokens[at].text)
            which = f"token {at + 1} of text {name} is “{shown}”, and that of {self._reference} “{own}”"
            raise BackendError(f"{server.name}: another tokenizer: {which}", hint=self._hint)
        found = []
        for place in range(len(prompt), len(whole)):
            if math.isnan(tokens[place].logprob):
                raise InputError(f"{server.name}: has no log-probability for token {place - len(prompt) + 1}")
            found.append(self._told(server, way, whole[place], tokens[place]))
        return found

    def _sent(self, server: Server, ids: Ids) -> list[int] | str:
        """What a server is sent for ids: their text if it takes none, where that has these ids. Raises InputError."""
        if server.takes_ids:
            return [*ids]
        if (text := self._names.text_of(ids)) is None:
            raise InputError(f"{server.name}: takes no token ids, and no text has those of the prompt")
        return text

    async def _write(self, prompt: Ids, ids: Ids, server: Server) -> OwnText | None:
        sent = self._sent(server, prompt)
        tokens, finish = await self._questions.tokens(server, {"prompt": sent, "max_tokens": len(ids)})
        way, same = self._names.way_of(ids, (token.text for token in tokens))
        if same == len(ids):
            return None
        if same == len(tokens):
            left_out = finish == "stop" and same == len(ids) - 1 and ids[same] in self._names.special
            return None if left_out else OwnText(same, None, {})
        text = tokens[same].text
        if (id := self._names.id_of(way, text)) is None:
            raise InputError(f"{server.name}: several tokens or none of {self._reference} are “{one_line(text)}”")
        return OwnText(same, id, self._told(server, way, id, tokens[same]).known)

    def _told(self, server: Server, way: int, id: int, token: Token) -> ToldTop:
        top = tuple(
            (id if other == UNKNOWN_ID else self._names.id_of(way, text), value) for other, text, value in token.top
        )
        told = ToldTop(id, token.logprob, top)
        listed = [*told.known.values(), *(value for other, value in top if other is None)]
        if math.fsum(map(math.exp, listed)) > MOST:
            raise InputError(f"{server.name}: gives probabilities that add up to more than 1")
        return told
