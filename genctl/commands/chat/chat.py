"""The chat without its terminal: the engine, the settings, and the turns that become messages of the log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

from genctl.commands.chat import thinking
from genctl.commands.chat.log import SCHEMA, Change, ChatHeader, ChatLog, Message
from genctl.commands.chat.options import check_settings
from genctl.config import presets
from genctl.config.check import known, shown
from genctl.config.conflicts import CHAT_KNOBS
from genctl.config.layers import Layer, Resolved
from genctl.config.listed_knobs import LISTS
from genctl.config.settings import SavedLayer, objections, saved_layers
from genctl.engines.protocol import Engine, Flow, JobPlan, Report, Request
from genctl.errors import GenctlError, ModelError, UsageError
from genctl.events import Event
from genctl.events.results import Collector, Result
from genctl.io.output import open_beside
from genctl.io.rows import random_seed, row_seed
from genctl.io.sessions import new_file
from genctl.params import Generation, Runtime, knobs, spelled

CHANGEABLE = frozenset({"system", "seed", "truncate", "row_timeout"})  # run settings that may change between turns
# Settings that a chat file may make. Anyone may have written it, so it chooses no files, checkpoints, servers or code.
SAVED = frozenset({*knobs(Generation), *LISTS, *CHANGEABLE, "src_lang", "tgt_lang", *CHAT_KNOBS})
_NO_TEMPLATE = Layer("genctl chat", {"chat": False}, declared="user")

Listener = Callable[[Event], object]
Note = Callable[[str], object]


class PlannedTurn(NamedTuple):
    """A request that is ready to be sent, with its prompt."""

    request: Request
    question: Message  # the user's message; its `id` is -1 until it is in the log
    ids: tuple[int, ...] = ()  # of the prompt; () if a server builds it
    opening: str = ""  # the prompt's text
    note: str = ""  # a remark for the user


class Chat:
    """A conversation. `layers` are the settings without those of the checkpoint; `prefill` begins each answer.

    A checkpoint on this machine (`session`) formats the messages with its chat `template`; without one it continues
    their joined text. A server (`session` is None) builds the prompts itself. `note` is called with a sentence for each
    setting of the log that is ignored.

    Raises UsageError, PresetError or ModelError for settings that the checkpoint, or a chat, does not support.
    """

    def __init__(self, engine: Engine, layers: Sequence[Layer], log: ChatLog, prefill: str, note: Note) -> None:
        from genctl.engines.session import Session

        self.engine, self.name, self.prefill, self._note = engine, engine.about.name, prefill, note
        self.session, self.template = engine if isinstance(engine, Session) else None, ""
        self.remark = "with a server there is no /prompt and no processor of genctl's own"
        if self.session is not None:
            from genctl.models import chat

            self.remark = ""
            if engine.about.is_encoder_decoder:
                raise ModelError(
                    f"{self.name} is an encoder-decoder, which reads no conversation",
                    hint="genctl run answers prompts that stand alone",
                )
            try:
                self.template = chat.check_template(self.session.loaded.tokenizer, self.name)
            except ModelError:
                self.remark = (
                    f"{self.name} has no chat template: it continues the text, and what you type is added to it"
                )
            self.session.keep_texts()
        self.log, self.layers = log, layers
        # how the next turn is decoded, and the settings made by the chat's commands
        self.base, self.base_plan, self.own_values = self._settled(layers, log.settings)

    def begin_anew(self) -> None:
        """Close the log. The next turn begins another one in a new file, with the same settings. Raises OutputError."""
        before = self.log
        seed = before.header.seed if self.base.runtime.seed is not None else random_seed()
        header = ChatHeader(SCHEMA, self.name, fingerprint_of(self.engine), seed, to_save(self.layers))
        self.log = ChatLog(header, lambda words: open_beside(new_file("chat", words)), before.settings)
        before.close()

    # -- settings ------------------------------------------------------------------------------------------------------

    def change(self, name: str, argument: str) -> None:
        """Apply a `set`, `unset`, `preset` or `system`. Raises the errors that flags raise for an invalid value."""
        if name == "set":
            argument = setting(argument)
        elif name == "unset" and (argument := _knob(argument)) not in self.own_values:
            raise UsageError(f"/unset {argument}: no /set or /preset of this chat has set it")
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
        text = [] if self.template or self.session is None else [_NO_TEMPLATE]
        resolved = self.engine.resolve([*below, *text, *layers])
        check_settings(resolved)
        self._check_system(resolved)
        values = {key: value for layer in layers for key, value in layer.values.items()}
        own = {key: value for key, value in values.items() if value is not None and key != "about"}
        return resolved, self.engine.plan(resolved), own

    def _check_system(self, resolved: Resolved) -> None:
        """Raises UsageError if these settings have a system message and the checkpoint's template does not take one."""
        setting = resolved.settings.get("system")
        if setting is None or setting.value is None or self.session is None:
            return
        if not self.template:
            raise UsageError(f"{setting.place} sets a system message, but {self.name} has no chat template for it")
        from genctl.models import chat

        tokenizer: Any = self.session.loaded.tokenizer
        try:
            chat.render_chat_text(tokenizer, [{"role": "user", "content": "x"}], system=setting.value, name=self.name)
        except ModelError as error:
            raise UsageError(
                f"{setting.place} sets a system message, but {error.message.replace('the', 'the checkpoint’s', 1)}",
                hint="say it in the first turn",
            ) from None

    # -- turns ---------------------------------------------------------------------------------------------------------

    def plan(self, question: Message, base: Resolved | None = None, *, lane: str = "", own_id: str = "") -> PlannedTurn:
        """Plan the turn that answers a message: an `unsent` one, or one of the log again. Raises the planner's errors.

        `lane` is its name in events; `own_id` is its id in the input, from which its seed is derived.
        """
        base = base or self.base
        turns, attempts = self.log.turns_to(question.parent), len(self.log.answers(question.id))
        seed = question.seed
        if attempts or seed is None:
            start = self.log.header.seed if base.runtime.seed is None else base.runtime.seed
            key, index = (f"{turns} again {attempts}", 1) if attempts else (own_id or str(turns), turns)
            seed = row_seed(start, key, index)
        messages = [*self.log.path_to(question.parent), question]
        request = Request(lane or str(turns), base, seed, place=turns + 1, index=turns)
        if self.template or self.session is None:
            history = tuple(map(self._of_history, messages))
            request = replace(request, messages=history, prefill=self.prefill)
        else:
            request = replace(request, prompt="".join(message.content for message in messages) + self.prefill)
        if self.session is None:
            return PlannedTurn(request, question)
        prompt = self.session.planner.read(request)
        return PlannedTurn(request, question, prompt.ids, prompt.text, prompt.note)

    def _of_history(self, message: Message) -> dict[str, str]:
        """A message for the template, with the thought as a field of its own if the template does not split it off."""
        plain = {"role": message.role, "content": message.content}
        if message.role != "assistant" or "reasoning_content" not in self.template or "</think>" in self.template:
            return plain
        thought, answer = thinking.split(message.content)
        return {**plain, "content": answer, "reasoning_content": thought} if thought else plain

    def answer(self, turn: PlannedTurn, listen: Listener, report: Report, flow: Flow) -> Result | None:
        """Add the user's message, unless the log has it, and its answer.

        Raises GenctlError if there is no answer. Then, and if interrupted before the first token (None), a new message
        is undone. An error of a checkpoint also undoes an earlier message that was left unanswered.
        """
        question, collector, is_new = turn.question, Collector(), turn.question.id < 0
        if is_new:
            question = self.log.add_message("user", question.content, question.parent, seed=turn.request.seed)
        result: Result | None = None
        try:
            with closing(self.engine.stream(iter([turn.request]), report, flow)) as stream:
                for event in stream:
                    listen(event)
                    result = collector.feed(event) or result
            if result is not None and result.error is not None:
                failed = GenctlError(result.error.message, hint=result.error.hint)
                failed.code = result.error.code
                raise failed
        except GenctlError:
            # an earlier message to a server stays: the server may be up again when the chat is reopened
            if self.log.unanswered and (is_new or self.session is not None):
                self.log.undo()
            raise
        sequences = () if result is None else result.sequences
        if result is None or not any(one.hypothesis.length or one.hypothesis.thought_text for one in sequences):
            if is_new:
                self.log.undo()
            return None
        best = sequences[0].hypothesis
        self.log.add_message(
            "assistant",
            self.prefill + best.text,
            question.id,
            seed=result.seed,
            finish_reason=best.reason,
            prefill=self.prefill,
            token_ids=() if self.session is None else best.tokens,
        )
        return result


def fingerprint_of(engine: Engine) -> str:
    """The identity of a checkpoint; "" for a server."""
    return next(iter(engine.fingerprints().values()), "")


def setting(argument: str) -> str:
    """`KEY=VALUE` from the argument of /set: `seed=5`, `seed = 5` or `seed 5`. Raises UsageError."""
    found = re.fullmatch(r"([\w-]+)(?:\s*=|\s)\s*(.*)", argument.strip(), re.DOTALL)
    key, value = found.groups() if found else (argument, "")
    return f"{_knob(key)}={value}"


def _knob(text: str) -> str:
    """The name of a knob. Raises UsageError for one that cannot change between turns."""
    name = text.strip().replace("-", "_")
    if name in knobs(Runtime) and name in known() and name not in CHANGEABLE:
        raise UsageError(f"/set {name}: it belongs to the whole chat: start genctl chat with it")
    return name


# -- the settings in the file of a chat --------------------------------------------------------------------------------


def to_save(layers: Iterable[Layer]) -> tuple[SavedLayer, ...]:
    """Layers as the header saves them."""
    return saved_layers((layer for layer in layers if layer.origin != "genctl chat"), SAVED)


def continued(
    layers: Iterable[Layer], saved: Iterable[SavedLayer], note: Note, overriding: Iterable[str] = ()
) -> list[Layer]:
    """The settings of a saved chat above those of `layers` that chats do not save: the device, the cache, the server.

    `note` is called with a sentence for each setting that is ignored, unless it is one of `overriding`.
    """
    found = [
        replace(layer, values={key: value for key, value in layer.values.items() if key not in SAVED})
        for layer in layers
    ]
    for each in saved:
        flag = each["kind"] == "command"  # of the earlier command, so below the flags of this one
        origin, kind = f"{each['origin']}, when the chat began", "user" if flag else each["kind"]
        layer = Layer(origin, each["values"], declared=kind, typed=each["typed"] or flag)
        found.append(usable(layer, note, overriding))
    return found


def usable(layer: Layer, note: Note, overriding: Iterable[str] = ()) -> Layer:
    """A layer from a chat file, without the settings that such a file may not make."""
    refused = objections(layer.values, SAVED)
    for key in refused.keys() - set(overriding):
        value = shown(layer.values[key])
        note(f"the chat's {key} = {value} is not used: it {refused[key]}; --{spelled(key)} sets it")
    return replace(layer, values={key: value for key, value in layer.values.items() if key not in refused})
