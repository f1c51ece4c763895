"""The local engine. A session turns requests into events with text: it loads a checkpoint, plans lanes and runs the
decode loop. It displays nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from genctl import events
from genctl.config import conflicts, modes
from genctl.config.check import shown
from genctl.config.layers import Layer, Resolved, model_layer, resolve
from genctl.decode.step_costs import TEXT, Threads
from genctl.engines.protocol import (
    ALONE,
    About,
    EngineSetup,
    Flow,
    JobPlan,
    Key,
    Report,
    Request,
    Rows,
    Skipped,
    WorkDone,
    grouped,
    never,
)
from genctl.errors import GenctlError, InputError, ModelError, UsageError, cannot_read
from genctl.params import DRAFTING, GRAMMARS, Generation, Runtime

if TYPE_CHECKING:
    from genctl.decode.prompts import PromptIdentity
    from genctl.decode.scheduler import Waiting
    from genctl.decode.types import Prefix
    from genctl.engines.lane_results import LaneResults
    from genctl.engines.planner import PlannedLane
    from genctl.engines.protocol import Outcome, ScoringOptions, TextToScore
    from genctl.models.check import GenerationSettings
    from genctl.models.hub import LoadedModel


TYPICAL = 2048  # assumed length of a row for `batch_size = "auto"`


class Session:
    """A loaded checkpoint, ready to decode."""

    def __init__(
        self, loaded: LoadedModel, runtime: Runtime, *, allow_plugins: bool = False, flags: Any = None
    ) -> None:
        from genctl.decode.prefix_cache import KeptTexts
        from genctl.engines.planner import Planner
        from genctl.engines.strategy_choice import reuse_limit, runtime_of

        self.loaded = loaded
        self.threads: Threads | None = None
        self.forward = runtime_of(loaded.model, compile=runtime.compile)
        self.planner = Planner(loaded, self.forward, runtime, allow_plugins=allow_plugins, flags=flags or {})
        self.on_plan: Callable[[int], object] = lambda tokens: None  # receives the length of each planned prompt
        self.clock: Callable[[], float] = time.perf_counter
        self.waits = False  # the next row may take long (`EngineSetup`)
        saved: Prefix | None = None
        if (path := runtime.prompt_cache) is not None:
            from genctl.decode import prompts

            if not self.forward.abilities.supports_cache or not self.forward.abilities.savable:
                problem = f"{loaded.name} keeps no cache that can be saved"
                raise ModelError(f"{problem}, so --prompt-cache {path} cannot be used")
            saved = prompts.load(Path(path).expanduser(), self.identity, self.forward)
        self.texts = None if saved is None else KeptTexts(saved=saved)  # texts that requests may continue
        self.tried: tuple[Resolved, PlannedLane] | None = None  # the trial prompt of the last checked job
        self.about = About(
            loaded.name,
            has_texts=loaded.tokenizer is not None,
            is_encoder_decoder=bool(self.forward.is_encoder_decoder),
            trained=self.planner.trained,
            prompt_cache=runtime.prompt_cache,
            reuse_limit=reuse_limit(self.forward, saved),
            facts=(("runtime", loaded.runtime), ("device", str(self.forward.device))),
        )

    @classmethod
    def load(
        cls,
        runtime: Runtime,
        *,
        allow_plugins: bool = False,
        layers: Sequence[Layer] = (),
        need_tokenizer: bool = False,
        threads: Threads | None = None,
        **flags: Any,
    ) -> Self:
        """Load a checkpoint. `layers` are checked against its generation_config before its weights are read.

        `need_tokenizer`: prompts are texts, so a checkpoint without a tokenizer is refused before that, too. `threads`
        chooses torch's number of threads for one row; without it, only `runtime.threads` changes that number. `flags`
        apply to this and to auxiliary checkpoints: what the user allows, and `on_event` (see `hub.load`).

        Raises ModelError, UsageError or PresetError.
        """
        from genctl.models import hub

        if runtime.backend is not None:
            raise UsageError(f"backend = {shown(runtime.backend)}: this needs a checkpoint on this machine")
        if runtime.tokenizer is not None:
            raise UsageError(f"tokenizer = {shown(runtime.tokenizer)}: a checkpoint here has its own")
        for name in ("prompt_cache", "draft_corpus"):
            path = getattr(runtime, name)
            if path is not None and not Path(path).expanduser().is_file():
                raise InputError(cannot_read(path, "no such file", f"--{name.replace('_', '-')}"))

        def before_weights(settings: GenerationSettings) -> None:
            check_settings(resolve([model_layer(settings.values, runtime.model, settings.file), *layers]).generation)

        if threads is None and runtime.threads is not None:
            threads = Threads(runtime.threads)
        loaded = hub.load(
            runtime, need_tokenizer=need_tokenizer, before_weights=before_weights, threads=threads, **flags
        )
        session = cls(loaded, runtime, allow_plugins=allow_plugins, flags=flags)
        session.threads = threads
        return session

    @classmethod
    def opened(cls, setup: EngineSetup) -> Self:
        """Load the checkpoint of a command. Reports loading, and later compiling. Raises the errors of `load`."""
        session = cls.load(
            setup.runtime,
            allow_plugins=setup.allow_plugins,
            layers=setup.layers,
            need_tokenizer=setup.need_tokenizer,
            threads=Threads(setup.runtime.threads),
            on_event=setup.on_event,
            **setup.trust,
        )
        session.on_plan, session.waits = setup.on_plan, setup.waits
        if session.forward.compiled is not None:
            session.forward.compiled.report = setup.note
        return session

    @property
    def identity(self) -> PromptIdentity:
        """The identity of a prompt saved by this session."""
        from importlib.metadata import version

        from genctl.decode.prompts import PromptIdentity
        from genctl.native.runtime import NativeModel

        model, quantize = self.loaded.model, self.loaded.quantize
        layout = model.cache_layout if isinstance(model, NativeModel) else ""
        dtype = str(model.dtype).removeprefix("torch.") + ("" if quantize is None else f" with {quantize} weights")
        return PromptIdentity(self.loaded.fingerprint(), self.loaded.name, dtype, version("transformers"), layout)

    def notes(self) -> list[str]:
        """Notes for --verbose: on the checkpoint, on how it runs, and on the number of threads."""
        return [*self.loaded.verbose_notes, *([] if self.threads is None else [self.threads.note])]

    @property
    def done(self) -> WorkDone:
        """The passes so far, and the findings about the model."""
        return WorkDone(int(self.forward.forwards), tuple(self.forward.findings))

    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the checkpoint and of all auxiliary models, by name."""
        loaded = [self.loaded, *(checkpoint for checkpoint, _ in self.planner.strategies.auxiliary_models.values())]
        return {checkpoint.name: checkpoint.fingerprint() for checkpoint in loaded}

    def saved_prompt(self, request: Request) -> tuple[bytes, int]:
        """Prefill a request's prompt. Returns the content of a prompt-cache file, and the number of tokens."""
        from genctl.decode import prompts

        lane = self.planner.plan(request, Report()).lane
        source = None if lane.source is None else self.forward.encode(lane.source)
        prefix = self.forward.prefill(lane.tokens, source, hidden=True, whole=True)
        return prompts.packed(prefix, self.identity), len(lane.source or lane.tokens)

    def keep_texts(self, most: int | None = None) -> None:
        """Keep the texts of requests, in `most` bytes (see `KeptTexts`); later requests read only what is new."""
        from genctl.decode.prefix_cache import KeptTexts

        self.texts = KeptTexts(most)

    def resolve(self, layers: Sequence[Layer]) -> Resolved:
        """Resolve the layers, with the checkpoint's generation_config as the lowest."""
        settings = self.loaded.generation
        return resolve([model_layer(settings.values, self.loaded.name, settings.file), *layers])

    def plan(self, resolved: Resolved) -> JobPlan:
        """Check once that this checkpoint can run a job (`Engine.plan`).

        Raises the error of each prompt: UsageError or PresetError for settings, ModelError for missing capabilities.
        """
        from genctl.engines.strategy_choice import cache_notes, undrafted

        runtime, generation, name = resolved.runtime, resolved.generation, self.loaded.name
        if runtime.is_chat:
            from genctl.models import chat

            if self.loaded.tokenizer is None:
                raise ModelError(f"{name} has no tokenizer, so there is nothing to render a chat with")
            chat.check_template(self.loaded.tokenizer, name)
        trial = self._trial(resolved)
        strategy = trial.lane.strategy
        remarks = cache_notes(self.forward, name, resolved)
        if generation.json_schema is not None:
            from genctl.decode.processors import grammar_source

            source = grammar_source.read(generation)
            remarks += [] if source is None else source.notes
        if runtime.is_chat and (runtime.chat_template is not None or conflicts.variables_of(runtime)):
            unused = self.planner.prompts.unused_variables(runtime)
            remarks += [f"the chat template of {name} does not use {variable}" for variable in unused]
        remarks += self.loaded.remarks
        why = undrafted(self.forward, resolved)
        if why and all(getattr(generation, knob) is None for knob in DRAFTING):
            if runtime.draft and f"nothing is drafted: {why}" not in self.forward.findings:
                self.forward.findings.append(f"nothing is drafted: {why}")
            if runtime.draft_corpus is not None:
                remarks.append(f"draft_corpus = {runtime.draft_corpus}: nothing is drafted, since {why}")
        others = self.about.is_encoder_decoder or generation.assistant_model or generation.amateur_model
        is_invariant = generation.cache_implementation == "dynamic" and not others
        return JobPlan(
            trial.began.strategy,
            rows=max(int(strategy.max_rows), 1),
            remarks=tuple(remarks),
            reads_hidden=strategy.traits.needs_hidden,
            batch_invariant_by=self.products if is_invariant else "",  # every row goes through these products
        )

    def watched(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """The ids of the tokens that --watch names. Raises UsageError."""
        from genctl.models.tokenizer_alone import watched_ids

        return watched_ids(self.loaded, tokens)

    def _trial(self, resolved: Resolved) -> PlannedLane:
        """Plan a prompt of one token, once for a job. Raises the errors of planning."""
        if self.tried is None or self.tried[0] is not resolved:
            from genctl.models.text import detokenizer

            words = detokenizer(self.loaded.tokenizer)
            # a token with text, as in real prompts: a grammar that begins with a blank cannot begin a text
            token = next(filter(words.writes, range(self.loaded.vocab_size)), 0)
            self.tried = resolved, self.planner.plan(Request("", resolved, 0, prompt_ids=(token,)), Report())
        return self.tried[1]

    def width(self, resolved: Resolved, default: int) -> int:
        """The number of prompts to decode at once: batch_size, or with "auto" as many as fit into memory."""
        batch_size = resolved.runtime.batch_size
        if batch_size != "auto":
            return default if batch_size is None else int(batch_size)
        from genctl.decode.batch_cache import fitting

        return fitting(self.forward, self._trial(resolved).lane, min(self.planner.context or TYPICAL, TYPICAL))

    @property
    def products(self) -> str:
        """How all matrix products of the model are computed: number format and instruction set; "" if any is torch's.

        In float32 every instruction set computes the same numbers, so none is named.
        """
        from genctl.native.runtime import NativeModel

        model = self.loaded.model
        if not isinstance(model, NativeModel) or not all(product.is_compiled for product in model.products()):
            return ""
        forms = sorted({product.form for product in model.products()})
        return "float32" if all(form.startswith("float32 by ") for form in forms) else ", ".join(forms)

    def use_threads(self, rows: int, recorded: int | None = None) -> int | None:
        """Choose the number of threads for steps of so many rows (`Engine.use_threads`)."""
        from genctl.native.runtime import NativeModel

        if self.threads is None:
            return None
        model = self.loaded.model
        if isinstance(model, NativeModel):
            weights = model.bytes()
        else:
            from genctl.models.packed_layers import weights_bytes

            weights = weights_bytes(model)
        self.threads.apply(weights, rows, device=self.forward.device.type, recorded=recorded)
        return self.threads.number

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Decode requests (`Engine.stream`). Events are yielded as they occur."""
        from genctl.decode.loop import decode

        width = flow.width

        def on_shortage(fewer: int) -> None:
            nonlocal width
            flow.on_shortage(width, fewer)
            width = fewer

        def lanes(requests: Iterable[Request | None]) -> Iterator[Waiting]:
            for request in requests:
                if request is None:
                    yield None
                    continue
                try:
                    planned = self.planner.plan(request, report or Report())
                except GenctlError as error:
                    begins[request.id] = events.Began(
                        request.id, request.prompt or "", "", self.about.name, None, {}, request.place, run=request.run
                    )
                    yield events.Failed(request.id, error.code, error.message, error.hint)
                    continue
                self.on_plan(len(planned.lane.source or planned.lane.tokens))
                begins[request.id] = planned.began
                if planned.results is not None:
                    results[request.id] = planned.results
                yield planned.lane

        in_groups = flow.span is not None and not flow.continuous
        whole = iter([(request for request in requests if not isinstance(request, Skipped))])
        groups: Iterator[Iterator[Request | None]] = grouped(requests, flow.span or 1) if in_groups else whole
        for group in groups:
            begins: dict[str, events.Began] = {}
            results: dict[str, LaneResults] = {}
            for event in decode(
                self.forward,
                lanes(group),
                width=width,
                interrupted=flow.interrupted,
                watch=flow.watch,
                texts=self.texts,
                on_shortage=on_shortage,
                ahead=flow.ahead,
                clock=self.clock,
            ):
                assert not isinstance(event, events.Loading)
                if event.lane in begins:
                    yield begins.pop(event.lane)
                over = isinstance(event, (events.Finished, events.Failed))
                completing = results.pop(event.lane, None) if over else results.get(event.lane)
                yield event if completing is None else completing.completed(event)
            if flow.interrupted():
                return

    def score(
        self,
        texts: Iterator[tuple[Key, TextToScore]],
        options: ScoringOptions,
        *,
        interrupted: Callable[[], str] = never,
    ) -> Iterator[tuple[Key, Outcome]]:
        """The outcome of each text, in order. Raises UsageError or ModelError at once for unsupported options."""
        from genctl.engines.scorer import Scorer

        scorer = Scorer(self.planner, options)
        self.use_threads(TEXT * options.batch_size)
        return scorer.score(texts, interrupted)

    def check_scoring(self, options: ScoringOptions) -> None:
        """Raises UsageError or ModelError for unsupported options."""
        from genctl.engines.scorer import Scorer

        Scorer(self.planner, options)

    def close(self, *, hurried: bool = False, failed: bool = False) -> None:
        """Does nothing: a session has no processes or connections."""


def check_settings(generation: Generation) -> None:
    """Check knobs without a checkpoint: raises UsageError for conflicts and broken grammars."""
    if clashes := modes.conflicts(generation):
        raise UsageError("\n".join(clashes))
    if any(getattr(generation, knob) is not None for knob in GRAMMARS):
        from genctl.decode.processors import grammar_source

        grammar_source.read(generation)


def checkpoint_layer(runtime: Runtime, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> Layer:
    """The checkpoint's own settings, without reading its weights."""
    from genctl.models import hub

    settings = hub.generation_settings(runtime, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    return model_layer(settings.values, runtime.model, settings.file)
