"""The chat itself, without a terminal: turns become requests, answers become messages of its log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

from genctl.commands.chat.log import Change, ChatLog, Message
from genctl.commands.chat.options import check_settings
from genctl.commands.chat.partner import Partner
from genctl.commands.chat.saved_settings import to_save, usable
from genctl.config import presets
from genctl.config.check import known
from genctl.config.conflicts import sampling_notice
from genctl.config.layers import Layer, Resolved
from genctl.engines.protocol import Flow, JobPlan, Report, Request
from genctl.errors import GenctlError, UsageError
from genctl.events import Event, Failed
from genctl.events.results import Collector, Result
from genctl.io.output import open_beside
from genctl.io.rows import random_seed, row_seed
from genctl.io.sessions import new_file
from genctl.params import Runtime, knobs

CHANGEABLE = frozenset({"system", "seed", "truncate", "row_timeout"})  # of the settings of a run, those of a turn
NOT_A_TURN = {
    name: "it belongs to the whole chat: start genctl chat with it"
    for name in knobs(Runtime)
    if name not in CHANGEABLE and name in known()
}
_NO_TEMPLATE = Layer("genctl chat", {"chat": False}, declared="user")

Listener = Callable[[Event], object]


class Refused(GenctlError):
    """An answer that failed."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message, hint=failed.hint)
        self.code = failed.code


class PlannedTurn(NamedTuple):
    """A request that is about to be sent, with its prompt."""

    request: Request
    question: Message  # of the user, which it answers; `id` is -1 before it is in the log
    ids: tuple[int, ...] = ()  # of the prompt; () where a server makes it
    opening: str = ""  # its text
    note: str = ""  # what its writer should know


class Chat:
    """A conversation. `layers` are the settings without those of the checkpoint.

    Raises UsageError, PresetError or ModelError for settings that the checkpoint, or a chat, cannot do.
    """

    def __init__(
        self, partner: Partner, layers: Sequence[Layer], log: ChatLog, prefill: str, note: Callable[[str], object]
    ) -> None:
        """`note` gets a sentence about a setting of the log that is not used."""
        self.engine, self.partner, self.prefill, self._note = partner.engine, partner, prefill, note
        self.thoughts: dict[int, str] = {}  # of a server, by the id of the answer
        self._use(log, layers)

    def _use(self, log: ChatLog, layers: Sequence[Layer]) -> None:
        """Continue a log with its settings. Raises what settings raise; then the log is closed."""
        try:
            # how the next turn is decoded, and the settings that the chat's commands have made
            self.base, self.base_plan, self.own_values = self._settled(layers, log.settings)
        except BaseException:
            log.leave()
            raise
        self.log, self.layers = log, layers
        self.thoughts.clear()

    def switch(self, log: ChatLog, layers: Sequence[Layer]) -> None:
        """Continue another log, and close this one. Raises what settings raise, and OutputError."""
        before = self.log
        self._use(log, layers)
        before.close()

    # -- settings ------------------------------------------------------------------------------------------------------

    def change(self, name: str, argument: str) -> None:
        """A setting `set`, `unset`, `preset` or `system`. Raises what flags raise for a value that cannot be used."""
        if name == "set":
            argument = setting(argument)
        elif name == "unset" and (argument := _knob(argument)) not in self.own_values:
            raise UsageError(f"/unset {argument}: no /set or /preset of this chat has set it")
        elif name == "system":
            self.partner.check_system(argument or None, "/system")
        settled = self._settled(self.layers, [*self.log.settings, Change(name, argument)])
        self.log.change(name, argument)
        self.base, self.base_plan, self.own_values = settled

    def _settled(self, below: Sequence[Layer], changes: Iterable[Change]) -> tuple[Resolved, JobPlan, dict[str, Any]]:
        layers: list[Layer] = []
        for name, argument, typed in changes:
            if name == "unset":
                layers = [
                    replace(layer, values={key: value for key, value in layer.values.items() if key != argument})
                    for layer in layers
                ]
            elif name == "preset":
                if typed or not presets.is_path(argument):
                    layers += presets.load([argument])
                else:
                    self._note(f"the chat's preset = {argument!r:.60} is not used: it names a file; --preset names it")
            elif name == "system":
                layers.append(Layer("/system", {"system": argument or None}, declared="row", typed=True))
            else:
                layer = presets.parse_set(argument)
                where = {key: f"/set {key}" for key in layer.values}
                layer = Layer("/set", layer.values, where, "row", typed=True)
                layers.append(layer if typed else usable(layer, self._note))
        text = [] if self.partner.template or self.partner.session is None else [_NO_TEMPLATE]
        resolved = self.engine.resolve([*below, *text, *layers])
        check_settings(resolved)
        values = {key: value for layer in layers for key, value in layer.values.items()}
        own = {key: value for key, value in values.items() if value is not None and key != "about"}
        return resolved, self.engine.plan(resolved), own

    def begin_anew(self) -> None:
        """Close the log. The next turn begins another, in a new file, with the same settings. Raises OutputError."""
        before = self.log
        header = replace(
            before.header,
            model=self.partner.name,
            checkpoint=self.partner.fingerprint(),
            seed=before.header.seed if self.base.runtime.seed is not None else random_seed(),
            settings=to_save(self.layers),
        )
        log = ChatLog(header, lambda words: open_beside(new_file("chat", words)), before.settings)
        self.switch(log, self.layers)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def plan(
        self, text: str, parent: int | None, *, lane: str = "", own_id: str = "", base: Resolved | None = None
    ) -> PlannedTurn:
        """The turn that says a text after message `parent`. Raises what planning raises.

        `lane` names it in events; `own_id` is an id that the input gives it, of which its seed is made.
        """
        base, turns = base or self.base, self.log.turns_to(parent)
        seed = row_seed(self._start(base), own_id or str(turns), turns)
        messages = [*self.log.path_to(parent), Message(-1, parent, "user", text)]
        return self._planned(messages, lane or str(turns), turns, base, seed)

    def plan_again(self) -> PlannedTurn:
        """Another answer to the last turn, or its first one. Raises UsageError without a turn."""
        question = self.log.turn()
        turns, attempts = self.log.turns_to(question.parent), len(self.log.answers(question.id))
        seed = question.seed
        if attempts or seed is None:
            key, index = (f"{turns} again {attempts}", 1) if attempts else (str(turns), turns)
            seed = row_seed(self._start(self.base), key, index)
        return self._planned(self.log.path_to(question.id), str(turns), turns, self.base, seed)

    def _start(self, base: Resolved) -> int:
        """The seed of which those of the turns are made."""
        return self.log.header.seed if base.runtime.seed is None else base.runtime.seed

    def _planned(self, messages: Sequence[Message], lane: str, turns: int, base: Resolved, seed: int) -> PlannedTurn:
        """The turn that answers the last message, with its prompt."""
        plain = [message.plain for message in messages]
        request = self.partner.request(lane, base, seed, plain, self.prefill, index=turns)
        if self.partner.session is None:
            return PlannedTurn(request, messages[-1])
        prompt = self.partner.session.planner.read(request)
        return PlannedTurn(request, messages[-1], prompt.ids, prompt.text, prompt.note)

    # -- messages ------------------------------------------------------------------------------------------------------

    def answer(self, turn: PlannedTurn, listeners: Sequence[Listener], report: Report, flow: Flow) -> Result:
        """Write the user's message, unless it is there, and its answer.

        Raises Refused where there is none. Then, and where it was interrupted before it had a token (a result without
        sequences), the chat is as it was.
        """
        question, collector, is_new = turn.question, Collector(), turn.question.id < 0
        if is_new:
            seed = turn.request.seed
            question = self.log.add_message("user", question.content, question.parent, lasting=False, seed=seed)
        result: Result | None = None
        try:
            with closing(self.engine.stream(iter([turn.request]), report, flow)) as stream:
                for event in stream:
                    for listener in listeners:
                        listener(event)
                    result = collector.feed(event) or result
            if result is not None and result.error is not None:
                raise Refused(result.error)
        except GenctlError:
            # a server may be there again when the chat is opened next
            if self.log.unanswered and (is_new or self.partner.session is not None):
                self.log.drop_question()
            raise
        sequences = () if result is None else result.sequences
        if result is None or not any(one.hypothesis.length or one.hypothesis.thought_text for one in sequences):
            if is_new:
                self.log.drop_question()
            return Result(turn.request.id, turn.opening, "", None, self.engine.about.name, ())
        best = sequences[0].hypothesis
        message = self.log.add_message(
            "assistant",
            self.prefill + best.text,
            question.id,
            seed=result.seed,
            finish_reason=best.reason,
            prefill=self.prefill,
            token_ids=() if self.partner.session is None else best.tokens,
        )
        self.thoughts[message.id] = best.thought_text
        return result


def setting(argument: str) -> str:
    """`KEY=VALUE` of what follows /set: `seed=5`, `seed = 5` or `seed 5`. Raises UsageError."""
    found = re.fullmatch(r"([\w-]+)(?:\s*=|\s)\s*(.*)", argument.strip(), re.DOTALL)
    key, value = found.groups() if found else (argument, "")
    return f"{_knob(key)}={value}"


def new_notices(before: Resolved, now: Resolved) -> list[str]:
    """Effects of settings that may surprise and were not there before; a note says once that tokens are drawn."""
    drawn = before.generation.do_sample and now.generation.do_sample
    known = {*before.notices, *([sampling_notice(now.settings)] if drawn else [])}
    return [line for line in now.notices if line not in known]


def _knob(text: str) -> str:
    """The name of a knob that a turn may have. Raises UsageError."""
    name = text.strip().replace("-", "_")
    if name in NOT_A_TURN:
        raise UsageError(f"/set {name}: {NOT_A_TURN[name]}")
    return name
