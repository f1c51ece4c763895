"""Tensor parallelism by transformers' plans: each rank holds a part of every large matrix, and all compute each pass.

Shoeybi et al., Megatron-LM, 2019. Sums over ranks are equal on all of them; still, every rank receives rank 0's
logits after each pass, so that equal seeds give equal choices on any devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from genctl.errors import ModelError
from genctl.models import rank_group as group

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig


def placement(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments of `from_pretrained` to distribute a model over all ranks. Raises ModelError if it cannot be."""
    group.start()
    size = dist.get_world_size()
    check(config, size)
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}


def check(config: Any, size: int) -> None:
    """Raises ModelError for an architecture without a plan, and for heads that cannot be shared out evenly."""
    text = config.get_text_config(decoder=True)
    if not (getattr(config, "base_model_tp_plan", None) or getattr(text, "base_model_tp_plan", None)):
        raise ModelError(f"--tensor-parallel: transformers has no plan for {config.model_type}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % size:
            raise ModelError(f"--tensor-parallel: {name} = {heads} cannot be shared out evenly over {size} ranks")


def own_parts(model: Any) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each parameter, by name."""
    for name, weight in model.named_parameters():
        yield name, weight.to_local() if hasattr(weight, "to_local") else weight


def agree(model: Any) -> None:
    """After each pass every rank has rank 0's logits f32 [N, T, V], and its hidden states where they are returned."""

    def same(module: Any, inputs: Any, output: Any) -> Any:
        output.logits = group.share(output.logits)
        for name in ("hidden_states", "decoder_hidden_states"):
            states = getattr(output, name, None)
            if states is not None:
                setattr(output, name, tuple(group.share(state) for state in states))
        return output

    model.register_forward_hook(same)
