"""The `--model_args` of lm_eval: names of its hf backend, and the knobs by which genctl loads a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from genctl.errors import UsageError, nearest
from genctl.params import Generation, Runtime, knobs

# knobs that the harness gives in another way: what to say instead
_ELSEWHERE = {
    "model": "the checkpoint is called pretrained",
    "backend": "a server has backends of lm_eval's own, such as local-completions",
    "chat": "give --apply_chat_template to lm_eval",
    "system": "give --system_instruction to lm_eval",
    "max_new_tokens": "the argument is called max_gen_toks",
}


@dataclass(frozen=True)
class Arguments:
    """What the backend itself reads, under the names of lm_eval's hf backend. `settings` are knobs of genctl."""

    batch_size: int = 16  # rows in a pass; results do not depend on it
    max_length: int | None = None  # tokens; None is the model's context
    max_gen_toks: int = 256
    add_bos_token: bool | None = None  # None: as the tokenizer does
    prefix_token_id: int | None = None  # read before the first scored token; None is BOS, or EOS without one
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    think_end_token: str | int | None = None  # answers begin behind it
    allow_pickle: bool = False
    trust_remote_code: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def read(pretrained: str, given: Mapping[str, Any]) -> tuple[str, Arguments]:
    """The checkpoint and its arguments. Raises UsageError for a name that is none, with the nearest one."""
    own = {item.name for item in fields(Arguments)} - {"settings"}
    loading, generating = knobs(Runtime), knobs(Generation)
    named: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    place = str(pretrained)
    for name, value in given.items():
        if value is None:
            continue
        if name == "batch_size":
            named[name] = _batch_size(value, given.get("max_batch_size"))
        elif name == "gguf_file":
            place = str(Path(place) / str(value))
        elif name in own:
            named[name] = value
        elif name in _ELSEWHERE:
            raise UsageError(f"model_args: {name} = {value!r:.60}: {_ELSEWHERE[name]}")
        elif name in loading:
            rest[name] = value
        elif name in generating:
            raise UsageError(f"model_args: {name} = {value!r:.60}: give --gen_kwargs {name}={value} to lm_eval")
        elif name != "max_batch_size":
            near = nearest(name, [*own, *loading.keys() - _ELSEWHERE.keys(), "pretrained", "gguf_file"])
            hint = (
                f"did you mean {near}?"
                if near
                else "they are those of `genctl run --help` for models, such as dtype, quantize and runtime"
            )
            raise UsageError(f"model_args: genctl has no argument {name!r}", hint=hint)
    for name in ("max_length", "max_gen_toks"):
        if name in named and (type(named[name]) is not int or named[name] < 1):
            raise UsageError(f"model_args: {name} = {named[name]!r:.60} is not a number of tokens")
    return place, Arguments(**named, settings=rest)


def _batch_size(value: Any, most: Any) -> int:
    """Rows in a pass; "auto" and "auto:N" are genctl's own choice, at most `max_batch_size`."""
    if str(value).partition(":")[0] == "auto":
        return min(Arguments.batch_size, int(most or Arguments.batch_size))
    if not str(value).isdecimal() or int(value) < 1:
        raise UsageError(f"model_args: batch_size = {value!r:.60} is neither a number of rows nor auto")
    return int(value)
