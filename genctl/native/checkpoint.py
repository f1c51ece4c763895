"""Of what kind a native checkpoint is: a decoder (`load`) or an encoder-decoder (`seq2seq_load`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from genctl.native import load, seq2seq_load
from genctl.native.families import Found
from genctl.native.load import Shapes, WeightPlan
from genctl.native.names import Names
from genctl.native.seq2seq_families import Seq2SeqNames
from genctl.native.seq2seq_load import Seq2SeqPlan
from genctl.native.seq2seq_spec import Seq2SeqSpec
from genctl.native.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from genctl.native.linear import Products
    from genctl.native.model import NativeModel, SpecialTokens

AnyPlan: TypeAlias = WeightPlan | Seq2SeqPlan


def bare_class(name: str) -> str:
    """The class without a head of an encoder-decoder's class, with which some checkpoints were saved; else the class.

    The head of those families is the embeddings, unless the weight files hold another.
    """
    stem = name.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
    return name if stem == name else f"{stem}Model"


def plan_of(found: Found, shapes: Shapes) -> AnyPlan:
    """What a checkpoint with this spec and these names holds. Raises NotNative where its files hold something else."""
    spec, names = found
    if isinstance(spec, Spec) and isinstance(names, Names):
        return WeightPlan(spec, names, shapes)
    assert isinstance(spec, Seq2SeqSpec)
    assert isinstance(names, Seq2SeqNames)
    return Seq2SeqPlan(spec, names, shapes)


def model_of(
    plan: AnyPlan,
    get: Callable[[str], Tensor],
    config: dict[str, Any],
    special: SpecialTokens,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    products: Products | None = None,
    name: str = "",
) -> NativeModel:
    """The model of a plan, whose tensors `get` gives by their names in the files. `device` is for decoders alone."""
    from genctl.native.model import NativeConfig, NativeModel

    fields = NativeConfig(config, plan.spec)
    if isinstance(plan, WeightPlan):
        return NativeModel(load.build(plan, get, dtype=dtype, device=device, products=products), fields, special, name)
    from genctl.native.seq2seq_model import Seq2SeqModel

    return Seq2SeqModel(seq2seq_load.build(plan, get, dtype=dtype, products=products), fields, special, name)


def read(
    plan: AnyPlan,
    files: tuple[Path, ...],
    config: dict[str, Any],
    special: SpecialTokens,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    look: Callable[[str, Tensor], object] | None = None,
    products: Products | None = None,
    name: str = "",
) -> NativeModel:
    """Map the files and build the model. `dtype` is what to compute in: None for that of the embeddings.

    `device` is where a decoder's tensors go as they are read: None leaves them mapped.
    `look` is given each tensor by its name in the files, and may raise. `products` says how matrices are held.
    """
    from genctl.native import pages
    from genctl.native.files import mapped

    model = model_of(
        plan, mapped(files, look), config, special, dtype=dtype, device=device, products=products, name=name
    )
    pages.trim_rest()
    return model
