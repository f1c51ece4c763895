"""Checks of a checkpoint folder that need no torch: JSON files, generation settings and safetensors headers.

All input is untrusted. A folder is refused with one sentence; its Python files are never run.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from genctl.config.names import FIELDS
from genctl.errors import ModelError, reason_of
from genctl.models import tokenizer_limits, weights
from genctl.models.config_limits import check_numbers, check_size, parts
from genctl.models.fingerprint import Stamps, fingerprint, stamps
from genctl.models.libraries import is_library_error
from genctl.models.weights import WeightFiles, read_json

if TYPE_CHECKING:
    import torch

# -- the generation settings of a checkpoint, as transformers takes them from its files: generation_config.json, or
# config.json if that file is not there (`GenerationConfig.from_pretrained` and `.from_model_config`) ------------------


FILE = "generation_config.json"
_PARTS = ("decoder", "generator", "text_config")  # where a nested config has the text decoder's fields


class GenerationSettings(NamedTuple):
    """Raw keys and values, without those that are None, and the name of their file."""

    values: dict[str, Any]
    file: str = FILE


def read_settings(folder: Path, config: dict[str, Any]) -> GenerationSettings:
    """The settings of a checkpoint folder with this config. Raises ModelError for a file that cannot be read."""
    if not (folder / FILE).is_file():
        return GenerationSettings(settings_of_config(config), "config.json")
    values = read_json(folder / FILE, FILE)
    settings = {key: value for key, value in values.items() if value is not None and not key.startswith("_")}
    settings.pop("transformers_version", None)
    return GenerationSettings(settings)


def settings_of_config(config: dict[str, Any]) -> dict[str, Any]:
    """The settings in a config.json: its own fields, and missing ones from its text decoder."""
    settings = {name: config[name] for name in FIELDS if config.get(name) is not None}
    if config.get("force_bos_token_to_be_generated"):  # an old name in BART's configs
        settings["forced_bos_token_id"] = config.get("bos_token_id")
    nested = next((config[part] for part in _PARTS if config.get(part)), None)
    if isinstance(nested, dict):
        settings = {name: nested[name] for name in FIELDS if name in nested} | settings
    return {name: value for name, value in settings.items() if value is not None}


def known_ids(settings: GenerationSettings, vocabulary: int) -> tuple[GenerationSettings, list[str]]:
    """The settings without the special ids of a config.json that the model lacks, and a note on each.

    Such an id is often left over from another checkpoint, and never occurs in a text. Raises ModelError for one in
    generation_config.json, or for the decoder start token.
    """
    values, notes = dict(settings.values), []
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id"):
        value = values.get(name)
        if name != "eos_token_id" and isinstance(value, list):
            raise ModelError(f"{settings.file}: {name} = {value!r:.40} is a list, and has to be one id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for id_ in ids:
            if (type(id_) is int and 0 <= id_ < vocabulary) or (name, id_) == ("pad_token_id", -1):  # -1: none
                continue
            has = f"the model's ids are 0 to {vocabulary - 1:,}"
            if settings.file == FILE or name == "decoder_start_token_id":
                raise ModelError(f"{name} is {id_!r:.40}, but {has}")
            notes.append(f"{settings.file}: {name} = {id_!r:.40} is not used: {has}")
            values[name] = [one for one in ids if type(one) is int and 0 <= one < vocabulary] or None
    return settings._replace(values={name: value for name, value in values.items() if value is not None}), notes


# -- the checks --------------------------------------------------------------------------------------------------------


TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model",
    "source.spm", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model",
)  # fmt: skip
_READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".spm", ".tiktoken")  # libraries read these completely into memory


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed all checks without torch."""

    folder: Path
    config: dict[str, Any]
    generation: GenerationSettings
    weights: WeightFiles
    has_tokenizer: bool
    files: Stamps = field(default_factory=dict)  # the checked states of all files that determine its output
    gguf: str = ""  # the name of a GGUF file in `folder` that is the complete checkpoint

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    def fingerprint(self) -> str:
        """A digest of all bytes that determine its output. Raises ModelError for files that have changed since."""
        return fingerprint(self.folder, self.files)


def inspect(folder: Path, *, allow_pickle: bool, trust_remote_code: bool, need_tokenizer: bool) -> Checkpoint:
    """Check a checkpoint folder. Raises ModelError with the problem."""
    check_files(folder)
    config = read_config(folder)
    check_code(config, trust_remote_code)
    generation = read_settings(folder, config)
    has_tokenizer = check_tokenizer(folder, needed=need_tokenizer)
    check_numbers(config)
    weight_files = weights.find(folder, config, allow_pickle=allow_pickle)
    if not weight_files.pickled:
        if not weight_files.tensors:
            raise ModelError(f"{weight_files.files[0].name} holds no tensors")
        check_size(config, weight_files)
        _check_types(config, weight_files)
    files = stamps(folder, weight_files.files, code=trust_remote_code)
    return Checkpoint(folder, config, generation, weight_files, has_tokenizer, files)


def check_tokenizer(folder: Path, *, needed: bool) -> bool:
    """Whether a folder has a tokenizer; checks its files. Raises ModelError if it is `needed` and missing."""
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
    tokenizer_limits.check(folder)
    if needed and not has_tokenizer:
        raise ModelError(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, vocab.json, …), so it cannot read text",
            hint='prompts in token ids need none: rows such as {"prompt_ids": [5, 60, 7]} in a JSONL input',
        )
    return has_tokenizer


def check_vocabulary(tokenizer: Any, vocab_size: int) -> list[str]:
    """A note if the tokenizer has more tokens than the model. Raises ModelError if it adds such a token to texts."""
    try:
        added = tokenizer("", add_special_tokens=True)["input_ids"]
    except BaseException as error:
        if not is_library_error(error):
            raise
        added = []  # it cannot read an empty text
    if (beyond := next((id for id in added if id >= vocab_size), None)) is not None:
        name = tokenizer.convert_ids_to_tokens(beyond)
        raise ModelError(
            f"the tokenizer adds {name} to each text, whose id is {beyond}; the model's are 0 to {vocab_size - 1}"
        )
    if len(tokenizer) <= vocab_size:
        return []
    several = f"the tokenizer has {len(tokenizer):,} tokens, the model only {vocab_size:,}"
    return [f"{several}: prompts that use the others are refused"]


def check_files(folder: Path) -> None:
    """Refuse files that no checkpoint contains, and those that would block a reader. Raises ModelError.

    Libraries open the files of a checkpoint by their usual names; a pipe or a device may never end.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ModelError(f"cannot read {weights.shown(str(folder))}: {reason_of(error)}") from error
    for path in paths:
        try:
            state = path.stat()
        except OSError:  # a dangling link counts as missing
            continue
        if not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
            raise ModelError(f"{weights.shown(path.name)} in {weights.shown(str(folder))} is no regular file")
        if path.suffix in _READ_WHOLE and stat.S_ISREG(state.st_mode) and state.st_size > weights.LARGEST_JSON:
            raise ModelError(f"{weights.shown(path.name)} has {state.st_size:,} bytes, too many to be one")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises ModelError if the folder is no checkpoint."""
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} is an adapter (adapter_config.json), not a whole checkpoint",
            hint=f"give its base as the model, and --adapter {folder}",
        )
    if not (folder / "config.json").is_file():
        holds = weights.few(sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir()), 6)
        why = f"it has no config.json, only {holds}" if holds else "it is empty"
        raise ModelError(f"{folder} is not a checkpoint: {why}")
    config = read_json(folder / "config.json", "config.json")
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ModelError(f"config.json in {folder} has no model_type, so it does not say which architecture it is")
    return config


def _check_types(config: dict[str, Any], files: WeightFiles) -> None:
    if config.get("quantization_config"):
        return
    for name, tensor in files.tensors.items():
        if name.endswith(".weight") and not tensor.dtype.startswith(("F", "BF")):
            raise ModelError(
                f"tensor {weights.shown(name)} holds {tensor.dtype} numbers; weights must be floating-point numbers"
            )


def check_code(config: dict[str, Any], trust_remote_code: bool) -> None:
    for part, where in parts(config):
        for name in ("_attn_implementation", "attn_implementation"):
            value = part.get(name)
            if isinstance(value, str) and "/" in value and not trust_remote_code:
                raise ModelError(
                    f"config.json asks for code from elsewhere ({where}{name} = {value!r:.80}), "
                    "refused without --trust-remote-code"
                )


_CHECKED = 2 << 30  # bytes of weights up to which all numbers are checked


def finite_check(size: int) -> Callable[[str, torch.Tensor], None]:
    """A check for each tensor that raises ModelError; for more than `_CHECKED` bytes of weights it checks nothing."""
    return _check_finite if size <= _CHECKED else lambda name, weight: None


def _check_finite(name: str, weight: torch.Tensor) -> None:
    import torch

    if type(weight) not in (torch.Tensor, torch.nn.Parameter):  # torchao has codes and scales in one tensor
        if not hasattr(weight, "dequantize"):
            return
        weight = weight.dequantize()
    if weight.device.type == "meta" or not weight.is_floating_point() or not weight.numel():
        return
    # one pass: minimum and maximum are finite exactly if all numbers are
    low, high = torch.aminmax(weight.detach().float() if weight.element_size() < 2 else weight.detach())
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~torch.isfinite(weight.detach().float())).sum())
        why = "the weights are damaged"
        if weight.dtype == torch.float16:
            why = f"{why}, or too large for float16 (--dtype bfloat16 and float32 hold them)"
        raise ModelError(f"tensor {weights.shown(name)} holds {bad:,} NaN or infinite numbers: {why}")
