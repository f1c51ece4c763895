"""Plan requests as lanes: prompt ids, strategy, processors, stopping criteria."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from genctl import events
from genctl.config.listed_knobs import check_finite, criteria_of, processors_of
from genctl.decode.processors import function_of
from genctl.engines.prompts import Prompt, PromptReader, conversation, ids_of
from genctl.engines.strategy_choice import StrategyChoice, undrafted
from genctl.errors import InputError, ModelError, UsageError, count
from genctl.models.config_limits import context_of, trained_length
from genctl.params import DEFAULT_NEW_TOKENS, GRAMMARS, Generation, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from genctl.decode.processors import Processor
    from genctl.decode.runtime import ModelRuntime
    from genctl.decode.stopping.build import NamedCriterion
    from genctl.decode.stopping.stops import Tags
    from genctl.decode.types import Lane
    from genctl.engines.lane_results import LaneResults
    from genctl.engines.protocol import Report, Request
    from genctl.models.hub import LoadedModel


class PlannedLane(NamedTuple):
    """A lane, its first event, and what completes its results; None if the core's results need nothing added."""

    lane: Lane
    began: events.Began
    results: LaneResults | None


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
        self.strategies = StrategyChoice(loaded, forward, runtime, flags)
        self.drafts = True  # whether to draft from earlier text without a setting, where that changes no byte
        self.context = context_of(loaded.config)  # the maximum number of positions; None: no limit
        # the length of the training texts, if scaled positions let the model read longer ones
        length = trained_length(loaded.config)
        self.trained = None if length == self.context else length
        self.prompts = PromptReader(loaded, runtime, self.context, self.trained)
        self.bos, self.eos = self.prompts.bos, self.prompts.eos
        # if None, the decoder begins with BOS
        self.decoder_start = loaded.model.generation_config.decoder_start_token_id

    @cached_property
    def known_tags(self) -> Tags | None:
        """The tags around the checkpoint's thoughts, if its tokenizer has known ones."""
        from genctl.decode.stopping.stops import tags_of

        return tags_of(self.loaded.tokenizer)

    def read(self, request: Request) -> Prompt:
        """The request's prompt as token ids. Raises InputError, ModelError or UsageError."""
        return self.prompts.read(request)

    def plan(self, request: Request, report: Report) -> PlannedLane:
        """The lane of a request. Raises GenctlError."""
        return LanePlan(self, request).planned(report)


# settings for which it matters whether the prompt ends within a thought
READ_THOUGHTS = ("thinking_budget", "stop_strings", "stop_regex")


class LanePlan:
    """Plans one request. Raises GenctlError."""

    def __init__(self, planner: Planner, request: Request) -> None:
        from genctl.models.text import detokenizer

        self.planner, self.request, self.began = planner, request, time.monotonic()
        self.loaded, self.forward = planner.loaded, planner.forward
        self.is_chat = request.messages is not None or (request.prompt is not None and request.resolved.runtime.is_chat)
        self.generation: Generation = planner.prompts.in_language(request.resolved)
        self._check_special()
        read = planner.read(request)
        if not read.ids:
            raise InputError("the prompt tokenises to nothing, and there is nothing to continue")
        self.prompt = planner.prompts.truncated(read, request, self.generation)
        self.truncated = len(read.ids) - len(self.prompt.ids)
        # the tokens to read, and the text that the continuation must begin with
        self.tokens, self.healed = planner.prompts.healed(self.prompt.ids, self.generation, self.forward.vocab_size)
        self.source: tuple[int, ...] | None = None  # of an encoder
        self.words = detokenizer(self.loaded.tokenizer)
        if self.forward.is_encoder_decoder:  # its text does not continue the prompt
            g = self.generation
            starts = (g.decoder_start_token_id, planner.decoder_start, g.bos_token_id, planner.bos)
            if (start := next((id for id in starts if id is not None), None)) is None:
                raise ModelError(f"{self.loaded.name} names no decoder_start_token_id, so its decoder cannot begin")
            self.source, self.tokens = self.prompt.ids, (int(start),)
        else:
            self.words = self.words.after(self.tokens, self.prompt.ids[len(self.tokens) :])
        self.eos = planner.eos if self.generation.eos_token_id is None else ids_of(self.generation.eos_token_id)
        self.most, self.limit = self._most_new_tokens()

    def planned(self, report: Report) -> PlannedLane:
        """The planned lane."""
        from genctl.decode.stopping.row_text import RowText
        from genctl.decode.types import Lane

        planner, request, generation, resolved = self.planner, self.request, self.generation, self.request.resolved
        strategy, ranking = planner.strategies.choose(generation)
        if planner.drafts and ranking is None and not undrafted(self.forward, resolved):
            strategy = planner.strategies.drafting(strategy, resolved.runtime.draft_corpus)
        opening = self._opening()
        processors, criteria = self._processors(opening), self._criteria(opening)
        text = RowText(self.words)
        if criteria:
            from genctl.decode.stopping.build import stops_of

            text.stops = stops_of(criteria, keep=generation.keep_stop)
        lane = Lane(
            request.id,
            self.tokens,
            strategy,
            self.most,
            self.eos,
            self.source,
            processors,
            criteria,
            request.seed,
            use_cache=generation.use_cache and generation.cache_implementation != "off",
            cache=generation.cache_implementation,
            top=report.top,
            scores=report.scores,
            trace=report.trace,
            processed=resolved.runtime.processed_logprobs,
            watch=report.watch,
            returned=generation.num_return_sequences if ranking is None else ranking.samples,
            limit=self.limit,
            text=text,
        )
        settings = {"length_penalty": strategy.length_penalty, "runtime": self.forward.kind, **generation.several}
        optional = {
            "src_lang": resolved.runtime.src_lang,
            "tgt_lang": resolved.runtime.tgt_lang,
            "truncated": self.truncated,
            "note": self.prompt.note,
            "trained": planner.trained if len(self.tokens) + self.most > (planner.trained or 0) else None,
            "structure": generation.structure,
        }
        settings |= {name: value for name, value in optional.items() if value}
        read = self.source or self.tokens
        began = events.Began(
            request.id,
            self.prompt.text,
            (ranking or strategy).kind,
            self.loaded.name,
            request.seed if generation.draws or resolved.processors else None,  # a processor may draw
            settings,
            request.place,
            self.forward.is_encoder_decoder,
            self.prompt.shown,
            request.run,
            prompt_ids=() if read == self.prompt.spelled else read,
        )
        names = {getattr(processor, "name", None) for processor in processors}
        forced = generation.force_words or generation.force_words_ids
        if not forced and not ranking and names.isdisjoint((*GRAMMARS, "thinking_budget")):
            return PlannedLane(lane, began, None)
        from genctl.decode.processors.grammar import Grammar
        from genctl.decode.processors.thinking import Thinking
        from genctl.engines.lane_results import LaneResults, forced_phrases

        phrases = forced_phrases(generation, strategy, self.loaded.tokenizer, self.words) if forced else None
        grammar, thinking = function_of(processors, Grammar), function_of(processors, Thinking)
        return PlannedLane(lane, began, LaneResults(phrases, grammar, len(self.tokens), ranking, thinking))

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def _check_special(self) -> None:
        """Raises UsageError for a special id that the model does not have and so could never read or write."""
        size = self.loaded.vocab_size
        for name in ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "stop_token_ids"):
            for token in ids_of(getattr(self.generation, name)):
                if not 0 <= token < size and (name, token) != ("pad_token_id", -1):  # -1: none
                    raise UsageError(f"{name}: {token} is not one of the {size} ids of the model")

    def _most_new_tokens(self) -> tuple[int, str]:
        """The maximum number of new tokens, and its cause if that is the context. A full context has room for one."""
        context, generation, length = self.planner.context, self.generation, len(self.tokens)
        if context is not None and len(self.prompt.ids) > context:
            raise InputError(
                f"the prompt has {count(len(self.prompt.ids), 'token')}, but the model's context is {context}",
                hint="--truncate left keeps its end (right its beginning, middle both)",
            )
        most = generation.max_new_tokens
        if most is None:
            most = DEFAULT_NEW_TOKENS if generation.max_length is None else generation.max_length - length
            if most < 1:
                raise InputError(f"the prompt has {count(length, 'token')}, but max_length is {generation.max_length}")
        room = most if context is None else max(context - length, 1)
        return (most, "") if most <= room else (room, f"context of {context} tokens")

    # -- processors ----------------------------------------------------------------------------------------------------

    def _processors(self, opening: str) -> tuple[Processor, ...]:
        generation, tokens = self.generation, self.tokens
        check_finite(generation)
        listed = self.request.resolved.processors
        if listed is None and not processors_of(generation, healed=bool(self.healed)):
            return ()
        import torch

        from genctl.decode.processors.build import ProcessorContext, build

        device = self.forward.device
        written = () if self.healed else tokens[len(tokens) - self.request.written :]
        context = ProcessorContext(
            generation=generation,
            prompt_len=len(tokens),
            max_length=len(tokens) + self.most,
            eos=self.eos,
            vocab_size=self.forward.vocab_size,
            device=device,
            encoder_ids=torch.tensor([list(self.source or tokens)], dtype=torch.long, device=device),
            tokenizer=self.loaded.tokenizer,
            is_encoder_decoder=self.forward.is_encoder_decoder,
            seed=self.request.seed,
            explicit=listed,
            allow_plugins=self.planner.allow_plugins,
            unconditional=self._unconditional(),
            written=written,
            begun=self.source is None and any(map(self.words.writes, tokens[: len(tokens) - len(written)])),
            healed=self.healed,
            opening=opening,
            half=getattr(self.loaded.model, "dtype", None) in (torch.float16, torch.bfloat16),
        )
        processors = build(context)
        if not generation.ban and any(processor.name == "ban" for processor in processors):
            problem = "ban is set in the list of processors alone, which cannot take back a text"
            raise UsageError(problem, hint="set it beside the list")
        return processors

    def _unconditional(self) -> Callable[[Tensor], Tensor] | None:
        """The unconditional logits for guidance_scale, after the negative prompt or after the prompt's last token."""
        generation = self.generation
        if generation.guidance_scale in (None, 1.0):
            return None
        if self.forward.is_encoder_decoder:
            problem = "guidance_scale needs a decoder-only checkpoint"
            raise ModelError(f"{problem}: an encoder-decoder has no negative prompt")
        from genctl.decode.read_along import ReadAlong, unconditional
        from genctl.models.text import encode_prompt

        negative = generation.negative_prompt
        ids = self.tokens[-1:] if negative is None else encode_prompt(self.loaded, negative)
        use_cache = generation.use_cache and self.forward.abilities.together
        return unconditional(ReadAlong(self.forward, use_cache=use_cache), ids, len(self.tokens))

    # -- stopping criteria, and thoughts -------------------------------------------------------------------------------

    def _opening(self) -> str:
        """The end of the prompt, which may have opened a thought: for a chat, what its template adds after all
        messages. "" if no setting needs it.
        """
        resolved, tokenizer = self.request.resolved, self.loaded.tokenizer
        listed = [table["use"] for table in (*(resolved.processors or ()), *(resolved.stopping or ()))]
        reads = any(name in listed or getattr(resolved.generation, name) is not None for name in READ_THOUGHTS)
        if not reads or tokenizer is None or self.forward.is_encoder_decoder or self._tags() is None:
            return ""
        if not self.is_chat:
            backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
            return str(backend.decode(list(self.tokens), skip_special_tokens=False)) + self.healed
        from genctl.models import chat

        if self.truncated and resolved.runtime.truncate == "right":
            return ""
        messages, how = conversation(self.request)
        return chat.after_messages(tokenizer, messages, self.prompt.text, name=self.loaded.name, **how)

    def _tags(self) -> Tags | None:
        """The tags around thoughts: those of `thinking_tags`, or the checkpoint's known ones."""
        from genctl.decode.stopping.stops import Tags

        tables = (vars(self.generation), *(self.request.resolved.processors or ()))
        given = [table["thinking_tags"] for table in tables if table.get("thinking_tags") is not None]
        return Tags(*given[0]) if given else self.planner.known_tags

    def _criteria(self, opening: str) -> tuple[NamedCriterion, ...]:
        request, generation = self.request, self.generation
        seconds, listed = request.resolved.runtime.row_timeout, request.resolved.stopping
        if listed is None and seconds is None and not criteria_of(generation):
            return ()
        from genctl.decode.stopping.build import NamedCriterion, StoppingContext, build

        tags = None if generation.stop_in_thought else self._tags()
        # outside a chat, known tags may merely be mentioned: only one at the end of the text opens a thought
        is_text = request.prompt is not None and not self.is_chat
        begins = not is_text or generation.thinking_tags is not None or generation.thinking_budget is not None
        context = StoppingContext(
            generation=generation,
            tokenizer=self.loaded.tokenizer,
            decode=None if self.loaded.tokenizer is None else self.words.decode,
            explicit=listed,
            allow_plugins=self.planner.allow_plugins,
            tags=tags,
            in_thought=tags is not None
            and (tags.is_open_in(opening) if begins else opening.rstrip().endswith(tags.opening)),
        )
        criteria = build(context)
        if seconds is None:
            return criteria

        # row_timeout is an option of the run, like the batch size, so it is not part of a preset's list
        def late(written: object) -> tuple[str, str] | None:
            return ("time", f"row_timeout {seconds:g} s") if time.monotonic() - self.began > seconds else None

        return (*criteria, NamedCriterion("row_timeout", late))
