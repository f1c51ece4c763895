"""The names of a family's tensors in a checkpoint's files; and `Found`, the result of a family's function."""

from __future__ import annotations

import re
from dataclasses import dataclass

from genctl.native.spec import Spec

# The last part of a tensor's name: computed from the config by every version of an architecture.
COMPUTED = re.compile(
    r"inv_freq|original_inv_freq|position_ids|token_type_ids|masked_bias|causal_mask|attn_mask|attention_mask"
    r"|freqs_cis|(cos|sin)(_cached)?|_float_tensor|num_batches_tracked|version"
)


@dataclass(frozen=True)
class Names:
    """The tensors of a family, without `.weight` and `.bias`."""

    prefix: str  # of everything but the head; a checkpoint of the bare model lacks its first part
    embed: str
    layer: str  # with {} for the number
    parts: dict[str, str]  # our name for a part of a layer -> theirs (see `plan.matrix_shape`)
    final: str
    heads: tuple[str, ...] = ("lm_head",)  # possible names of the head
    logits_bias: tuple[str, ...] = ()  # possible names of a bias of the logits
    relative: str = ""  # the table of distances, with {} for the layer
    shared: str = ""  # the embeddings of both stacks of an encoder-decoder
    encoder: Names | None = None
    positions: str = ""
    embed_norm: str = ""
    project_in: str = ""
    project_out: str = ""
    transposed: bool = False  # matrices of the layers are [in, out]
    ignored: tuple[str, ...] = ()  # endings of tensors that files may hold and nothing reads


Found = tuple[Spec, Names]
