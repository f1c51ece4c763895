"""The model that lm_eval calls: it tokenises like lm_eval's hf backend, and genctl computes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm.std import tqdm  # type: ignore[import-untyped]

from genctl.api import Model, load
from genctl.engines.protocol import Detail
from genctl.engines.score_passes import Passes, Piece
from genctl.errors import GenctlError, InputError, ModelError, UsageError, count, nearest
from genctl.events import Token
from genctl.events.results import Collector, Result
from genctl.models.chat import render_chat_text
from genctl.models.weights import read_json
from genctl.params import Generation, Runtime, knobs
from genctl.process import versions

# -- the `--model_args` of lm_eval: names of its hf backend, and the settings with which genctl loads a checkpoint -----


_ELSEWHERE = ("model", "backend", "chat", "system")  # settings that the harness provides in another way


@dataclass(frozen=True)
class Arguments:
    """The backend's own arguments, named as in lm_eval's hf backend. `settings` are knobs of genctl."""

    batch_size: int = 16  # rows in a pass; results do not depend on it
    max_length: int | None = None  # tokens; None is the model's context
    max_gen_toks: int = 256
    add_bos_token: bool | None = None  # None: as the tokenizer does
    prefix_token_id: int | None = None  # read before the first scored token; None is BOS, or EOS without one
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    think_end_token: str | int | None = None  # answers begin after it
    allow_pickle: bool = False
    trust_remote_code: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def read(pretrained: str, given: Mapping[str, Any]) -> tuple[str, Arguments]:
    """The checkpoint and its arguments. Raises UsageError for an unknown name, with the nearest known one."""
    own = {item.name for item in fields(Arguments)} - {"settings"}
    loading = knobs(Runtime).keys() - {*_ELSEWHERE}
    named: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    place = str(pretrained)
    for name, value in given.items():
        if value is None or name == "max_batch_size":
            continue
        if name == "batch_size":
            named[name] = _batch_size(value, given.get("max_batch_size"))
        elif name == "gguf_file":
            place = str(Path(place) / str(value))
        elif name in own:
            named[name] = value
        elif name in loading:
            rest[name] = value
        elif name in knobs(Generation):
            raise UsageError(f"model_args: {name} = {value!r:.60}: give --gen_kwargs {name}={value} to lm_eval")
        else:
            near = nearest(name, [*own, *loading, "pretrained", "gguf_file"])
            raise UsageError(
                f"model_args: genctl has no argument {name!r}", hint=f"did you mean {near}?" if near else ""
            )
    for name in ("max_length", "max_gen_toks"):
        if name in named and (type(named[name]) is not int or named[name] < 1):
            raise UsageError(f"model_args: {name} = {named[name]!r:.60} is not a number of tokens")
    return place, Arguments(**named, settings=rest)


def _batch_size(value: Any, most: Any) -> int:
    """Rows in a pass; for "auto" and "auto:N" genctl chooses, up to `max_batch_size`."""
    if str(value).partition(":")[0] == "auto":
        return min(Arguments.batch_size, int(most or Arguments.batch_size))
    if not str(value).isdecimal() or int(value) < 1:
        raise UsageError(f"model_args: batch_size = {value!r:.60} is neither a number of rows nor auto")
    return int(value)


_DEFAULT_LENGTH = 2048  # context in tokens if a model's files have none, as in lm_eval
_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")
_AT_ONCE = 64  # texts of a rolling task scored together, with all their windows

Encoded = tuple[Any, list[int], list[int]]  # the request's own texts, context, continuation


class GenctlLM(TemplateLM):  # type: ignore[misc]
    """A checkpoint as a model of lm_eval. `pretrained` and the rest are `--model_args`: see `Arguments`.

    Raises GenctlError if the arguments are wrong or the checkpoint cannot be loaded.
    """

    def __init__(self, pretrained: str, **given: Any) -> None:
        import torch

        super().__init__()
        if str(given.get("device")).startswith("cuda") and not torch.cuda.is_available():
            given["device"] = None  # cuda:0 is the default of lm_eval
        place, self.arguments = read(pretrained, given)
        arguments = self.arguments
        self.generator: Model = load(
            place,
            allow_pickle=arguments.allow_pickle,
            trust_remote_code=arguments.trust_remote_code,
            **arguments.settings,
        )
        self.tokenizer = self.generator.tokenizer
        if self.tokenizer is None:
            raise ModelError(f"{place} has no tokenizer, and the tasks of lm_eval are texts")
        self.planner = self.generator.session.planner
        self.passes = Passes(self.planner.forward, batch_size=arguments.batch_size, detail=Detail(top=1))
        self.backend = "seq2seq" if self.planner.forward.is_encoder_decoder else "causal"
        self.batch_size = arguments.batch_size
        self.max_length = arguments.max_length or self._context()
        context = self.planner.context
        if context is not None and self.max_length > context:
            raise UsageError(f"max_length = {self.max_length}: the context of {place} is {context} tokens")

    # -- texts and token ids ---------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS."""
        known = (self.tokenizer.eos_token_id, *self.planner.eos)
        found = next((id for id in known if id is not None), None)
        if found is None:
            raise ModelError(f"{self.generator.name} names no EOS", hint="give prefix_token_id=N in model_args")
        return int(found)

    @property
    def prefix_token_id(self) -> int:
        """The id before the first scored token if a request has no context."""
        for id in (self.arguments.prefix_token_id, self.tokenizer.bos_token_id):
            if id is not None:
                return int(id)
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """A name for lm_eval's cache of requests."""
        return str(self.tokenizer.name_or_path or self.generator.name).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text. BOS is not added to a text that begins with it."""
        special = self.arguments.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])):
            special = False
        return [*self.tokenizer.encode(string, add_special_tokens=special is None or special)]

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """A conversation as a text. Without `add_generation_prompt` its last message is continued."""
        variables = dict(self.arguments.chat_template_args)
        if self.arguments.enable_thinking is not None:
            variables["enable_thinking"] = self.arguments.enable_thinking
        return render_chat_text(
            self.tokenizer,
            chat_history,
            name=self.generator.name,
            continues=not add_generation_prompt,
            variables=variables,
        )

    def get_model_info(self) -> dict[str, Any]:
        """Information that lm_eval saves with the results."""
        session = self.generator.session
        return {
            "model_source": "genctl",
            "digest": session.loaded.fingerprint(),
            **dict(session.about.facts),
            "genctl_versions": versions("torch", "transformers"),
        }

    def _context(self) -> int:
        checkpoint = self.generator.session.loaded.checkpoint
        config: Mapping[str, Any] = checkpoint.config if checkpoint is not None else {}
        part = config.get("text_config") or config
        named = (part[name] for name in _LENGTHS if isinstance(part.get(name), int))
        if (known := next(named, self.planner.context)) is not None:
            return int(known)
        file = self.generator.session.loaded.path / "tokenizer_config.json"
        length = read_json(file, file.name).get("model_max_length") if file.is_file() else None
        # transformers writes 1e30 for a tokenizer without a bound
        return int(length) if isinstance(length, (int, float)) and 0 < length < 1e9 else _DEFAULT_LENGTH

    # -- likelihoods -----------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation given its context, and whether greedy search would generate it."""
        if self.arguments.enable_thinking:
            raise UsageError("enable_thinking is for tasks that generate; log-likelihoods have no place for thoughts")
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        pieces = [self._piece(*request) for request in requests]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(pieces)
        with tqdm(total=len(pieces), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            for place, tokens in self._scored(pieces):
                total = math.fsum(token.logprob for token in tokens)
                answers[place] = total, all(token.top[0][0] == token.id for token in tokens)
                if requests[place][0] is not None:  # None: a window; only the result of its whole text is cached
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], answers[place])
                bar.update()
        return answers

    def _piece(self, texts: Any, context: list[int], continuation: list[int]) -> Piece:
        """The last `max_length` + 1 ids; the last one is only predicted."""
        if not continuation:
            raise InputError(f"lm_eval: a continuation has no tokens: {str(texts)[-200:]!r}")
        if len(continuation) > self.max_length:
            longest = f"but max_length is {self.max_length}"
            raise InputError(f"lm_eval: a continuation has {count(len(continuation), 'token')}, {longest}")
        if self.backend == "seq2seq":
            start = self.planner.decoder_start if self.planner.decoder_start is not None else self.planner.bos
            if start is None:
                raise ModelError(f"{self.generator.name} names no decoder_start_token_id, so its decoder cannot begin")
            return Piece((start, *continuation), 1, tuple(context[-self.max_length :]))
        ids = (*context, *continuation)[-(self.max_length + 1) :]
        return Piece(ids, len(ids) - len(continuation))

    def _scored(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, list[Token]]]:
        """The tokens of each piece, with its index. A context shared by several pieces is read once."""
        shared: dict[tuple[int, ...], list[int]] = {}
        for place, piece in enumerate(pieces):
            if self.backend == "causal" and self.passes.continues:
                shared.setdefault(piece.ids[: piece.first], []).append(place)
        together = {place for places in shared.values() if len(places) > 1 for place in places}
        alone = [place for place in range(len(pieces)) if place not in together]
        for batch in self.passes.batches([pieces[place] for place in alone]):
            places = [alone[number] for number in batch]
            yield from zip(places, self.passes.read([pieces[place] for place in places]), strict=True)
        for context, places in shared.items():
            if len(places) > 1:
                endings = [pieces[place].ids[pieces[place].first :] for place in places]
                yield from zip(places, self.passes.continuations(context, endings), strict=True)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows of `max_length` that share one token."""
        totals: list[float] = []
        texts = [request.args[0] for request in requests]
        for begin in range(0, len(texts), _AT_ONCE):
            part = texts[begin : begin + _AT_ONCE]
            windows = [
                [
                    make_disjoint_window(window)
                    for window in get_rolling_token_windows(
                        token_list=self.tok_encode(text),
                        prefix_token=self.prefix_token_id,
                        max_seq_len=self.max_length,
                        context_len=1,
                    )
                ]
                for text in part
            ]
            flat = [(None, *window) for several in windows for window in several]
            answers = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
            for text, several in zip(part, windows, strict=True):
                totals.append(math.fsum(next(answers)[0] for _ in several))
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    # -- answers ---------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """An answer to each context, up to its first stop string. Requests with equal settings are decoded together."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(place)
        plans = {key: self._settings(requests[places[0]].args[1]) for key, places in groups.items()}
        with tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for key, places in groups.items():
                settings, stops = plans[key]
                prompts = [self._prompt(requests[place].args[0], settings["max_new_tokens"]) for place in places]
                for place, result in self._generated(prompts, places, settings):
                    context, options = requests[place].args
                    answers[place] = self._answer(result, stops)
                    self.cache_hook.add_partial("generate_until", (context, options), answers[place])
                    bar.update()
        return answers

    def _settings(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """genctl's knobs for a task's settings, and its stop strings. Raises UsageError for an unknown setting."""
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), self.arguments.max_gen_toks))
        eos = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        stops = [text for text in handle_stop_sequences(wanted.pop("until", None), eos=eos) if text]
        length = wanted.pop("max_gen_toks")
        if self.backend == "causal" and length >= self.max_length:
            raise UsageError(f"max_gen_toks = {length} leaves no room for a prompt: max_length is {self.max_length}")
        if not wanted.get("temperature"):
            wanted.pop("temperature", None)
        known = knobs(Generation)
        for name in wanted:
            if name not in known and name != "seed":
                near = nearest(name, known)
                hint = f"did you mean {near}?" if near else ""
                raise UsageError(f"gen_kwargs: genctl has no setting {name!r}", hint=hint)
        if wanted["do_sample"]:
            import torch

            wanted.setdefault("seed", int(torch.initial_seed() % 2**32))  # lm_eval's --seed
        # stop strings are cut off below, as in lm_eval; they also end a thought, as in its `hf` model
        fixed = {
            "stop_strings": stops,
            "stop_in_thought": True,
            "keep_stop": True,
            "stop_token_ids": [self.eot_token_id],
        }
        return {"max_new_tokens": length, **fixed, **wanted}, stops

    def _prompt(self, context: str, length: int) -> list[int]:
        ids = self.tok_encode(context) or [self.prefix_token_id]
        room = self.max_length - length if self.backend == "causal" else self.max_length
        return ids[-room:]

    def _generated(
        self, prompts: Sequence[Sequence[int]], places: Sequence[int], settings: Mapping[str, Any]
    ) -> Iterator[tuple[int, Result]]:
        """Results as they finish, each with the index of its request."""
        collector = Collector()
        for event in self.generator.stream(prompts, batch_size=self.batch_size, **settings):
            result = collector.feed(event)
            if result is not None:
                place = places[int(result.lane)]
                if result.error is not None:
                    raise GenctlError(f"lm_eval: request {place + 1}: {result.error.message}")
                yield place, result

    def _answer(self, result: Result, stops: list[str]) -> str:
        ids = list(result.sequences[0].token_ids)
        end = self.arguments.think_end_token
        if isinstance(end, int) and end in ids:
            ids = ids[len(ids) - ids[::-1].index(end) :]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if isinstance(end, int):
            text = text.lstrip()
        return str(postprocess_generated_text(text, stops, end if isinstance(end, str) else None))
