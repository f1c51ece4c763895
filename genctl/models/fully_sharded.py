"""FSDP2: each rank holds a part of every parameter and decodes its own prompts; parameters are gathered by layer.

Zhao et al., PyTorch FSDP, 2023 (arXiv:2304.11277). A forward pass gathers the parameters from all ranks, so all ranks
must make each pass together. A rank without rows makes empty passes until all ranks are done.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from genctl.errors import ModelError
from genctl.models import rank_group as group


def shard(model: Any) -> None:
    """Keep only this rank's part of each parameter. Raises ModelError for a model that is no plain decoder."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if model.config.is_encoder_decoder:
        raise ModelError("--fsdp: an encoder-decoder's parts are called apart from it, so ranks could not keep step")
    group.start()
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layers in (part for part in model.modules() if isinstance(part, nn.ModuleList)):
        for layer in layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Pace:
    """Keeps the passes of all ranks together. Before each pass ranks sum whether any needs it, and the stop signals."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.signal = 0  # the stop signal of this rank: 1 to stop
        self.agreed = 0  # the sum of all ranks' signals at the last pass
        self._empty = False
        self._hook = model.register_forward_pre_hook(self._before, prepend=True)

    def idle(self) -> None:
        """Make empty passes until no rank needs one."""
        while self._agree(needed=False):
            self._empty = True
            try:
                device = next(self.model.parameters()).device
                with torch.no_grad():
                    self.model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device), use_cache=False)
            finally:
                self._empty = False

    def _before(self, module: Any, inputs: Any) -> None:
        if not self._empty:
            self._agree(needed=True)

    def _agree(self, *, needed: bool) -> bool:
        """Whether any rank needs a pass. All ranks call this together. Raises ModelError if one has left."""
        sums = torch.tensor([float(needed), float(self.signal)])
        try:
            dist.all_reduce(sums)
        except RuntimeError as error:
            raise group.lost(error) from error
        self.agreed = int(sums[1])
        return bool(sums[0] > 0)
