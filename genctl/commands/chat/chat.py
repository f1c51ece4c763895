"""The chat itself, without a terminal: turns become requests, and answers become nodes of its tree."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from genctl.commands.chat.options import check_settings
from genctl.commands.chat.partner import Partner
from genctl.commands.chat.story import Story, text_id
from genctl.config import presets
from genctl.config.check import known
from genctl.config.conflicts import sampling_notice
from genctl.config.layers import Layer, Resolved
from genctl.config.saved_files import check_trust
from genctl.engines.protocol import Engine, Flow, JobPlan, Report, Request
from genctl.errors import GenctlError, UsageError
from genctl.events import Began, Event, Failed, Finished, Stepped, Token
from genctl.events.results import Collector, Result
from genctl.io.rows import row_seed
from genctl.params import DEFAULT_NEW_TOKENS, Runtime, knobs

if TYPE_CHECKING:
    from genctl.engines.planner import Prompt

CHANGEABLE = frozenset({"system", "seed", "truncate", "row_timeout"})  # of the settings of a run, those of a turn

Listener = Callable[[Event], object]


class Refused(GenctlError):
    """An answer that failed."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message, hint=failed.hint)
        self.code = failed.code


@dataclass(frozen=True)
class PlannedTurn:
    """A request that is about to be sent, with what it reads."""

    request: Request
    prompt: Prompt | None  # None: a server makes it
    prefill: str

    @property
    def note(self) -> str:
        """What the writer of the prompt should know; "" where there is nothing."""
        return "" if self.prompt is None else self.prompt.note

    @property
    def opening(self) -> str:
        """The text of the prompt; "" where a server makes it."""
        return "" if self.prompt is None else self.prompt.text


class Chat:
    """A conversation. `layers` are the settings without those of the checkpoint.

    Raises UsageError, PresetError or ModelError for settings that the checkpoint, or a chat, cannot do.
    """

    def __init__(
        self, engine: Engine, partner: Partner, layers: Sequence[Layer], story: Story, *, seed: int, prefill: str = ""
    ) -> None:
        self.engine, self.partner, self.story = engine, partner, story
        self.seed, self.prefill = seed, prefill
        self.thoughts: dict[int, str] = {}  # of a server, before the answer with this number
        if prefill and partner.kind == "alone":
            raise UsageError(
                f"--prefill begins the answer in the prompt, and {engine.about.name} is an encoder-decoder, "
                "whose answers are apart from their prompts",
                hint="--set prefix=TEXT begins them",
            )
        self.layers = [*layers] if partner.template or partner.session is None else [*layers, _NO_TEMPLATE]
        # how the next turn is decoded, and the knobs that the chat's commands have set
        self.base, self.base_plan, self.own_values = self._settled(story.settings)

    # -- settings ------------------------------------------------------------------------------------------------------

    def change(self, name: str, argument: str) -> None:
        """A step `set`, `unset`, `preset` or `system`. Raises what flags raise for a value that cannot be used."""
        if name == "set":
            argument = setting(argument)
        elif name == "unset" and _knob(argument) not in self.own_values:
            raise UsageError(f"/unset {argument}: no /set or /preset of this chat has set it")
        elif name == "system":
            self.partner.check_system(argument or None, "/system")
        self.story.file.typed.add((name, argument))
        settled = self._settled([*self.story.settings, (name, argument)])
        self.story.do(name, argument)
        self.base, self.base_plan, self.own_values = settled

    def refold(self) -> None:
        """The settings after an undo or a redo."""
        self.base, self.base_plan, self.own_values = self._settled(self.story.settings)

    def _settled(self, settings: Iterable[tuple[str, str]]) -> tuple[Resolved, JobPlan, dict[str, Any]]:
        """The settings of the next turn, its plan, and the settings that the chat's commands have made."""
        layers = self._own(settings)
        resolved = self.engine.resolve([*self.layers, *layers])
        check_settings(resolved)
        if self.partner.session is not None:
            check_trust(resolved.settings, self.partner.session.planner.trust)
        plan = self.engine.plan(resolved)
        values = {key: value for layer in layers for key, value in layer.values.items()}
        return resolved, plan, {key: value for key, value in values.items() if value is not None and key != "about"}

    def _own(self, settings: Iterable[tuple[str, str]]) -> list[Layer]:
        """The layers of the chat's own settings, lowest first."""
        layers: list[Layer] = []
        file = self.story.file
        for name, argument in _in_force(settings):
            typed = not file.found or (name, argument) in file.typed
            if name == "preset":
                layers += presets.load([argument]) if typed else file.preset(argument)
            elif name == "system":
                layers.append(Layer("/system", {"system": argument or None}, said="row", typed=True))
            elif name == "set":
                layer = presets.parse_set(argument)
                where = {key: f"/set {key}" for key in layer.values}
                layer = Layer("/set", layer.values, where, "row", typed=True)
                layers += [layer] if typed else file.layers(layer)
            elif name == "unset":
                layers = [
                    replace(layer, values={key: value for key, value in layer.values.items() if key != argument})
                    for layer in layers
                ]
        return layers

    # -- turns ---------------------------------------------------------------------------------------------------------

    def sent(self, end: int | None) -> list[dict[str, str]]:
        """The messages of a branch that go into the prompt."""
        path = [message.plain for message in self.story.conversation.path(end)]
        left_out = self.story.left_out
        return path[:1] + path[left_out + 1 :] if path[:1] and path[0]["role"] == "system" else path[left_out:]

    def plan(
        self, text: str, parent: int | None, *, lane: str = "", own_id: str = "", base: Resolved | None = None
    ) -> PlannedTurn:
        """The turn that says a text after message `parent`. Raises what planning raises.

        `lane` names it in events; `own_id` is an id that the input gives it, of which its seed is made.
        """
        messages = [*self.sent(parent), {"role": "user", "content": text}]
        return self._plan(messages, parent, lane, own_id, base or self.base)

    def plan_cut_off(self) -> PlannedTurn:
        """The turn whose answer was cut off, as it was sent: with its seed, and its place among the attempts."""
        _, prefill, nodes = self.story.written()
        question = self.story.conversation.turn(None)
        attempts, before = self.story.conversation.attempts(question.number) - 1, self.prefill
        self.prefill = prefill
        try:
            turn = self._plan(self.sent(question.number), question.parent, "", "", self.base, attempts)
        finally:
            self.prefill = before
        seed = self.story.tree.nodes[nodes[-1]].seed if nodes else None
        return turn if seed is None else replace(turn, request=replace(turn.request, seed=seed))

    def plan_again(self) -> PlannedTurn:
        """Another answer to the last turn. Raises UsageError without one."""
        question = self.story.conversation.turn(None)
        attempts = self.story.conversation.attempts(question.number)
        return self._plan(self.sent(question.number), question.parent, "", "", self.base, attempts)

    def _plan(
        self,
        messages: Sequence[dict[str, str]],
        parent: int | None,
        lane: str,
        own_id: str,
        base: Resolved,
        attempts: int = 0,
    ) -> PlannedTurn:
        turns = self.story.conversation.turns_to(parent)
        start = self.seed if base.runtime.seed is None else base.runtime.seed
        key, index = (own_id or str(turns), turns) if not attempts else (f"{turns} again {attempts}", 1)
        seed = row_seed(start, key, index)
        request = self.partner.request(
            lane or str(turns), base, seed, messages, self.prefill, place=turns + 1, index=turns
        )
        return PlannedTurn(request, None if self.partner.session is None else self.partner.read(request), self.prefill)

    def room(self, turn: PlannedTurn) -> tuple[int, int] | None:
        """The tokens of a prompt, and those that fit behind it; None where nothing limits them, or a server knows."""
        context = self.partner.context
        if context is None or turn.prompt is None:
            return None
        return len(turn.prompt.ids), context - len(turn.prompt.ids)

    def too_long(self, turn: PlannedTurn) -> bool:
        """Whether the context has no room for an answer of the usual length: max_new_tokens, or an eighth of it."""
        room, context = self.room(turn), self.partner.context
        if room is None or context is None or turn.request.resolved.runtime.truncate is not None:
            return False
        return room[1] < min(
            turn.request.resolved.generation.max_new_tokens or DEFAULT_NEW_TOKENS, max(context // 8, 1)
        )

    def leave_out_for(self, plan: Callable[[], PlannedTurn], end: int | None) -> int | None:
        """How many of the oldest messages have to be left out of a prompt, exchange by exchange; None: all but one do
        not suffice."""
        path, before = self.story.conversation.path(end), self.story.left_out
        first = 1 if path and path[0].role == "system" else 0
        last = len(path) - first
        places = [place for place in range(before + 1, last) if path[place + first].role == "user"]
        places += [last] if last > before else []

        def fits(place: int) -> bool:
            self.story.left_out = place
            return not self.too_long(plan())

        try:
            found = bisect_left(places, True, key=fits)  # fewer messages are shorter
        finally:
            self.story.left_out = before
        return places[found] if found < len(places) else None

    def hear(self, role: str, content: str) -> None:
        """A message that is not answered: of the system, or an answer that somebody else wrote."""
        message = {"role": role, "content": content}
        self.story.do("message", json.dumps(message, ensure_ascii=False))

    def finish_cut_off(self, turn: PlannedTurn, listeners: Sequence[Listener], report: Report, flow: Flow) -> Result:
        """Go on with the answer that was cut off when the process was killed.

        What was written stays, whatever limit holds now. Raises Differs if other ones come, and Refused: then
        the answer is as it was.
        """
        resolved, tree = turn.request.resolved, self.story.tree
        start, prefill, nodes = self.story.written()
        limit = resolved.generation.max_new_tokens
        if limit is not None and limit < len(nodes):
            resolved = replace(resolved, generation=replace(resolved.generation, max_new_tokens=len(nodes)))
            turn = replace(turn, request=replace(turn.request, resolved=resolved))
        entry = tree.nodes[nodes[-1]].settings if nodes else tree.entry_of(self.own_values)
        knobs = tree.settings[-1 if entry is None else entry]
        with self.story.again():
            self.story.begin_answer(start, prefill, knobs)
            return self._streamed(turn, listeners, report, flow)

    def answer_last(self, turn: PlannedTurn, listeners: Sequence[Listener], report: Report, flow: Flow) -> Result:
        """Answer the last turn, which the process was killed before. Raises Refused; then it was not said."""
        try:
            return self.answer("read", turn, listeners, report, flow, complete=True)
        except Refused:
            if self.story.unanswered:
                self.story.undo()
            raise

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(
        self,
        line: str,
        turn: PlannedTurn,
        listeners: Sequence[Listener],
        report: Report,
        flow: Flow,
        *,
        complete: bool = False,
    ) -> Result:
        """Do the step `line` (`said`, `edited`, or `read` for another answer), and read the answer.

        Raises Refused where there is none; then nothing was said. `complete`: the step is there, maybe in part.
        """
        if turn.prompt is None:
            ids: Sequence[int] = [text_id(json.dumps(turn.request.messages, ensure_ascii=False))]
            texts = [""]
        else:
            ids, texts = turn.prompt.ids, self._texts(turn.prompt.ids)
        end = self.story.complete(ids, texts) if complete else None
        if end is None:
            end = self.story.give(line, ids, texts)
        self.story.begin_answer(end, turn.prefill, self.own_values)
        return self._streamed(turn, listeners, report, flow)

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """What each token of a prompt adds to its text."""
        from genctl.models.text import detokenizer

        assert self.partner.session is not None
        words = detokenizer(self.partner.session.loaded.tokenizer)
        return [words.push(id) for id in ids]

    def _streamed(self, turn: PlannedTurn, listeners: Sequence[Listener], report: Report, flow: Flow) -> Result:
        writer, collector = _AnswerWriter(self.story), Collector()
        result: Result | None = None
        with closing(self.engine.stream(iter([turn.request]), report, flow)) as stream:
            for event in stream:
                writer.feed(event)
                for listener in listeners:
                    listener(event)
                found = collector.feed(event)
                result = found or result
        hypotheses = [] if result is None else [sequence.hypothesis for sequence in result.sequences]
        if result is None or (result.error is None and not any(one.length or one.thought_text for one in hypotheses)):
            self.story.abandon()  # interrupted before anything was written
            return Result(turn.request.id, turn.opening, "", None, self.engine.about.name, ())
        if result.error is not None:
            self.story.abandon()
            raise Refused(result.error)
        self.thoughts[self.story.end_answer().number] = hypotheses[0].thought_text
        return result


class _AnswerWriter:
    """Writes the tokens of an answer to the tree: at once, and those of a search when it is done."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.seed: int | None = None
        self.waits = False  # rows compete, or a token of the answer was not certain
        self.written = 0

    def feed(self, event: Event) -> None:
        if isinstance(event, Began):
            self.seed = event.seed
            self.waits = event.strategy not in ("greedy", "sample")
        elif isinstance(event, Stepped):
            self.waits = self.waits or len(event.children) != 1
            if not self.waits:
                for token in event.children[0].written:
                    self._write(token)
        elif isinstance(event, Finished) and event.hypotheses and self.waits:
            best = event.hypotheses[0]
            for place, id in enumerate(best.tokens):
                # the whole text is that of the last token: a search has told the pieces of other rows, too
                self._write(Token(id, 0.0, best.text if place + 1 == len(best.tokens) else ""))

    def _write(self, token: Token) -> None:
        self.story.token(token, self.seed)
        self.written += 1


def _in_force(settings: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The settings of a chat without those that a later one replaces: no more than there are knobs and presets."""
    kept: dict[tuple[str, str], str] = {}
    for name, argument in settings:
        what = "" if name == "system" else argument.partition("=")[0] if name == "set" else argument
        if name == "unset":
            kept.pop(("set", what), None)
        kept.pop((name, what), None)
        kept[name, what] = argument
    return [(name, argument) for (name, _), argument in kept.items()]


_NO_TEMPLATE = Layer("genctl chat", {"chat": False}, said="user")


def setting(argument: str) -> str:
    """`KEY=VALUE` of what follows /set: `seed=5`, `seed = 5` or `seed 5`. Raises UsageError."""
    found = re.fullmatch(r"([\w-]+)(?:\s*=|\s)\s*(.*)", argument.strip(), re.DOTALL)
    key, value = found.groups() if found else (argument, "")
    return f"{_knob(key)}={value}"


def news(before: Resolved, now: Resolved) -> list[str]:
    """Effects of settings that may surprise and were not said before; that tokens are drawn is said once."""
    drawn = before.generation.do_sample and now.generation.do_sample
    said = {*before.notices, *([sampling_notice(now.settings)] if drawn else [])}
    return [line for line in now.notices if line not in said]


def _knob(text: str) -> str:
    """The name of a knob that a turn may have. Raises UsageError."""
    name = text.strip().replace("-", "_")
    if name in NOT_A_TURN:
        raise UsageError(f"/set {name}: {NOT_A_TURN[name]}")
    return name


NOT_A_TURN = {
    name: "it belongs to the whole chat: start genctl chat with it"
    for name in knobs(Runtime)
    if name not in CHANGEABLE and name in known()
}
