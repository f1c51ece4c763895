"""Plan requests as lanes: prompt ids, strategy, processors, stopping criteria."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from genctl import events
from genctl.config import chat_settings
from genctl.config.listed_knobs import check_finite, criteria_of, processors_of
from genctl.engines.protocol import trained_length_note
from genctl.engines.runtime import undrafted
from genctl.errors import InputError, ModelError, UsageError, cannot_read, count
from genctl.models.sizes import context_of, trained_length
from genctl.params import DEFAULT_NEW_TOKENS, GRAMMARS, Generation, Runtime

if TYPE_CHECKING:
    from genctl.config.layers import Resolved
    from genctl.decode.processors import Processor
    from genctl.decode.processors.build import Unconditional
    from genctl.decode.runtime import ModelRuntime
    from genctl.decode.stopping.build import NamedCriterion
    from genctl.decode.stopping.row_text import RowText
    from genctl.decode.stopping.thoughts import Tags
    from genctl.decode.token_healing import HealedPrompt
    from genctl.decode.types import Lane, Strategy
    from genctl.engines.lane_results import ForcedPhrases, LaneResults, RerankPlan
    from genctl.engines.protocol import Report, Request
    from genctl.models.hub import LoadedModel
    from genctl.models.text import Words
    from genctl.strategies.suffixes import SuffixDrafter


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
        grammar = None
        if any(getattr(processor, "name", None) in GRAMMARS for processor in self.lane.processors):
            from genctl.decode.processors.grammar import grammar_of

            grammar = grammar_of(self.lane.processors)
        thinking = None
        if any(getattr(processor, "name", None) == "thinking_budget" for processor in self.lane.processors):
            from genctl.decode.processors.thinking import thinking_of

            thinking = thinking_of(self.lane.processors)
        if self.phrases is None and grammar is None and self.ranking is None and thinking is None:
            return None
        from genctl.engines.lane_results import LaneResults

        return LaneResults(
            phrases=self.phrases,
            grammar=grammar,
            prompt_length=len(self.lane.tokens),
            ranking=self.ranking,
            thinking=thinking,
        )


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
        self.loaded = loaded
        self.forward = forward
        self.runtime = runtime
        self.allow_plugins = allow_plugins
        self.flags = flags  # how further checkpoints (assistants, amateurs) are loaded
        self.auxiliary_models: dict[str, tuple[LoadedModel, ModelRuntime]] = {}
        self.translating: tuple[Resolved, Generation] | None = None  # the last settings with a language
        self.latest: tuple[Generation, tuple[Strategy, RerankPlan | None]] | None = None
        self.drafted: tuple[Strategy, Strategy] | None = None  # the last strategy, and the same with drafts
        self.drafts = True  # whether what was written before is drafted, where that changes no byte
        self.suffixes: SuffixDrafter | None = None  # the texts of the run, to draft from
        self.known_tags: Tags | Literal[False] | None = None  # around thoughts; False: none are known
        defaults = loaded.model.generation_config
        self.eos = _ids(defaults.eos_token_id)
        self.pad = defaults.pad_token_id
        self.bos = defaults.bos_token_id
        self.decoder_start = defaults.decoder_start_token_id  # without one the decoder begins with BOS

    @property
    def trust(self) -> dict[str, bool]:
        """Which flags let code run."""
        names = "allow_pickle", "trust_remote_code"
        return {**{name: bool(self.flags.get(name)) for name in names}, "allow_plugins": self.allow_plugins}

    @property
    def context(self) -> int | None:
        """The maximum number of positions; None if the model has no limit."""
        return context_of(self.loaded.config)

    @property
    def trained(self) -> int | None:
        """The length of the texts of the training, if scaled positions let the model read longer ones; else None."""
        length = trained_length(self.loaded.config)
        return None if length == self.context else length

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        from genctl.models.text import decode

        return decode(self.loaded.tokenizer, ids) if self.loaded.tokenizer is not None else ""

    def companion(self, name: str) -> tuple[LoadedModel, ModelRuntime]:
        """A second checkpoint (an assistant, an amateur) on the same device, loaded once."""
        from genctl.engines.runtime import runtime_of
        from genctl.models import hub

        if name not in self.auxiliary_models:
            # pack it, and never compile it: its steps alternate with the model's
            runtime = replace(
                self.runtime, model=name, revision=None, compile=False, adapter=None, tensor_parallel=False
            )
            if not name.endswith(".gguf"):
                runtime = replace(
                    runtime, dequantize=False, quantize=None if runtime.quantize == "gguf" else runtime.quantize
                )
            # without a tokenizer, different vocabularies cannot be detected
            loaded = hub.load(runtime, **self.flags, need_tokenizer=self.loaded.tokenizer is not None)
            self.auxiliary_models[name] = loaded, runtime_of(loaded.model)
        return self.auxiliary_models[name]

    # -- requests ------------------------------------------------------------------------------------------------------

    def read(self, request: Request) -> Prompt:
        """The request's prompt in token ids. Raises InputError or ModelError."""
        from genctl.models import text
        from genctl.models.languages import reading

        tokenizer = self.loaded.tokenizer
        runtime = request.resolved.runtime
        if request.prompt is not None:
            chat_settings.check_is_chat(runtime)
        if request.prompt_ids is not None:
            text.check_ids(request.prompt_ids, self.loaded.vocab_size)
            return Prompt(request.prompt_ids, self.text(request.prompt_ids), note=self._note(request.prompt_ids))
        if tokenizer is None:
            raise ModelError(f"{self.loaded.name} has no tokenizer: give prompt_ids instead of text")
        if request.messages is not None or runtime.is_chat:
            from genctl.models import chat

            if runtime.src_lang is not None:
                raise UsageError("src_lang would change nothing: the prompt is a chat, whose template writes all of it")
            messages, how = _conversation(request)
            if request.prefill:
                rendered = chat.render_prefilled(tokenizer, messages, request.prefill, name=self.loaded.name, **how)
            else:
                rendered = chat.render_chat_text(tokenizer, messages, name=self.loaded.name, **how)
            # the template contains the special tokens
            ids = tuple(text.encode(tokenizer, rendered, add_special_tokens=False))
            note = self._note(ids, "the chat template writes it before a message that begins with it")
            variables = chat_settings.variables_of(runtime)
            if variables and variables != chat_settings.variables_of(self.runtime):  # of a row
                source = chat.check_template(
                    tokenizer, self.loaded.name, runtime.chat_template, tools="tools" in variables
                )
                unused = chat_settings.unused(source, runtime)
                note = note or (f"the chat template does not use {' or '.join(unused)}" if unused else "")
            return Prompt(ids, rendered, events.conversation(messages, runtime.system), note)
        assert request.prompt is not None
        with reading(tokenizer, runtime.src_lang):
            ids = tuple(text.encode_prompt(self.loaded, request.prompt))
        note = self._note(ids, "the tokenizer writes it before each prompt")
        return Prompt(ids, request.prompt, note=note, spelled=ids)

    def _note(self, ids: Sequence[int], why: str = "") -> str:
        """A note if a prompt begins with BOS twice, because of `why`, or is longer than the texts of the training."""
        from genctl.models.text import doubled_bos

        tokenizer: Any = self.loaded.tokenizer
        doubled = doubled_bos(tokenizer, ids, (self.bos, tokenizer.bos_token_id), why) if why else ""
        is_longer = self.trained is not None and len(ids) > self.trained and not self.forward.is_encoder_decoder
        return doubled or (trained_length_note(self.trained) if is_longer else "")

    def plan(self, request: Request, report: Report) -> PlannedLane:
        """The lane of a request. Raises GenctlError with one line."""
        from genctl.decode.types import Lane
        from genctl.models.text import detokenizer

        generation = self._in_language(request.resolved)
        began = time.monotonic()
        self._check_special(generation)
        prompt = self.read(request)
        if not prompt.ids:
            raise InputError("the prompt tokenises to nothing, and there is nothing to continue")
        prompt, truncated = self._truncated(request, prompt)
        source: tuple[int, ...] | None = None
        tokens = prompt.ids
        healed = self._heal(generation, tokens)
        if healed is not None:
            tokens = healed.ids
        if self.forward.is_encoder_decoder:
            source, tokens = prompt.ids, (self._decoder_start(generation),)
        words = detokenizer(self.loaded.tokenizer)
        if source is None:  # the text of an encoder-decoder begins from nothing
            words = words.after(tokens, prompt.ids[len(tokens) :])
        eos = _ids(generation.eos_token_id) if generation.eos_token_id is not None else self.eos
        most, limit = self._most_new_tokens(generation, len(tokens), prompt)
        strategy, ranking = self._strategy(generation)
        if self.drafts and ranking is None and not undrafted(self.forward, request.resolved):
            strategy = self._drafting(strategy, request.resolved.runtime.draft_corpus)
        beneath = "" if healed is None else healed.text
        opening = self._opening(request, replace(prompt, ids=tokens), beneath, cut=bool(truncated))
        processors = self._processors(request, generation, tokens, source, most, eos, beneath, opening, words)
        criteria = self._criteria(request, generation, began, opening, words)
        lane = Lane(
            request.id,
            tokens,
            strategy,
            most,
            eos,
            source,
            processors,
            criteria,
            request.seed,
            use_cache=generation.use_cache and generation.cache_implementation != "off",
            cache=generation.cache_implementation,
            top=report.top,
            scores=report.scores,
            trace=report.trace,
            processed=request.resolved.runtime.processed_logprobs,
            watch=report.watch,
            returned=generation.num_return_sequences if ranking is None else ranking.samples,
            limit=limit,
            text=self._row_text(criteria, words, keep=generation.keep_stop),
        )
        settings: dict[str, Any] = {"length_penalty": strategy.length_penalty, "runtime": self.forward.kind}
        settings |= generation.several
        languages = ("src_lang", request.resolved.runtime.src_lang), ("tgt_lang", request.resolved.runtime.tgt_lang)
        settings |= {name: language for name, language in languages if language is not None}
        if truncated:
            settings["truncated"] = truncated
        if prompt.note:
            settings["note"] = prompt.note
        if self.trained is not None and len(tokens) + most > self.trained:
            settings["trained"] = self.trained
        if generation.structure:
            settings["structure"] = generation.structure
        kind, phrases = ranking.kind if ranking else strategy.kind, self._forced_phrases(generation, strategy, words)
        draws = generation.draws or bool(request.resolved.processors)
        return PlannedLane(lane, prompt, kind, settings, ranking, phrases, draws)

    def _in_language(self, resolved: Resolved) -> Generation:
        """The settings, whose text begins with the token of `tgt_lang`. Raises UsageError for a language it lacks."""
        named = {name: getattr(resolved.runtime, name) for name in ("src_lang", "tgt_lang")}
        if not any(named.values()):
            return resolved.generation
        if self.translating is not None and self.translating[0] is resolved:
            return self.translating[1]
        from genctl.models.languages import language_id

        ids = {
            name: language_id(
                self.loaded.tokenizer,
                f"{name} = {language} ({resolved.origins.get(name, 'default')})",
                language,
                self.loaded.name,
            )
            for name, language in named.items()
            if language is not None
        }
        generation = resolved.generation
        if "tgt_lang" in ids:
            generation = replace(generation, forced_bos_token_id=ids["tgt_lang"])
        self.translating = resolved, generation
        return generation

    def _strategy(self, generation: Generation) -> tuple[Strategy, RerankPlan | None]:
        """The strategy for these knobs. It has no state, so requests with equal knobs share one."""
        if self.latest is None or self.latest[0] is not generation:
            self.latest = generation, self._build_strategy(generation)
        return self.latest[1]

    def _build_strategy(self, generation: Generation) -> tuple[Strategy, RerankPlan | None]:
        from genctl.config.modes import bans, mode_of
        from genctl.strategies.factory import choose
        from genctl.strategies.sample import Sample

        if clashes := bans(generation):  # of a command that sets the number of rows itself
            raise UsageError("\n".join(clashes))
        ranking: RerankPlan | None = None
        if generation.best_of is not None or generation.mbr_samples is not None:
            from genctl.engines import lane_results

            ranking = lane_results.rerank_plan(generation)
        tokenizer = self.loaded.tokenizer
        if generation.mbr_samples and tokenizer is None:
            raise UsageError("mbr_samples: compares texts, and this checkpoint has no tokenizer to write any")
        pad = self.pad if generation.pad_token_id is None else generation.pad_token_id
        alone = generation if ranking is None else replace(generation, num_return_sequences=1)
        auxiliary = None if mode_of(alone) is None else self._auxiliary(alone)
        strategy = auxiliary or choose(alone, tokenizer, pad)
        if ranking is None:
            return strategy, None
        if not isinstance(strategy, Sample):
            name = "best_of" if generation.best_of else "mbr_samples"
            raise UsageError(f"{name} cannot be combined with {strategy.kind}: it chooses among plain samples")
        return Sample(True, ranking.samples, sampler=generation.sampler), ranking

    def _drafting(self, strategy: Strategy, corpus: str | None) -> Strategy:
        """The same, with drafts of what was written before and of a corpus, if it decodes one row plainly."""
        from genctl.strategies.assisted import Assisted
        from genctl.strategies.sample import Sample
        from genctl.strategies.suffixes import SuffixDrafter

        if not isinstance(strategy, Sample) or strategy.n > 1:
            return strategy
        if self.suffixes is None:
            self.suffixes = SuffixDrafter()
            if corpus is not None:
                self._read_corpus(self.suffixes, corpus)
        if self.drafted is None or self.drafted[0] is not strategy:
            self.drafted = (
                strategy,
                Assisted(
                    self.suffixes,
                    strategy.do_sample,
                    sampler=strategy.sampler,
                    length_penalty=strategy.length_penalty,
                    unasked=True,
                ),
            )
        return self.drafted[1]

    def forget_texts(self) -> None:
        """Begin a new run: nothing is drafted from the texts of the one before."""
        self.suffixes = self.drafted = None

    def _read_corpus(self, drafter: SuffixDrafter, path: str) -> None:
        """Draft from a text, or from earlier results. Raises InputError and ModelError."""
        from genctl.documents import reader
        from genctl.models.text import encode

        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise ModelError(f"draft_corpus: {self.loaded.name} has no tokenizer to read {path} with")
        try:
            given = reader.text(Path(path).expanduser())
            listed = path.endswith(".jsonl")
            rows = [reader.loads(line) for line in reader.text_lines(given)] if listed else [{"text": given}]
        except (reader.Unreadable, reader.BadJson) as error:
            raise InputError(cannot_read(path, str(error), "--draft-corpus")) from None
        for row in rows:
            parts = [row.get(key) for key in ("prompt", "text")] if isinstance(row, dict) else []
            text = "".join(part for part in parts if isinstance(part, str))
            drafter.keep(encode(tokenizer, text, add_special_tokens=False) if text else [])

    def _auxiliary(self, generation: Generation) -> Strategy | None:
        """The strategy of a knob that needs a second checkpoint, hidden layers or the text."""
        from genctl.strategies.auxiliary_models import AuxiliaryModel, auxiliary_strategy

        def companion(name: str) -> AuxiliaryModel:
            loaded, forward = self.companion(name)
            return AuxiliaryModel(forward, loaded.tokenizer)

        return auxiliary_strategy(generation, self.forward, self.loaded.tokenizer, companion)

    def _forced_phrases(self, generation: Generation, strategy: Strategy, words: Words) -> ForcedPhrases | None:
        """The phrases that a finished text must contain."""
        if not (generation.force_words or generation.force_words_ids):
            return None
        from genctl.engines.lane_results import ForcedPhrases, forced_phrases
        from genctl.strategies.constrained import ConstrainedBeam
        from genctl.strategies.constraints import Constraints

        if not isinstance(strategy, ConstrainedBeam):
            return None
        return ForcedPhrases(Constraints(strategy.words), forced_phrases(generation, self.text), words.decode)

    def _check_special(self, generation: Generation) -> None:
        """Raises UsageError for a special id that the model does not have: it could never be written or read."""
        for name in ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "stop_token_ids"):
            for token in _ids(getattr(generation, name)):
                if not 0 <= token < self.loaded.vocab_size and (name, token) != ("pad_token_id", -1):  # -1: none
                    raise UsageError(f"{name}: {token} is not one of the {self.loaded.vocab_size} ids of the model")

    def _heal(self, generation: Generation, tokens: tuple[int, ...]) -> HealedPrompt | None:
        """The prompt without its last tokens, whose text the continuation must begin with."""
        if not generation.token_healing:
            return None
        if self.forward.is_encoder_decoder:
            raise ModelError("token_healing mends the end of a prompt that goes on; an encoder-decoder reads it whole")
        if self.loaded.tokenizer is None:
            raise ModelError(f"token_healing needs a tokenizer, and {self.loaded.name} has none")
        from genctl.decode.token_healing import heal

        stops = generation.stop_strings or ()
        return heal(
            self.loaded.tokenizer, tokens, self.forward.vocab_size, stops=(stops,) if isinstance(stops, str) else stops
        )

    def _decoder_start(self, generation: Generation) -> int:
        for start in (generation.decoder_start_token_id, self.decoder_start, generation.bos_token_id, self.bos):
            if start is not None:
                return int(start)
        raise ModelError(f"{self.loaded.name} names no decoder_start_token_id, so its decoder cannot begin")

    def _truncated(self, request: Request, prompt: Prompt) -> tuple[Prompt, int]:
        """The prompt after `truncate`, and the number of removed tokens; its text is unchanged.

        Keeps room for max_new_tokens, but for no more than half of the context (or max_length). Special tokens that the
        tokenizer puts around a prompt stay: its BOS, and an encoder's EOS.
        """
        side, generation = request.resolved.runtime.truncate, request.resolved.generation
        if side is None:
            return prompt, 0
        bounds = [self.context]
        room = 0
        if not self.forward.is_encoder_decoder:  # an encoder-decoder's new tokens have a separate context
            bounds.append(generation.max_length if generation.max_new_tokens is None else None)
        bound = min((size for size in bounds if size is not None), default=None)
        if bound is None:
            return prompt, 0
        if not self.forward.is_encoder_decoder:
            room = min(generation.max_new_tokens or DEFAULT_NEW_TOKENS, bound // 2)
        ids, keep = prompt.ids, bound - room
        if len(ids) <= keep:
            return prompt, 0
        head = int(ids[0] == self.bos)
        tail = int(self.forward.is_encoder_decoder and ids[-1] in self.eos)
        inner, left = ids[head : len(ids) - tail], keep - head - tail
        if left < 1:
            has = count(len(ids), "token")
            raise InputError(f"the prompt has {has}, and truncate would leave none of it in {bound}")
        first = {"left": 0, "right": left, "middle": (left + 1) // 2}[side]
        cut = (*ids[:head], *inner[:first], *inner[len(inner) - (left - first) :], *ids[len(ids) - tail :])
        return replace(prompt, ids=cut), len(ids) - len(cut)

    def _most_new_tokens(self, generation: Generation, length: int, prompt: Prompt) -> tuple[int, str]:
        """The maximum number of new tokens, and its reason if that is the context. A full context has room for one."""
        context = self.context
        if context is not None and len(prompt.ids) > context:
            raise InputError(
                f"the prompt has {count(len(prompt.ids), 'token')}, but the model's context is {context}",
                hint="--truncate left keeps its end (right its beginning, middle both)",
            )
        most = generation.max_new_tokens
        if most is None and generation.max_length is not None:
            most = generation.max_length - length
            if most < 1:
                raise InputError(f"the prompt has {count(length, 'token')}, but max_length is {generation.max_length}")
        if most is None:
            most = DEFAULT_NEW_TOKENS
        room = most if context is None else max(context - length, 1)
        return (most, "") if most <= room else (room, f"context of {context} tokens")

    def _processors(
        self,
        request: Request,
        generation: Generation,
        tokens: Sequence[int],
        source: Sequence[int] | None,
        most: int,
        eos: tuple[int, ...],
        healed: str,
        opening: str,
        words: Words,
    ) -> tuple[Processor, ...]:
        check_finite(generation)
        listed = request.resolved.processors
        if listed is None and not processors_of(generation, healed=bool(healed)):
            return ()
        import torch

        from genctl.decode.processors.build import ProcessorContext, build

        device = self.forward.device
        written = tuple(tokens[len(tokens) - request.written :]) if not healed else ()
        context = ProcessorContext(
            generation=generation,
            prompt_len=len(tokens),
            max_length=len(tokens) + most,
            eos=eos,
            vocab_size=self.forward.vocab_size,
            device=device,
            encoder_ids=torch.tensor([list(source or tokens)], dtype=torch.long, device=device),
            tokenizer=self.loaded.tokenizer,
            is_encoder_decoder=self.forward.is_encoder_decoder,
            seed=request.seed,
            explicit=listed,
            allow_plugins=self.allow_plugins,
            unconditional=self._unconditional(generation, tokens),
            written=written,
            begun=source is None and any(map(words.writes, tokens[: len(tokens) - len(written)])),
            healed=healed,
            opening=opening,
            half=getattr(self.loaded.model, "dtype", None) in (torch.float16, torch.bfloat16),
        )
        processors = build(context)
        if not generation.ban and any(processor.name == "ban" for processor in processors):
            raise UsageError(
                "ban is set in the list of processors alone, which cannot take back a text",
                hint="set it beside the list",
            )
        return processors

    def _unconditional(self, generation: Generation, tokens: Sequence[int]) -> Unconditional | None:
        """The unconditional prompt of guidance_scale: the negative prompt, or the prompt's last token."""
        if generation.guidance_scale is None or generation.guidance_scale == 1.0:
            return None
        if self.forward.is_encoder_decoder:
            raise ModelError(
                "guidance_scale needs a decoder-only checkpoint: an encoder-decoder has no negative prompt"
            )
        from genctl.decode.read_along import ReadAlong, unconditional
        from genctl.models.text import encode_prompt

        negative = generation.negative_prompt
        ids = tokens[-1:] if negative is None else encode_prompt(self.loaded, negative)
        use_cache = generation.use_cache and self.forward.abilities.together
        return unconditional(ReadAlong(self.forward, use_cache=use_cache), ids, len(tokens))

    def _opening(self, request: Request, prompt: Prompt, healed: str, *, cut: bool) -> str:
        """The end of a prompt in which a thought may have been opened: of a chat, what its template adds after all
        messages. "" where no setting needs it.
        """
        resolved, tokenizer = request.resolved, self.loaded.tokenizer
        listed = [table["use"] for table in (*(resolved.processors or ()), *(resolved.stopping or ()))]
        if not any(name in listed or getattr(resolved.generation, name) is not None for name in _READ_THOUGHTS):
            return ""
        if tokenizer is None or self.forward.is_encoder_decoder or self._tags(request) is None:
            return ""
        if not _is_chat(request):
            backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
            return str(backend.decode(list(prompt.ids), skip_special_tokens=False)) + healed
        from genctl.models import chat

        if cut and resolved.runtime.truncate == "right":
            return ""
        messages, how = _conversation(request)
        return chat.after_messages(tokenizer, messages, prompt.text, name=self.loaded.name, **how)

    def _tags(self, request: Request) -> Tags | None:
        """The tags around the thoughts of a checkpoint: those that are set, or known ones."""
        from genctl.decode.stopping.thoughts import Tags, tags_of

        tables = ({"thinking_tags": request.resolved.generation.thinking_tags}, *(request.resolved.processors or ()))
        given = next((tags for table in tables if (tags := table.get("thinking_tags")) is not None), None)
        if given is not None:
            return Tags(*given)
        if self.known_tags is None:
            self.known_tags = tags_of(self.loaded.tokenizer) or False
        return self.known_tags or None

    def _row_text(self, criteria: tuple[NamedCriterion, ...], words: Words, *, keep: bool) -> RowText:
        """The text of a row without new tokens, which the stops among the criteria cut."""
        from genctl.decode.stopping.row_text import RowText

        if not criteria:
            return RowText(words)
        from genctl.decode.stopping.build import stops_of

        return RowText(words, stops_of(criteria, keep=keep))

    def _criteria(
        self, request: Request, generation: Generation, began: float, opening: str, words: Words
    ) -> tuple[NamedCriterion, ...]:
        seconds, listed = request.resolved.runtime.row_timeout, request.resolved.stopping
        if listed is None and seconds is None and not criteria_of(generation):
            return ()
        from genctl.decode.stopping.build import NamedCriterion, StoppingContext, build

        tags = None if generation.stop_in_thought else self._tags(request)
        # a text that is no chat may speak of known tags, and opens a thought at its end alone
        is_text = request.prompt is not None and not _is_chat(request)
        begins = not is_text or generation.thinking_tags is not None or generation.thinking_budget is not None
        context = StoppingContext(
            generation=generation,
            tokenizer=self.loaded.tokenizer,
            decode=None if self.loaded.tokenizer is None else words.decode,
            explicit=listed,
            allow_plugins=self.allow_plugins,
            tags=tags,
            in_thought=tags is not None
            and (tags.is_open_in(opening) if begins else opening.rstrip().endswith(tags.opening)),
        )
        criteria = build(context)
        if seconds is None:
            return criteria
        # an option of the run, like the batch size, so not part of a preset's list
        return (*criteria, NamedCriterion("row_timeout", Deadline(began + seconds, f"row_timeout {seconds:g} s")))


@dataclass(frozen=True)
class Deadline:
    """End a row at the first token after a moment of the monotonic clock."""

    at: float
    words: str
    clock: Callable[[], float] = time.monotonic

    def __call__(self, written: object) -> tuple[str, str] | None:
        return ("time", self.words) if self.clock() > self.at else None


# settings that read whether a prompt ends within a thought
_READ_THOUGHTS = ("thinking_budget", "stop_strings", "stop_regex")


def _is_chat(request: Request) -> bool:
    return request.messages is not None or (request.prompt is not None and request.resolved.runtime.is_chat)


def _conversation(request: Request) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of a chat, and how they are rendered."""
    runtime = request.resolved.runtime
    messages = request.messages or ({"role": "user", "content": request.prompt or ""},)
    variables = chat_settings.variables_of(runtime)
    how = {"system": runtime.system, "variables": variables, "template": runtime.chat_template}
    return list(messages), how


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
