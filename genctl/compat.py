"""Undocumented names of torch and transformers: only this file uses them.

Nothing is looked up when this file is imported. tests/test_compat.py has a test for each, which fails with the name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from genctl.errors import ModelError

version = cache(metadata.version)  # reading a package's metadata takes ten milliseconds
TESTED_TORCH = ("2.13",)  # all tests run with it (scripts/constraints.txt)
# all tests run with the last; tests of goldens and architectures also with the first (scripts/constraints-oldest.txt)
TESTED_TRANSFORMERS = ("5.17", "5.24")
CORRECTED = "5.23"  # the first version that needs no corrections of older ones


def untested_versions() -> list[str]:
    """A line for --verbose for each library in an untested version: it may behave differently from the tests."""
    libraries = {"torch": (str(torch.__version__), TESTED_TORCH), "transformers": (_installed(), TESTED_TRANSFORMERS)}
    return [
        f"{name} {found.partition('+')[0]}: genctl is tested with {name} {' and '.join(tested)}"
        for name, (found, tested) in libraries.items()
        if _minor(found) not in map(_minor, tested)
    ]


def transformers_needed(what: str) -> ModelError:
    """The error for `what`, which the newest tested transformers supports and the installed one does not."""
    needed = TESTED_TRANSFORMERS[-1]
    return ModelError(
        f"{what} needs transformers {needed}; {_installed()} is installed",
        hint=f'pip install "transformers>={needed}"',
    )


def older_transformers() -> bool:
    """Whether the installed transformers needs the corrections in this file."""
    return _minor(_installed()) < _minor(CORRECTED)


def _installed() -> str:
    return version("transformers")


def _minor(text: str) -> tuple[int, ...]:
    """Major and minor number of a version: "5.24.0.dev0" is (5, 24)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


# -- torch -------------------------------------------------------------------------------------------------------------


def attention_with_sums(
    query: Tensor, keys: Tensor, values: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention on the CPU and the log-sum-exp of its scores, with which partial results can be merged.

    query [R, H, Q, D], keys and values [R, H, S, D] -> [R, H, Q, D] and float32 [R, H, Q].
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, sums = flash(query, keys, values, scale=scale)
    return output, sums


def raise_recompile_limit(least: int) -> None:
    """Allow a process at least `least` compilations of a function.

    At the limit torch.compile silently stops compiling, and every later step is slow.
    """
    import torch._dynamo

    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, least)


def mark_dynamic(tensor: Tensor, dimensions: int | Sequence[int]) -> None:
    """Mark dimensions that change between steps. Without the mark torch finds out by compiling once more."""
    import torch._dynamo

    mark: Any = torch._dynamo.maybe_mark_dynamic
    mark(tensor, dimensions if isinstance(dimensions, int) else list(dimensions))


def is_marked_dynamic(tensor: Tensor) -> bool:
    """Whether `mark_dynamic` marked this tensor."""
    return hasattr(tensor, "_dynamo_weak_dynamic_indices")


def mark_static_address(tensor: Tensor) -> None:
    """Mark a tensor that stays at its address. Without the mark a CUDA graph copies it in every step."""
    import torch._dynamo

    mark: Any = torch._dynamo.mark_static_address
    mark(tensor)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs code besides its class's forward: hooks of torch, or of accelerate."""
    hooked = "forward" in vars(module) or hasattr(module, "_hf_hook")
    return hooked or any(vars(module)[name] for name in _HOOKS)


def forward_hooks(model: nn.Module) -> int:
    """The number of hooks that see a model's passes, except those of torch, transformers and `genctl.models`.

    transformers adds some in the first pass that returns hidden states.
    """
    hooks = [hook for module in model.modules() for name in _HOOKS for hook in vars(module)[name].values()]
    return sum(not _origin(hook).startswith(("transformers.", "torch.", "genctl.models.")) for hook in hooks)


def _origin(hook: Any) -> str:
    """The module that a hook comes from."""
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""


# -- transformers ------------------------------------------------------------------------------------------------------


def takes_dynamic_cache(model: Any) -> bool:
    """Whether transformers gives models of this class a cache of keys and values. True for models of other code."""
    method = getattr(model, "_supports_default_dynamic_cache", None)
    return True if method is None else bool(method())


def is_stateful(model: Any) -> bool:
    """Whether layers keep a state instead of every token."""
    return bool(getattr(model, "_is_stateful", False))


def attention_of(config: Any) -> str:
    """The name of a model's attention implementation ("sdpa", "eager", …); "" if unknown."""
    return getattr(config, "_attn_implementation", None) or ""


def from_config(kind: Any, config: Any, **settings: Any) -> Any:
    """A model of a class that is not an auto class, without its weights."""
    return kind._from_config(config, **settings)


def kept_dtypes(model: Any, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Weights that `from_pretrained` keeps in another type than `dtype`: patterns of names -> type."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    return plan


def synthid_keys(processor: Any, contexts: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Watermark keys of tokens after contexts: int64 [R, V], [R, C] -> keys [R, V, D], hashes of contexts [R]."""
    keys, hashes = processor._compute_keys(contexts, ids)
    return keys, hashes


# -- transformers: differences between versions, from 5.17 on ----------------------------------------------------------

_OLD_CACHE_NAMES = ("past_key_values", "cache_params")  # 5.24 calls both `cache`


def cache_argument(method: Callable[..., Any], inherited: Callable[..., Any]) -> str:
    """The name of the cache argument of a model's method: from its signature, else from the `inherited` method's.

    `cache` counts only if the inherited method has it: XLM's `cache` used to be something else.
    """
    general = "cache" if "cache" in inspect.signature(inherited).parameters else _OLD_CACHE_NAMES[0]
    accepted = inspect.signature(method).parameters
    return next((name for name in (general, *_OLD_CACHE_NAMES) if name in accepted), general)


def states_argument(method: Callable[..., Any], returned: str) -> str:
    """The argument by which an input preparation takes the states that a pass returned in the field `returned`."""
    return _OLD_CACHE_NAMES[0] if _OLD_CACHE_NAMES[0] in inspect.signature(method).parameters else returned


def returned_cache(output: Any) -> Any:
    """The cache that a pass returned; None if there is none. Not read as an attribute: the old name would warn."""
    fields = vars(output)
    return next((fields[name] for name in ("cache", *_OLD_CACHE_NAMES) if fields.get(name) is not None), None)


def ends_by_draw() -> bool:
    """Whether a sampled beam may end if among the first drawn, rather than the best: `generate()` before 5.24."""
    return _minor(_installed()) < (5, 24)


def layers_that_keep_nothing(library: Any) -> tuple[type, ...]:
    """The classes of `transformers.cache_utils` without keys and values. Older versions have no such layers."""
    kind = getattr(library, "DummyLayer", None)
    return () if kind is None else (kind,)


def attention_for(config: Any) -> dict[str, str]:
    """Arguments of `from_pretrained` for attention that follows the config.

    Older versions default to sdpa even where it omits the soft caps of attention (Gemma 2), or the order of the
    decoder's tokens (UMT5).
    """
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    differs = config.model_type == "umt5" or any(getattr(part, "attn_logit_softcapping", None) for part in parts)
    return {"attn_implementation": "eager"} if differs and older_transformers() else {}


# Fields that older versions ignore, with the values that they use: architecture -> field -> value
_UNREAD_FIELDS: Mapping[str, Mapping[str, float]] = {"gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}}


def correct_config(kind: str, config: Any) -> None:
    """Apply the newest version's corrections for older ones. Raises ModelError for a field that these ignore."""
    for name, value in _UNREAD_FIELDS.get(kind, {}).items():
        if not hasattr(type(config), name) and getattr(config, name, value) != value:
            raise transformers_needed(f"{name} = {getattr(config, name)!r:.40}")
    if kind == "gemma" and config.hidden_act == "gelu":  # in the first checkpoints, which mean the tanh approximation
        config.hidden_act = "gelu_pytorch_tanh"
    if kind == "recurrent_gemma" and getattr(config, "layer_types", None) is None:  # needed to make a cache
        names = {"recurrent": "linear_attention", "attention": "sliding_attention"}
        config.layer_types = [names[block] for block in config.layers_block_type]
