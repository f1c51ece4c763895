"""A job becomes events: the only module that knows every room.

Requests go in, lanes go to the one loop, events with text come out. Nothing here decides what a person sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.config.layers import Layer, Resolved, model_layer, resolve
from genctl.errors import GenctlError, InputError, ModelError
from genctl.params import Generation, Runtime

if TYPE_CHECKING:
    from genctl.decode.guidance import Unconditional
    from genctl.decode.types import Criterion, Lane, Processor
    from genctl.models.hub import Loaded

DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class Request:
    """One prompt with its own settings. Exactly one of `prompt`, `prompt_ids` and `messages` is set."""

    id: str
    resolved: Resolved
    seed: int
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None


@dataclass(frozen=True)
class Report:
    """What is told of each token besides its id and log-probability."""

    top: int = 0  # alternatives
    scores: bool = False  # rank and entropy
    trace: bool = False  # what each processor did


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model takes it."""

    ids: tuple[int, ...]
    text: str  # as it is shown and recorded


class Session:
    """A loaded checkpoint, ready to decode."""

    def __init__(self, loaded: Loaded, *, allow_plugins: bool = False) -> None:
        from genctl.decode.forward import Forward

        self.loaded = loaded
        self.allow_plugins = allow_plugins
        self.forward = Forward(loaded.model)
        defaults = loaded.model.generation_config
        self.eos = _ids(defaults.eos_token_id)
        self.bos = defaults.bos_token_id
        self.decoder_start = defaults.decoder_start_token_id
        if self.decoder_start is None:
            self.decoder_start = getattr(loaded.config, "decoder_start_token_id", None)

    @classmethod
    def load(
        cls,
        runtime: Runtime,
        *,
        allow_pickle: bool = False,
        trust_remote_code: bool = False,
        allow_plugins: bool = False,
        on_event: Callable[[events.Loading], None] | None = None,
        layers: Sequence[Layer] = (),
    ) -> Session:
        """Load a checkpoint. `layers` are checked against its generation_config before its weights are read.

        Raises ModelError, UsageError or PresetError with lines that say what is wrong.
        """
        from genctl.models import hub

        loaded = hub.load(
            runtime,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            on_event=on_event,
            before_weights=lambda found: resolve([model_layer(found, runtime.model), *layers]),
        )
        return cls(loaded, allow_plugins=allow_plugins)

    def resolve(self, layers: Sequence[Layer]) -> Resolved:
        """The layers, with the checkpoint's generation_config beneath them."""
        return resolve([model_layer(self.loaded.generation, self.loaded.name), *layers])

    @property
    def context(self) -> int | None:
        """Most positions that the model was made for; None where nothing bounds them."""
        config = self.loaded.config.get_text_config(decoder=True)
        for name in ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx"):
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0 and self.loaded.config.model_type not in UNBOUNDED:
                return value
        return None

    def stream(
        self,
        requests: Iterable[Request],
        report: Report = Report(),
        *,
        width: int = 1,
        interrupted: Callable[[], str] = lambda: "",
    ) -> Generator[events.Event, None, None]:
        """Decode requests, at most `width` at once: Began, Prefilled, Stepped …, Finished for each, or Failed.

        `requests` is read lazily. `interrupted` is asked once per step; see `decode.loop.decode`.
        """
        from genctl.decode.loop import decode
        from genctl.models.text import caption
        from genctl.trimming import Guard, trimmed

        asides: deque[events.Event] = deque()
        guards: dict[str, Guard] = {}

        def lanes() -> Iterator[Lane]:
            for request in requests:
                try:
                    lane, prompt = self._lane(request, report)
                except GenctlError as error:
                    asides.append(events.Began(request.id, request.prompt or "", "", self.loaded.name, request.seed))
                    asides.append(events.Failed(request.id, error.code, error.message))
                    continue
                guard = Guard(lane.criteria, request.resolved.generation.keep_stop, self._text)  # type: ignore[arg-type]
                if guard.needed:
                    guards[lane.name] = guard
                kind = lane.strategy.kind
                asides.append(events.Began(request.id, prompt.text, kind, self.loaded.name, request.seed))
                yield lane

        def told() -> Iterator[events.Event]:
            for event in decode(self.forward, lanes(), width=width, interrupted=interrupted):
                while asides:
                    yield asides.popleft()
                yield event
            while asides:
                yield asides.popleft()

        for event in trimmed(caption(told(), self._detokenizer), guards):
            yield event
            if isinstance(event, (events.Finished, events.Failed)):
                guards.pop(event.lane, None)

    def _text(self, ids: Sequence[int]) -> str:
        from genctl.models.text import decode

        return decode(self.loaded.tokenizer, ids) if self.loaded.tokenizer is not None else ""

    def _detokenizer(self) -> Any:
        from genctl.models.text import Detokenizer

        return Detokenizer(self.loaded.tokenizer)

    # -- requests ------------------------------------------------------------------------------------------------------

    def read(self, request: Request) -> Prompt:
        """The request's prompt in token ids. Raises InputError or ModelError."""
        from genctl.models import chat, text

        tokenizer = self.loaded.tokenizer
        runtime = request.resolved.runtime
        if request.prompt_ids is not None:
            text.check_ids(request.prompt_ids, self.loaded.vocab_size)
            return Prompt(request.prompt_ids, self._text(request.prompt_ids))
        if tokenizer is None:
            raise ModelError(f"{self.loaded.name} has no tokenizer: give prompt_ids instead of text")
        if request.messages is not None or runtime.chat or runtime.system is not None:
            messages = request.messages or ({"role": "user", "content": request.prompt or ""},)
            rendered = chat.render_chat_text(tokenizer, list(messages), system=runtime.system, name=self.loaded.name)
            ids = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]  # the template wrote them
            return Prompt(tuple(ids), rendered)
        assert request.prompt is not None
        ids = tuple(text.encode_prompt(self.loaded, request.prompt))
        return Prompt(ids, request.prompt)

    def check(self, resolved: Resolved) -> None:
        """Whether this checkpoint can do a job at all, asked once instead of failing every prompt.

        Raises what each prompt would: UsageError or PresetError for settings, ModelError for what the checkpoint lacks.
        """
        from genctl.models import chat

        runtime = resolved.runtime
        if runtime.chat or runtime.system is not None:
            if self.loaded.tokenizer is None:
                raise ModelError(f"{self.loaded.name} has no tokenizer, so there is nothing to render a chat with")
            chat.check_template(self.loaded.tokenizer, self.loaded.name)
        trial = Request("", resolved, 0, prompt_ids=(0,))
        self._lane(trial, Report())

    def _lane(self, request: Request, report: Report) -> tuple[Lane, Prompt]:
        from genctl.decode.types import Lane
        from genctl.strategies.choose import choose

        generation = request.resolved.generation
        prompt = self.read(request)
        if not prompt.ids:
            raise InputError("the prompt has no tokens, and there is nothing to continue")
        source: tuple[int, ...] | None = None
        tokens = prompt.ids
        if self.forward.is_encoder_decoder:
            source, tokens = prompt.ids, (self._decoder_start(generation),)
        eos = _ids(generation.eos_token_id) if generation.eos_token_id is not None else self.eos
        most, limit = self._most_new_tokens(generation, len(tokens), prompt)
        strategy = choose(generation, self.loaded.tokenizer)
        lane = Lane(
            request.id,
            tokens,
            strategy,
            most,
            eos,
            source,
            self._processors(request, generation, tokens, source, most, eos),
            self._criteria(request, generation),
            request.seed,
            generation.use_cache,
            report.top,
            report.scores,
            report.trace,
            generation.num_return_sequences,
            limit,
        )
        return lane, prompt

    def _decoder_start(self, generation: Generation) -> int:
        for start in (generation.decoder_start_token_id, self.decoder_start, generation.bos_token_id, self.bos):
            if start is not None:
                return int(start)
        raise ModelError(f"{self.loaded.name} names no decoder_start_token_id, so its decoder cannot begin")

    def _most_new_tokens(self, generation: Generation, length: int, prompt: Prompt) -> tuple[int, str]:
        """How many tokens may be written, and what bounds them if it is the context."""
        context = self.context
        if context is not None and len(prompt.ids) >= context + int(self.forward.is_encoder_decoder):
            raise InputError(f"the prompt has {len(prompt.ids)} tokens, but the model's context is {context}")
        most = generation.max_new_tokens
        if most is None and generation.max_length is not None:
            most = generation.max_length - length
            if most < 1:
                raise InputError(f"the prompt has {length} tokens, but max_length is {generation.max_length}")
        if most is None:
            most = DEFAULT_NEW_TOKENS
        if context is None or most <= context - length:
            return most, ""
        return context - length, f"context of {context} tokens"

    def _processors(
        self,
        request: Request,
        generation: Generation,
        tokens: Sequence[int],
        source: Sequence[int] | None,
        most: int,
        eos: tuple[int, ...],
    ) -> tuple[Processor, ...]:
        import torch

        from genctl.decode.processors.build import Material, build

        device = self.forward.device
        material = Material(
            generation=generation,
            prompt_len=len(tokens),
            max_length=len(tokens) + most,
            eos=eos,
            vocab_size=self.forward.vocab_size,
            device=device,
            encoder_ids=torch.tensor([list(source or tokens)], dtype=torch.long, device=device),
            tokenizer=self.loaded.tokenizer,
            num_beams=generation.num_beams,
            is_encoder_decoder=self.forward.is_encoder_decoder,
            seed=request.seed,
            explicit=request.resolved.processors,
            allow_plugins=self.allow_plugins,
            unconditional=self._unconditional(generation, tokens),
        )
        return build(material)

    def _unconditional(self, generation: Generation, tokens: Sequence[int]) -> Unconditional | None:
        """What guidance_scale leads away from: the negative prompt, or the prompt's last token alone."""
        if generation.guidance_scale is None or generation.guidance_scale == 1.0:
            return None
        if self.forward.is_encoder_decoder:
            raise ModelError(
                "guidance_scale needs a decoder-only checkpoint: an encoder-decoder has no negative prompt"
            )
        from genctl.decode.guidance import Unconditional
        from genctl.models.text import encode_prompt

        negative = generation.negative_prompt
        ids = tokens[-1:] if negative is None else encode_prompt(self.loaded, negative)
        return Unconditional(self.forward, ids, len(tokens), use_cache=generation.use_cache)

    def _criteria(self, request: Request, generation: Generation) -> tuple[Criterion, ...]:
        from genctl.decode.stopping.build import Material, build

        material = Material(
            generation=generation,
            tokenizer=self.loaded.tokenizer,
            decode=None if self.loaded.tokenizer is None else self._text,
            explicit=request.resolved.stopping,
            allow_plugins=self.allow_plugins,
        )
        return build(material)


def planned(
    runtime: Runtime, layers: Sequence[Layer], *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> Resolved:
    """The job as it would be resolved, from the checkpoint's settings alone: its weights are not read."""
    from genctl.models import hub

    found = hub.generation_config(runtime, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    return resolve([model_layer(found, runtime.model), *layers])


# Architectures whose configs name a length that bounds nothing: positions are relative or recurrent.
UNBOUNDED = frozenset(
    {"t5", "mt5", "umt5", "longt5", "switch_transformers", "bloom", "mpt", "mamba", "mamba2", "falcon_mamba"}
)


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
