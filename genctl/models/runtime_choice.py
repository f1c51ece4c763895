"""Choose the runtime of a checkpoint: native if everything in its config.json is supported, else transformers' classes.

`--runtime auto` uses the native runtime only where tests prove equal results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from genctl.errors import ModelError, UsageError, size
from genctl.events import Loading
from genctl.models import check, prepare
from genctl.models.architectures import facts_of, read_native
from genctl.models.check import Checkpoint
from genctl.models.libraries import OnEvent
from genctl.models.weights import few
from genctl.native.config import NotNative, Unfit
from genctl.native.plan import DTYPES, WeightPlan
from genctl.params import Runtime

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from genctl.native.runtime import NativeModel
    from genctl.native.spec import Spec


def plan(runtime: Runtime, checkpoint: Checkpoint, *, trust_remote_code: bool) -> tuple[WeightPlan | None, str]:
    """The native runtime's plan for this checkpoint; or None, and why transformers' classes run it.

    Raises ModelError or UsageError if `--runtime native` is impossible. torch is not imported.
    """
    if runtime.runtime == "transformers":
        if runtime.quantize in ("int4", "gguf"):
            raise UsageError(
                f"--quantize {runtime.quantize} and --runtime transformers contradict each other: "
                f"{runtime.quantize} is native only"
            )
        return None, "asked for"
    if runtime.quantize == "gguf" and not checkpoint.gguf:
        raise UsageError(f"--quantize gguf: {runtime.model} is no GGUF file", hint="int8 and int4 are for others")
    if runtime.dequantize and not checkpoint.gguf:
        raise UsageError(f"--dequantize: {runtime.model} is no GGUF file, which alone holds weights in blocks")
    try:
        _options(runtime, trust_remote_code)
        native = _plan(checkpoint)
        _check_dtype(native.spec, dtype_of(runtime, checkpoint))
    except NotNative as reason:
        if checkpoint.gguf and isinstance(reason, Unfit):
            raise ModelError(f"{runtime.model}: {reason}") from None
        return None, _fallback(runtime, reason)
    return native, ""


def _fallback(runtime: Runtime, reason: NotNative) -> str:
    """Why transformers' classes run a checkpoint. Raises ModelError if only the native runtime is allowed."""
    if runtime.runtime == "native":
        hint = "" if isinstance(reason, Unfit) else "--runtime auto falls back to transformers"
        raise ModelError(f"--runtime native: {reason}", hint=hint) from None
    if runtime.quantize in ("int4", "gguf"):
        hint = "--quantize int8 works on transformers' classes too"
        raise ModelError(f"--quantize {runtime.quantize} needs the native runtime: {reason}", hint=hint) from None
    return str(reason)


def has_blocks(checkpoint: Checkpoint) -> bool:
    """Whether it is a GGUF file with weights in blocks."""
    return bool(checkpoint.gguf) and any(
        tensor.dtype not in DTYPES for tensor in checkpoint.weights.tensors.values() if len(tensor.shape) > 1
    )


def as_it_lies(
    runtime: Runtime, checkpoint: Checkpoint, native: WeightPlan | None, device: torch.device | None, reason: str
) -> tuple[Runtime, str]:
    """The options with which a GGUF file runs: its matrices as they lie, unless something is in the way.

    And a note where blocks are unpacked without being requested. `native` is the native runtime's plan, or None
    for the `reason`; `device` is None if accelerate chooses. Raises ModelError where --quantize gguf cannot be.
    """
    from genctl.native.blocks import KINDS

    forms = Counter(tensor.dtype for tensor in checkpoint.weights.tensors.values() if len(tensor.shape) > 1)
    if runtime.dequantize or runtime.quantize in ("int8", "int4") or forms.keys() <= {"F32", "BF16"}:
        return runtime, ""
    explicit = runtime.quantize == "gguf"
    obstacles = {
        "--runtime transformers": runtime.runtime == "transformers",
        reason: native is None,
        "--no-pack": not runtime.pack,
        "--dtype float16": runtime.dtype == "float16",
        f"the device is {device}": device is not None and device.type != "cpu",
    }
    obstacle = next((name for name, is_there in obstacles.items() if is_there), "")
    if obstacle and not explicit:
        return runtime, f"{runtime.model} is unpacked: {obstacle}" if has_blocks(checkpoint) else ""
    runtime = replace(runtime, quantize="gguf")
    unknown = {form: count for form, count in forms.items() if form not in DTYPES and form not in KINDS}
    if not unknown:
        return runtime, ""
    held = f"hold {', '.join(sorted(unknown))}, which nothing multiplies"
    number = f"{sum(unknown.values())} of {forms.total()} matrices"
    if explicit:
        raise ModelError(f"--quantize gguf: {number} of {runtime.model} {held}", hint="without it they are unpacked")
    return runtime, f"{number} of {runtime.model} are unpacked: they {held}"


def spec_of_run(
    runtime: Runtime, checkpoint: Checkpoint, device: torch.device, *, trust_remote_code: bool
) -> Spec | None:
    """The spec of the native runtime; None if transformers' classes run the checkpoint. Raises as a run does.

    Without weight files only config.json counts.
    """
    if checkpoint.weights.files or runtime.runtime == "transformers":
        native, _ = plan(runtime, checkpoint, trust_remote_code=trust_remote_code)
        spec = None if native is None else native.spec
    else:
        try:
            _options(runtime, trust_remote_code)
            spec = read_native(checkpoint.config)[0]
            _check_dtype(spec, dtype_of(runtime, checkpoint))
        except NotNative as reason:
            _fallback(runtime, reason)
            return None
    return None if spec is None or device_reason(runtime, device) else spec


def _options(runtime: Runtime, trust_remote_code: bool) -> None:
    """Raises NotNative, or UsageError with --runtime native, for options that only transformers' classes support."""
    flags = {
        "--trust-remote-code": trust_remote_code,
        f"--device-map {runtime.device_map}": runtime.device_map is not None,
        "--compile": runtime.compile,
        "--tensor-parallel": runtime.tensor_parallel,
        "--adapter": runtime.adapter is not None,
    }
    for flag, is_set in flags.items():
        if is_set and runtime.runtime == "native":
            raise UsageError(f"--runtime native and {flag} contradict each other: transformers' classes do that")
        if is_set:
            raise NotNative(flag)


def _check_dtype(spec: Spec, dtype: str) -> None:
    """Raises NotNative for an unsupported dtype."""
    if dtype not in DTYPES.values():
        raise NotNative(f"config.json: dtype = {dtype!r:.40} is not known to the native runtime")
    if spec.encoder is not None and dtype == "float16":
        raise NotNative("transformers cuts off an encoder-decoder's float16 sums where they overflow")


def _plan(checkpoint: Checkpoint) -> WeightPlan:
    if checkpoint.weights.pickled:
        raise NotNative("its weights are pickled")
    config = checkpoint.config
    family = facts_of(checkpoint.model_type).native
    if family is not None:
        expected = family.model_class
        classes = {expected.lower(), bare_class(expected).lower()}  # in lower case: MosaicML writes MPTForCausalLM
        names = config.get("architectures") or [expected]
        if not isinstance(names, list) or not classes & {str(name).lower() for name in names}:
            raise NotNative(f"config.json: architectures = {names!r:.80}")
    tensors = checkpoint.weights.tensors
    shapes, held = {name: tensor.shape for name, tensor in tensors.items()}, None
    if checkpoint.gguf:
        from genctl.models import gguf
        from genctl.native.gguf_names import in_gguf

        found, held = in_gguf(read_native(config), tensors, gguf.rope_factors(checkpoint))
        shapes = {name: tensor.shape for name, tensor in held.places.items()}
    else:
        found = read_native(config)
    native = WeightPlan(*found, shapes, held)
    if native.unused:  # transformers' runtime decides whether that is an error
        raise NotNative(f"the weight files hold tensors that it does not read: {few(native.unused)}")
    for name in sorted(native.reads if held is None else ()):
        if tensors[name].dtype not in DTYPES:
            raise NotNative(f"tensor {name:.80} holds {tensors[name].dtype} numbers")
    return native


def bare_class(name: str) -> str:
    """The class without a head of an encoder-decoder's class, with which some checkpoints were saved; else the class.

    The head of those families is the embeddings, unless the weight files hold another.
    """
    stem = name.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
    return name if stem == name else f"{stem}Model"


def dtype_of(runtime: Runtime, checkpoint: Checkpoint) -> str:
    """The dtype to compute in: --dtype, else the stored one, else float32."""
    return runtime.dtype if runtime.dtype != "auto" else stored_dtype(checkpoint) or "float32"


def is_stored_as(checkpoint: Checkpoint, dtype: str) -> bool:
    """Whether all weights have this dtype in their files."""
    return {DTYPES.get(tensor.dtype) for tensor in checkpoint.weights.tensors.values()} == {dtype}


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of config.json, else that of the weight files (see `weights.WeightFiles`); "" if neither says."""
    dtype = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else checkpoint.weights.dtype


def device_reason(runtime: Runtime, device: torch.device) -> str:
    """Why the native runtime does not run on a device; "" on the CPU and on CUDA devices.

    Raises UsageError if --runtime native is impossible there.
    """
    if device.type in ("cpu", "cuda"):
        return ""
    if runtime.runtime == "native":
        hint = "add --device cpu"
        raise UsageError(f"--runtime native runs on the CPU and on CUDA devices, not on {device}", hint=hint)
    return f"the device is {device}"


def load(
    plan_: WeightPlan,
    runtime: Runtime,
    checkpoint: Checkpoint,
    device: torch.device,
    check_tensor: Callable[[str, Tensor], None],
    on_event: OnEvent | None,
) -> tuple[NativeModel, list[str]]:
    """Map the weights, or move them to a GPU while reading; the model, and notes for --verbose.

    `check_tensor` receives each tensor and may raise. On a GPU `--dtype auto` is that of `prepare.dtype_on_gpu`.
    """
    import torch

    from genctl.native.linear import Products
    from genctl.native.load import read
    from genctl.native.runtime import SpecialTokens

    done = 0

    def receive(name: str, tensor: Tensor) -> None:
        nonlocal done
        check_tensor(name, tensor)
        done += 1
        if on_event is not None:
            on_event(Loading(runtime.model, done, len(plan_.reads), "tensors"))

    chosen, notes = dtype_of(runtime, checkpoint), list[str]()
    if device.type == "cuda" and runtime.dtype == "auto":
        on_gpu, more = prepare.dtype_on_gpu(chosen, bfloat16=torch.cuda.is_bf16_supported())
        # see `_check_dtype` and `prepare.check_options`
        if on_gpu != "float16" or (plan_.spec.encoder is None and runtime.quantize is None):
            chosen, notes = on_gpu, more
    dtype = getattr(torch, chosen)
    kernels = False
    if device.type == "cuda" and runtime.pack:
        from genctl.native.kernel_decoder import unusable

        kernels = not unusable(device, dtype)
    products = Products(runtime.quantize, pack=runtime.pack, kernels=kernels)
    settings = checkpoint.generation.values
    special = SpecialTokens(check.settings_of_config(checkpoint.config) if checkpoint.gguf else settings)
    family = facts_of(plan_.spec.family).native
    assert family is not None
    model = read(
        plan_,
        checkpoint.weights.files,
        checkpoint.config,
        special,
        dtype=dtype,
        device=None if device.type == "cpu" else device,
        check_tensor=receive,
        products=products,
        name=family.model_class,
    )
    held = Counter(product.form for product in model.products())
    if runtime.quantize is not None:
        forms = ", ".join(f"{count} {form}" for form, count in sorted(held.items()))
        sizes = f"all weights {size(model.bytes())}, {size(checkpoint.weights.bytes)} as read"
        notes.append(f"{held.total()} linear layers with weights in {runtime.quantize} ({forms}); {sizes}")
        if device.type == "cuda" and not kernels:
            notes.append(f"torch multiplies with {runtime.quantize} weights: {unusable(device, dtype)}")
    if plan_.unused:
        notes.append(f"{len(plan_.unused)} tensors in the weight files are not used: {few(plan_.unused)}")
    return model, notes
