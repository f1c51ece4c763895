"""`--adapter FOLDER`: the weights of a PEFT adapter, added into those of its base or computed beside them.

The adapter is checked before and after: its files without torch, and each tensor of it against the base.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genctl.errors import ModelError
from genctl.identity import PREFIX
from genctl.models import fingerprint, optional_packages, weights
from genctl.models.library_errors import guarded
from genctl.params import Runtime

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The kinds that live inside the base's own layers: what calls the base need not know of them.
_INSIDE = ("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "HRA", "FOURIERFT", "LN_TUNING")


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder that passed all checks without torch."""

    folder: Path
    config: dict[str, Any]
    tensors: frozenset[str]
    files: fingerprint.Stamps

    def combined(self, base: str) -> str:
        """The identity of a base with this adapter: a digest of both. Raises ModelError for files that changed."""
        own = fingerprint.fingerprint(self.folder, self.files)
        return PREFIX + hashlib.sha256(f"{base}\n{own}\n".encode()).hexdigest()


def find(runtime: Runtime) -> Adapter | None:
    """The adapter of --adapter, checked; None without the option. Raises ModelError."""
    if runtime.adapter is None:
        return None
    folder = Path(runtime.adapter).expanduser()
    what = f"--adapter {weights.shown(runtime.adapter)}"
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{what}: there is no {CONFIG} in such a folder")
    optional_packages.require(what, ("peft",), "peft")
    config = weights.read_json(folder / CONFIG, CONFIG)
    kind = config.get("peft_type")
    if kind not in _INSIDE or config.get("alora_invocation_tokens"):
        kind = "aLoRA" if config.get("alora_invocation_tokens") else kind
        raise ModelError(f"{what} is of the kind {kind!r:.40}; genctl adds {', '.join(_INSIDE)}")
    mapping = config.get("auto_mapping") or {}
    library = mapping.get("parent_library", "") if isinstance(mapping, dict) else None
    if not isinstance(library, str):
        raise ModelError(f"{what}: auto_mapping in {CONFIG} does not name a library")
    if mapping and library.split(".")[0] != "transformers":
        raise ModelError(f"{what}: it is for a model of another library than transformers")
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{what} has no {WEIGHTS}", hint="pickle files can run code; save it as safetensors")
    tensors = frozenset(weights.read_header(folder / WEIGHTS))
    if not tensors:
        raise ModelError(f"{what}: {WEIGHTS} holds no tensors")
    stamps = fingerprint.stamps(folder, [folder / CONFIG, folder / WEIGHTS], code=False)
    return Adapter(folder, config, tensors, stamps)


def apply(model: Any, adapter: Adapter, *, merge: bool) -> tuple[Any, str]:
    """The base with the adapter inside, and a note. Raises ModelError where the two do not fit together.

    With `merge` the adapter's product is added to the weights, and nothing of it is left.
    """
    from peft import PeftModel, get_peft_model_state_dict

    what = f"--adapter {adapter.folder}"
    own = set(model.state_dict())
    wrapped = guarded(
        lambda: PeftModel.from_pretrained(model, str(adapter.folder), is_trainable=False, local_files_only=True),
        f"{what} does not fit the model",
    )
    expected = set(get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    lacking = sorted(expected - adapter.tensors)
    if lacking:
        raise ModelError(f"{what} lacks {len(lacking)} tensors for this model: {weights.few(lacking)}")
    other = sorted(name for name in adapter.tensors - expected if name.removeprefix("base_model.model.") not in own)
    if other:
        raise ModelError(f"{what} holds {len(other)} tensors that this model has no place for: {weights.few(other)}")
    kind = adapter.config["peft_type"]
    if merge:
        merged = guarded(lambda: wrapped.merge_and_unload(safe_merge=True), f"{what} cannot be merged into the weights")
        found, how = merged, "merged into the weights"
    else:
        found, how = wrapped.get_base_model(), "beside the weights"
    return found.eval().requires_grad_(False), f"{kind} adapter with {len(adapter.tensors)} tensors, {how}"
