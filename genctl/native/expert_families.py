"""Families with experts: config.json -> `Spec` and names. Defaults are those of transformers' configuration classes."""

from __future__ import annotations

from typing import Any

from genctl.native.config import Config, NotNative
from genctl.native.llama_families import llama_names, plain, sizes_of
from genctl.native.names import Found
from genctl.native.spec import Experts


def mixtral(c: Config) -> Found:
    """Mixtral 8x7B (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts."""
    sizes = sizes_of(c)
    c.size("num_key_value_heads")
    sizes["windows"] = (c.window(),) * sizes["layers"]
    count = c.size("num_local_experts", 8)
    experts = _experts(c, count, sizes["inner"], chosen=2, layers=range(sizes["layers"]))
    rope, eps = c.rope(sizes["head_dim"], base=1e6), c.number("rms_norm_eps", 1e-5)
    block = "block_sparse_moe"
    parts = {"router": f"{block}.gate", "expert_gate": f"{block}.experts.{{}}.w1"}
    parts |= {"expert_up": f"{block}.experts.{{}}.w3", "expert_down": f"{block}.experts.{{}}.w2"}
    names = llama_names(gate=None, up=None, down=None, **parts)
    return plain(c, "mixtral", sizes, eps=eps, rope=rope, experts=experts), names


def _experts(c: Config, count: int, inner: int, *, chosen: int, layers: range, **more: Any) -> Experts:
    """What these families name alike. `chosen` is how many where config.json says nothing."""
    for name in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):  # of training
        c.take(name, None)
    each = c.size("num_experts_per_tok", chosen)
    if each > count:
        raise NotNative(f"config.json: {each} of {count} experts for each token")
    return Experts(count, each, inner, frozenset(layers), **more)
