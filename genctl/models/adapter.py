"""`--adapter FOLDER`: a PEFT adapter, merged into the weights of its base or computed beside them.

The adapter is checked twice: its files without torch, then each of its tensors against the base.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genctl.errors import FINGERPRINT, ModelError
from genctl.models import config_limits, fingerprint, libraries, weights
from genctl.models.fingerprint import Stamps, stamps
from genctl.models.libraries import guarded
from genctl.models.weights import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The kinds that change only the base's own layers: callers of the base are not affected.
_INSIDE = ("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "HRA", "FOURIERFT", "LN_TUNING")
_SIZES = (
    "r", "init_r", "target_r", "oft_block_size", "boft_block_size", "boft_block_num", "n_frequency", "num_vectors",
)  # fmt: skip
_LEAST = 64  # sizes up to this one are always accepted
_PATTERNS = (  # settings with regular expressions: strings, lists, or the keys of objects
    "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_pattern",
)  # fmt: skip
_REPEAT = re.compile(r"[*+{]|(?<![(*+?}])\?")  # neither (?: nor the ? of a lazy repeat
_SHARED = "the layers that it makes share their weights"


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder that passed all checks without torch."""

    folder: Path
    config: dict[str, Any]
    tensors: frozenset[str]
    files: Stamps

    def combined(self, base: str) -> str:
        """The identity of a base with this adapter: a digest of both. Raises ModelError if files have changed."""
        own = fingerprint.fingerprint(self.folder, self.files)
        return FINGERPRINT + hashlib.sha256(f"{base}\n{own}\n".encode()).hexdigest()


def find(place: str, *, merge: bool | None) -> Adapter:
    """The adapter in the folder `place`, checked. `merge`: see `apply`. Raises ModelError."""
    folder = Path(place).expanduser()
    what = f"--adapter {weights.shown(place)}"
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{what}: there is no {CONFIG} in such a folder")
    libraries.require(what, ("peft",), "peft")
    config = weights.read_json(folder / CONFIG, CONFIG)
    kind = "aLoRA" if config.get("alora_invocation_tokens") else config.get("peft_type")
    if kind not in _INSIDE:
        raise ModelError(f"{what} is of the kind {kind!r:.40}; genctl adds {', '.join(_INSIDE)}")
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{what} has no {WEIGHTS}", hint="pickle files can run code; save it as safetensors")
    tensors = weights.read_header(folder / WEIGHTS)
    if not tensors:
        raise ModelError(f"{what}: {WEIGHTS} holds no tensors")
    _check_sizes(what, config, tensors)
    _check_patterns(what, config)
    if merge and config.get("layer_replication"):
        raise ModelError(f"merge_adapter = true contradicts layer_replication of {what}: {_SHARED}")
    files = stamps(folder, [folder / CONFIG, folder / WEIGHTS], code=False)
    return Adapter(folder, config, frozenset(tensors), files)


def _check_sizes(what: str, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse sizes above every dimension of the tensors, before peft builds layers from them. Raises ModelError."""
    widest = max(_LEAST, *(max(tensor.shape, default=1) for tensor in tensors.values()))
    patterns, copies = config.get("rank_pattern") or {}, config.get("layer_replication") or []
    if not isinstance(patterns, dict):
        raise ModelError(f"{what}: rank_pattern in {CONFIG} is no object")
    ranks = {f"rank_pattern of {weights.shown(key, 40)}": value for key, value in patterns.items()}
    for name, value in {**{key: config.get(key) for key in _SIZES}, **ranks}.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and number > widest:
                problem = f"{CONFIG} says {name} = {number!s:.30}"
                raise ModelError(f"{what}: {problem}, but no tensor of {WEIGHTS} is of this size (at most {widest:,})")
    try:
        layers = sum(max(0, last - begin) for begin, last in copies)
    except (TypeError, ValueError):
        raise ModelError(f"{what}: layer_replication in {CONFIG} is no list of first and last layers") from None
    if layers > config_limits.most_layers(len(tensors)):
        problem = f"layer_replication makes {layers!s:.30} layers, but {WEIGHTS} holds {len(tensors):,} tensors"
        raise ModelError(f"{what}: {problem}")


def _check_patterns(what: str, config: dict[str, Any]) -> None:
    """Refuse regular expressions that may keep `re`, which peft uses for names, busy for years. Raises ModelError."""
    for value in filter(None, map(config.get, _PATTERNS)):
        patterns = [value] if isinstance(value, str) else value if isinstance(value, (list, dict)) else []
        for pattern in map(str, patterns):
            bare = re.sub(r"\\.|\[(\\.|[^]\\])*\]", "x", pattern[:1001])  # without escapes and character classes
            if len(pattern) > 1000 or re.search(r"\)[*+{]", bare) or len(_REPEAT.findall(bare)) > 6:
                raise ModelError(
                    f"{what}: matching {weights.shown(pattern, 60)} in {CONFIG} may take for ever: patterns with "
                    "repeated groups, with more than 6 repeats or above 1,000 characters are refused"
                )


def apply(model: Any, adapter: Adapter, *, merge: bool | None) -> tuple[Any, str]:
    """The base with the adapter inside, and a note. Raises ModelError if the two do not fit together.

    With `merge` the product is added to the weights, and the adapter is gone. None merges if that is correct
    (see `_why_beside`).
    """
    from peft import PeftModel, get_peft_model_state_dict

    what = f"--adapter {adapter.folder}"
    own = set(model.state_dict())
    wrapped = guarded(
        lambda: PeftModel.from_pretrained(model, str(adapter.folder), is_trainable=False, local_files_only=True),
        f"{what} does not fit the model",
    )
    expected = set(get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    if lacking := sorted(expected - adapter.tensors):
        raise ModelError(f"{what} lacks {len(lacking)} tensors for this model: {weights.few(lacking)}")
    if extra := sorted(name for name in adapter.tensors - expected if _of_base(name) not in own):
        raise ModelError(f"{what} holds {len(extra)} tensors that this model has no place for: {weights.few(extra)}")
    why = _why_beside(wrapped, adapter.config)
    if why and merge:
        raise ModelError(f"merge_adapter = true contradicts {what}: {why}")
    if merge or (merge is None and not why):
        result = guarded(lambda: wrapped.merge_and_unload(safe_merge=True), f"{what} cannot be merged into the weights")
        how = "merged into the weights"
    else:
        result, how = wrapped.get_base_model(), "beside the weights" + (f" ({why})" if why else "")
    note = f"{adapter.config['peft_type']} adapter with {len(adapter.tensors)} tensors, {how}"
    return result.eval().requires_grad_(False), note


def _of_base(name: str) -> str:
    """The base's name for a tensor of an adapter file: peft saves layers of embeddings, too."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _why_beside(wrapped: Any, config: dict[str, Any]) -> str:
    """Why the product cannot be added to the weights: it would change another layer, or has no place there."""
    if config.get("layer_replication"):
        return f"layer_replication: {_SHARED}"
    users: dict[int, set[str]] = {}
    for name, weight in wrapped.named_parameters(remove_duplicate=False):
        users.setdefault(weight.data_ptr(), set()).add(_of_base(name))
    for name, module in wrapped.named_modules():
        layer = getattr(module, "base_layer", None)
        if layer is None or name.endswith(".token_adapter"):  # token_adapter handles tied weights
            continue
        weight, name = getattr(layer, "weight", None), _of_base(name)
        others = set() if weight is None else users.get(weight.data_ptr(), set()) - {f"{name}.weight"}
        if others:
            return f"{name} shares its weight with {weights.few(sorted(others))}"
        if config.get("lora_bias") and getattr(layer, "bias", None) is None:
            return f"lora_bias, and {name} has no bias"
    return ""
