"""Plan requests as lanes: prompt ids, strategy, processors, stopping criteria."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from genctl import events
from genctl.config import chat_settings
from genctl.engines.protocol import trained_length_note
from genctl.engines.strategy_choice import StrategyChoice
from genctl.errors import ModelError, UsageError
from genctl.models.sizes import context_of, trained_length
from genctl.params import GRAMMARS, Generation, Runtime

if TYPE_CHECKING:
    from genctl.config.layers import Resolved
    from genctl.decode.runtime import ModelRuntime
    from genctl.decode.stopping.thoughts import Tags
    from genctl.decode.types import Lane
    from genctl.engines.lane_results import ForcedPhrases, LaneResults, RerankPlan
    from genctl.engines.protocol import Report, Request
    from genctl.models.hub import LoadedModel


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids."""

    ids: tuple[int, ...]
    text: str  # recorded
    shown: str = ""  # of a conversation: its messages
    note: str = ""  # what its writer should know
    spelled: tuple[int, ...] | None = None  # the ids of `text`, where that is all that was given


@dataclass(frozen=True)
class PlannedLane:
    """A lane, and the settings for its texts."""

    lane: Lane
    prompt: Prompt
    kind: str  # the strategy's name
    settings: dict[str, Any]  # for viewers
    ranking: RerankPlan | None = None
    phrases: ForcedPhrases | None = None
    draws: bool = True  # whether tokens are drawn, or a processor may draw

    def began(self, request: Request, model: str, *, encoder_decoder: bool) -> events.Began:
        """The event with which the lane begins."""
        read = self.lane.source or self.lane.tokens
        return events.Began(
            request.id,
            self.prompt.text,
            self.kind,
            model,
            request.seed if self.draws else None,
            self.settings,
            request.place,
            encoder_decoder,
            self.prompt.shown,
            request.run,
            prompt_ids=() if read == self.prompt.spelled else read,
        )

    def results(self) -> LaneResults | None:
        """Completes the lane's results; None if the core has completed them."""
        names = {getattr(processor, "name", None) for processor in self.lane.processors}
        grammar = thinking = None
        if not names.isdisjoint(GRAMMARS):
            from genctl.decode.processors.grammar import grammar_of

            grammar = grammar_of(self.lane.processors)
        if "thinking_budget" in names:
            from genctl.decode.processors.thinking import thinking_of

            thinking = thinking_of(self.lane.processors)
        if not any((self.phrases, self.ranking, grammar, thinking)):
            return None
        from genctl.engines.lane_results import LaneResults

        return LaneResults(self.phrases, grammar, len(self.lane.tokens), self.ranking, thinking)


class Planner:
    """Plans lanes for one checkpoint."""

    def __init__(
        self,
        loaded: LoadedModel,
        forward: ModelRuntime,
        runtime: Runtime,
        *,
        allow_plugins: bool,
        flags: dict[str, Any],
    ) -> None:
        self.loaded, self.forward, self.runtime = loaded, forward, runtime
        self.allow_plugins, self.flags = allow_plugins, flags
        self.strategies = StrategyChoice(loaded, forward, runtime, self.flags)
        self.translating: tuple[Resolved, Generation] | None = None  # the last settings with a language
        self.drafts = True  # whether what was written before is drafted, where that changes no byte
        self.known_tags: Tags | Literal[False] | None = None  # around thoughts; False: none are known
        self.context = context_of(loaded.config)  # the maximum number of positions; None: no limit
        # the length of the texts of the training, if scaled positions let the model read longer ones
        length = trained_length(loaded.config)
        self.trained = None if length == self.context else length
        defaults = loaded.model.generation_config
        self.eos = ids_of(defaults.eos_token_id)
        self.bos = defaults.bos_token_id
        self.decoder_start = defaults.decoder_start_token_id  # without one the decoder begins with BOS

    def plan(self, request: Request, report: Report) -> PlannedLane:
        """The lane of a request. Raises GenctlError with one line."""
        from genctl.engines.lane_plan import LanePlan

        return LanePlan(self, request).planned(report)

    def read(self, request: Request) -> Prompt:
        """The request's prompt in token ids. Raises InputError or ModelError."""
        from genctl.models import text
        from genctl.models.languages import reading

        tokenizer, runtime = self.loaded.tokenizer, request.resolved.runtime
        if request.prompt is not None:
            chat_settings.check_is_chat(runtime)
        if request.prompt_ids is not None:
            text.check_ids(request.prompt_ids, self.loaded.vocab_size)
            words = "" if tokenizer is None else text.decode(tokenizer, request.prompt_ids)
            return Prompt(request.prompt_ids, words, note=self._note(request.prompt_ids))
        if tokenizer is None:
            raise ModelError(f"{self.loaded.name} has no tokenizer: give prompt_ids instead of text")
        if request.prompt is not None and not runtime.is_chat:
            with reading(tokenizer, runtime.src_lang):
                ids = tuple(text.encode_prompt(self.loaded, request.prompt))
            note = self._note(ids, "the tokenizer writes it before each prompt")
            return Prompt(ids, request.prompt, note=note, spelled=ids)
        from genctl.models import chat

        if runtime.src_lang is not None:
            raise UsageError("src_lang would change nothing: the prompt is a chat, whose template writes all of it")
        messages, how = conversation(request)
        if request.prefill:
            rendered = chat.render_prefilled(tokenizer, messages, request.prefill, name=self.loaded.name, **how)
        else:
            rendered = chat.render_chat_text(tokenizer, messages, name=self.loaded.name, **how)
        # the template contains the special tokens
        ids = tuple(text.encode(tokenizer, rendered, add_special_tokens=False))
        note = self._note(ids, "the chat template writes it before a message that begins with it")
        if how["variables"] and how["variables"] != chat_settings.variables_of(self.runtime):  # of a row
            unused = self.unused_variables(runtime)
            note = note or (f"the chat template does not use {' or '.join(unused)}" if unused else "")
        return Prompt(ids, rendered, events.conversation(messages, runtime.system), note)

    def unused_variables(self, runtime: Runtime) -> list[str]:
        """The variables that the chat template does not use. Raises ModelError if there is no such template."""
        from genctl.models.chat import check_template

        tokenizer: Any = self.loaded.tokenizer
        tools = "tools" in chat_settings.variables_of(runtime)
        return chat_settings.unused(
            check_template(tokenizer, self.loaded.name, runtime.chat_template, tools=tools), runtime
        )

    def _note(self, ids: Sequence[int], why: str = "") -> str:
        """A note if a prompt begins with BOS twice, because of `why`, or is longer than the texts of the training."""
        from genctl.models.text import doubled_bos

        tokenizer: Any = self.loaded.tokenizer
        doubled = doubled_bos(tokenizer, ids, (self.bos, tokenizer.bos_token_id), why) if why else ""
        is_longer = self.trained is not None and len(ids) > self.trained and not self.forward.is_encoder_decoder
        return doubled or (trained_length_note(self.trained) if is_longer else "")

    def in_language(self, resolved: Resolved) -> Generation:
        """The settings, whose text begins with the token of `tgt_lang`. Raises UsageError for a language it lacks."""
        named = {name: getattr(resolved.runtime, name) for name in ("src_lang", "tgt_lang")}
        if not any(named.values()):
            return resolved.generation
        if self.translating is not None and self.translating[0] is resolved:
            return self.translating[1]
        from genctl.models.languages import language_id

        generation = resolved.generation
        for name, language in named.items():
            if language is not None:
                setting = f"{name} = {language} ({resolved.origins.get(name, 'default')})"
                id = language_id(self.loaded.tokenizer, setting, language, self.loaded.name)
                generation = replace(generation, forced_bos_token_id=id) if name == "tgt_lang" else generation
        self.translating = resolved, generation
        return generation


def conversation(request: Request) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of a chat, and how they are rendered."""
    runtime = request.resolved.runtime
    messages = request.messages or ({"role": "user", "content": request.prompt or ""},)
    variables = chat_settings.variables_of(runtime)
    return list(messages), {"system": runtime.system, "variables": variables, "template": runtime.chat_template}


def ids_of(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """The ids of a setting that may be one, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
