"""The chat itself, without a terminal: turns become requests, answers become messages of its log."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from genctl.commands.chat.log import Change, ChatLog, Message, Role
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
from genctl.params import DEFAULT_NEW_TOKENS, Runtime, knobs

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


@dataclass(frozen=True)
class PlannedTurn:
    """A request that is about to be sent, with its prompt.

    It answers `question`, or a new message `text` of the user after message `parent`.
    """

    request: Request
    ids: tuple[int, ...]  # of the prompt; () where a server makes it
    opening: str  # its text
    note: str  # what its writer should know
    text: str = ""
    parent: int | None = None
    question: Message | None = None


class Chat:
    """A conversation. `layers` are the settings without those of the checkpoint.

    Raises UsageError, PresetError or ModelError for settings that the checkpoint, or a chat, cannot do.
    """

    def __init__(
        self,
        partner: Partner,
        layers: Sequence[Layer],
        log: ChatLog,
        *,
        prefill: str = "",
        note: Callable[[str], object],
    ) -> None:
        """`note` gets a sentence about a setting of the log that is not used."""
        self.engine, self.partner, self.log, self.prefill, self._note = partner.engine, partner, log, prefill, note
        self.thoughts: dict[int, str] = {}  # of a server, by the id of the answer
        if prefill and partner.kind == "alone":
            raise UsageError(
                f"--prefill begins the answer in the prompt, and {partner.name} is an encoder-decoder, "
                "whose answers are apart from their prompts",
                hint="--set prefix=TEXT begins them",
            )
        self.layers = [*layers] if partner.template or partner.session is None else [*layers, _NO_TEMPLATE]
        # how the next turn is decoded, and the settings that the chat's commands have made
        self.base, self.base_plan, self.own_values = self._settled(log.settings)

    # -- settings ------------------------------------------------------------------------------------------------------

    def change(self, name: str, argument: str) -> None:
        """A setting `set`, `unset`, `preset` or `system`. Raises what flags raise for a value that cannot be used."""
        if name == "set":
            argument = setting(argument)
        elif name == "unset" and (argument := _knob(argument)) not in self.own_values:
            raise UsageError(f"/unset {argument}: no /set or /preset of this chat has set it")
        elif name == "system":
            self.partner.check_system(argument or None, "/system")
        settled = self._settled([*self.log.settings, Change(name, argument)])
        self.log.change(name, argument)
        self.base, self.base_plan, self.own_values = settled

    def refresh(self) -> None:
        """Take the settings from the log again, after an undo or a redo."""
        self.base, self.base_plan, self.own_values = self._settled(self.log.settings)

    def _settled(self, changes: Iterable[Change]) -> tuple[Resolved, JobPlan, dict[str, Any]]:
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
        resolved = self.engine.resolve([*self.layers, *layers])
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
            settings=to_save(layer for layer in self.layers if layer.origin != _NO_TEMPLATE.origin),
        )
        self.log = ChatLog(header, lambda words: open_beside(new_file("chat", words)), before.settings)
        self.thoughts.clear()
        before.close()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def prompt_messages(self, end: int | None) -> list[dict[str, str]]:
        """The messages of a branch that go into the prompt."""
        path = [message.plain for message in self.log.path_to(end)]
        left_out = self.log.left_out
        return path[:1] + path[left_out + 1 :] if path[:1] and path[0]["role"] == "system" else path[left_out:]

    def plan(
        self, text: str, parent: int | None, *, lane: str = "", own_id: str = "", base: Resolved | None = None
    ) -> PlannedTurn:
        """The turn that says a text after message `parent`. Raises what planning raises.

        `lane` names it in events; `own_id` is an id that the input gives it, of which its seed is made.
        """
        messages = [*self.prompt_messages(parent), {"role": "user", "content": text}]
        base, turns = base or self.base, self.log.turns_to(parent)
        seed = row_seed(self._start(base), own_id or str(turns), turns)
        return self._planned(messages, turns, lane, base, seed, text=text, parent=parent)

    def plan_again(self) -> PlannedTurn:
        """Another answer to the last turn, or its first one. Raises UsageError without a turn."""
        question = self.log.turn()
        turns, attempts = question.turns - 1, len(self.log.answers(question.id))
        seed = question.seed
        if attempts or seed is None:
            key, index = (f"{turns} again {attempts}", 1) if attempts else (str(turns), turns)
            seed = row_seed(self._start(self.base), key, index)
        messages = self.prompt_messages(question.id)
        return self._planned(messages, turns, "", self.base, seed, parent=question.parent, question=question)

    def _start(self, base: Resolved) -> int:
        """The seed of which those of the turns are made."""
        return self.log.header.seed if base.runtime.seed is None else base.runtime.seed

    def _planned(
        self, messages: Sequence[Mapping[str, str]], turns: int, lane: str, base: Resolved, seed: int, **answers: Any
    ) -> PlannedTurn:
        """The turn with its prompt. `answers`: the fields that say what it answers."""
        place = {"place": turns + 1, "index": turns}
        request = self.partner.request(lane or str(turns), base, seed, messages, self.prefill, **place)
        if self.partner.session is None:
            return PlannedTurn(request, (), "", "", **answers)
        prompt = self.partner.session.planner.read(request)
        return PlannedTurn(request, prompt.ids, prompt.text, prompt.note, **answers)

    def too_long(self, turn: PlannedTurn) -> bool:
        """Whether the context has no room for an answer of the usual length: max_new_tokens, or an eighth of it."""
        context = self.partner.context
        if context is None or turn.request.resolved.runtime.truncate is not None:
            return False
        usual = turn.request.resolved.generation.max_new_tokens or DEFAULT_NEW_TOKENS
        return context - len(turn.ids) < min(usual, max(context // 8, 1))

    def leave_out_for(self, plan: Callable[[], PlannedTurn], end: int | None) -> int | None:
        """How many of the oldest messages have to be left out of a prompt, exchange by exchange; None: all but one do
        not suffice."""
        path, before = self.log.path_to(end), self.log.left_out
        first = 1 if path and path[0].role == "system" else 0
        last = len(path) - first
        places = [place for place in range(before + 1, last) if path[place + first].role == "user"]
        places += [last] if last > before else []

        def fits(place: int) -> bool:
            self.log.left_out = place
            return not self.too_long(plan())

        try:
            found = bisect_left(places, True, key=fits)  # fewer messages are shorter
        finally:
            self.log.left_out = before
        return places[found] if found < len(places) else None

    # -- messages ------------------------------------------------------------------------------------------------------

    def append_message(self, role: Role, content: str) -> None:
        """A message that is not answered: of the system, or an answer that somebody else wrote."""
        self.log.add_message(role, content, self.log.end)

    def answer(self, turn: PlannedTurn, listeners: Sequence[Listener], report: Report, flow: Flow) -> Result:
        """Write the user's message, unless it is there, and its answer.

        Raises Refused where there is none. Then, and where it was interrupted before it had a token (a result without
        sequences), the chat is as it was.
        """
        question, collector = turn.question, Collector()
        if question is None:
            seed = turn.request.seed
            question = self.log.add_message("user", turn.text, turn.parent, lasting=False, seed=seed)
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
            if self.log.unanswered and (turn.question is None or self.partner.session is not None):
                self.log.undo()
            raise
        sequences = () if result is None else result.sequences
        if result is None or not any(one.hypothesis.length or one.hypothesis.thought_text for one in sequences):
            if turn.question is None:
                self.log.undo()
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
