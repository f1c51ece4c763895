"""Choose the runtime of a checkpoint: native if everything in its config.json is supported, else transformers' classes.

`--runtime auto` uses the native runtime only where tests prove equal results. Options that contradict each other are
refused first, before torch is imported.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.errors import ModelError, UsageError, reason_of, size
from genctl.events import Loading
from genctl.models import check
from genctl.models.architectures import facts_of, read_native
from genctl.models.check import Checkpoint
from genctl.models.libraries import OnEvent
from genctl.models.weights import few, shown
from genctl.native.config import NotNative, Unfit
from genctl.native.plan import DTYPES, WeightPlan
from genctl.params import Runtime
from genctl.process import use_own_compile_cache

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from genctl.native.runtime import NativeModel
    from genctl.native.spec import Spec

# -- options of loading, before torch is imported ----------------------------------------------------------------------

_MEMORY = re.compile(r"(cpu|disk|mps|\d+)\s*=\s*(\d+(?:\.\d+)?\s*[KMGT]i?B)", re.IGNORECASE)


def check_options(runtime: Runtime) -> None:
    """Raises UsageError for options that contradict each other."""
    quantize, device_map = f"--quantize {runtime.quantize}", f"--device-map {runtime.device_map}"
    is_set = {
        "--compile": runtime.compile,
        "--tensor-parallel": runtime.tensor_parallel,
        "--adapter": runtime.adapter is not None,
        "--prompt-cache": runtime.prompt_cache is not None,
        "--dequantize": runtime.dequantize,
        "--no-pack": not runtime.pack,
        "--dtype float16": runtime.dtype == "float16",
        quantize: runtime.quantize is not None,
        device_map: runtime.device_map is not None,
    }
    one_device = "the model has to be on one device"
    conflicts = [
        ("--compile", quantize, "8-bit layers are opaque to a compiler"),
        ("--compile", device_map, one_device),
        *(
            ("--tensor-parallel", flag, "each rank holds a part of the model")
            for flag in ("--compile", quantize, device_map, "--adapter", "--prompt-cache")
        ),
        ("--adapter", device_map, one_device),
        ("--dequantize", "--quantize gguf", "one unpacks what the other does not"),
        (quantize, "--no-pack", f"{runtime.quantize} weights are packed ones"),
        (quantize, device_map, one_device),
        (quantize, "--dtype float16", "it computes in float32 or bfloat16"),
    ]
    for flag, other, why in conflicts:
        if is_set[flag] and is_set.get(other):
            raise UsageError(f"{flag} and {other} contradict each other: {why}")
    if runtime.compile:
        use_own_compile_cache()


def placement(runtime: Runtime) -> dict[str, Any]:
    """Arguments for accelerate's big-model loading; {} without --device-map. Raises UsageError."""
    if runtime.device_map is None:
        for name, value in (("--max-memory", runtime.max_memory), ("--offload-folder", runtime.offload_folder)):
            if value is not None:
                raise UsageError(f"{name} needs --device-map")
        return {}
    if runtime.device != "auto":
        raise UsageError(f"--device-map {runtime.device_map} and --device {runtime.device} both say where weights go")
    kinds = ("auto", "balanced", "balanced_low_0", "sequential")
    if runtime.device_map not in kinds:
        raise UsageError(f"--device-map {runtime.device_map!r} is none of {', '.join(kinds)}")
    arguments: dict[str, Any] = {"device_map": runtime.device_map}
    if runtime.max_memory is not None:
        arguments["max_memory"] = _max_memory(runtime.max_memory)
    if runtime.offload_folder is not None:
        if not runtime.offload_folder:
            raise UsageError("--offload-folder is empty, and an empty text names no folder")
        try:  # try to make the folder and to write a file there
            folder = Path(runtime.offload_folder).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 16))
                file.flush()
            arguments["offload_folder"] = str(folder)
        except (OSError, ValueError, RuntimeError) as error:
            problem = f"--offload-folder {shown(runtime.offload_folder)} cannot be written to"
            raise UsageError(f"{problem}: {reason_of(error)}") from error
    return arguments


def _max_memory(text: str) -> dict[int | str, str]:
    """Parse `0=20GiB,cpu=64GiB` into accelerate's form. Raises UsageError."""
    limits: dict[int | str, str] = {}
    for item in text.split(","):
        match = _MEMORY.fullmatch(item.strip())
        if match is None:
            raise UsageError(f"--max-memory {text!r}: {item.strip()!r} is not like 0=20GiB or cpu=64GiB")
        where = match[1].lower()
        key = int(where) if where.isdigit() else where
        if key in limits:
            raise UsageError(f"--max-memory {text!r} names {where} twice")
        limits[key] = match[2].replace(" ", "")
    return limits


def check_device(runtime: Runtime, device: torch.device | None, *, native: bool) -> None:
    """Raises UsageError for a device that does not support the options. `native`: whether the native runtime runs."""
    if device is None:
        return
    chosen = "" if runtime.device == "auto" else f" (--device {runtime.device})"
    if runtime.compile and device.type not in ("cpu", "cuda"):
        raise UsageError(f"--compile runs on the CPU and on CUDA devices, not on {device.type}{chosen}")
    if runtime.compile and device.type == "cpu" and cpp_compiler() is None:
        raise UsageError(
            "--compile on the CPU needs a C++ compiler, and none is found",
            hint="install g++ or clang++, or name one in the environment variable CXX",
        )
    on_cuda = runtime.quantize in ("int8", "int4") and device.type == "cuda"
    if runtime.quantize is not None and device.type != "cpu" and not (on_cuda and native):
        what = f"--quantize {runtime.quantize}" + (" on transformers' classes" if on_cuda else "")
        raise UsageError(f"{what} runs on the CPU, not on {device.type}{chosen}", hint="add --device cpu")


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would call on the CPU; None if it is missing."""
    usual = "clang++" if sys.platform == "darwin" else "cl" if sys.platform == "win32" else "g++"
    return shutil.which(os.environ.get("CXX") or usual)


# -- which runtime -----------------------------------------------------------------------------------------------------


def plan(runtime: Runtime, checkpoint: Checkpoint, *, trust_remote_code: bool) -> tuple[WeightPlan | None, str]:
    """The native runtime's plan for this checkpoint; or None, and why transformers' classes run it.

    Raises ModelError or UsageError if `--runtime native` is impossible. torch is not imported.
    """
    _, native, reason = _choose(runtime, checkpoint, trust_remote_code)
    return native, reason


def spec_of_run(
    runtime: Runtime, checkpoint: Checkpoint, device: torch.device, *, trust_remote_code: bool
) -> Spec | None:
    """The spec of the native runtime; None if transformers' classes run the checkpoint. Raises as a run does.

    Without weight files only config.json counts.
    """
    spec, _, _ = _choose(runtime, checkpoint, trust_remote_code)
    return None if spec is None or device_reason(runtime, device) else spec


def _choose(
    runtime: Runtime, checkpoint: Checkpoint, trust_remote_code: bool
) -> tuple[Spec | None, WeightPlan | None, str]:
    if runtime.runtime == "transformers":
        if runtime.quantize in ("int4", "gguf"):
            problem = f"--quantize {runtime.quantize} and --runtime transformers contradict each other"
            raise UsageError(f"{problem}: {runtime.quantize} is native only")
        return None, None, "asked for"
    if runtime.quantize == "gguf" and not checkpoint.gguf:
        raise UsageError(f"--quantize gguf: {runtime.model} is no GGUF file", hint="int8 and int4 are for others")
    if runtime.dequantize and not checkpoint.gguf:
        raise UsageError(f"--dequantize: {runtime.model} is no GGUF file, which alone holds weights in blocks")
    try:
        _check_native_options(runtime, trust_remote_code)
        native = _weight_plan(checkpoint) if checkpoint.weights.files else None
        spec = read_native(checkpoint.config)[0] if native is None else native.spec
        _check_dtype(spec, dtype_of(runtime, checkpoint))
    except NotNative as reason:
        if checkpoint.gguf and isinstance(reason, Unfit):
            raise ModelError(f"{runtime.model}: {reason}") from None
        if runtime.runtime == "native":
            hint = "" if isinstance(reason, Unfit) else "--runtime auto falls back to transformers"
            raise ModelError(f"--runtime native: {reason}", hint=hint) from None
        if runtime.quantize in ("int4", "gguf"):
            hint = "--quantize int8 works on transformers' classes too"
            raise ModelError(f"--quantize {runtime.quantize} needs the native runtime: {reason}", hint=hint) from None
        return None, None, str(reason)
    return spec, native, ""


def _check_native_options(runtime: Runtime, trust_remote_code: bool) -> None:
    """Raises NotNative, or UsageError with --runtime native, for options that only transformers' classes support."""
    flags = {
        "--trust-remote-code": trust_remote_code,
        f"--device-map {runtime.device_map}": runtime.device_map is not None,
        "--compile": runtime.compile,
        "--tensor-parallel": runtime.tensor_parallel,
        "--adapter": runtime.adapter is not None,
    }
    for flag in (flag for flag, is_set in flags.items() if is_set):
        if runtime.runtime == "native":
            raise UsageError(f"--runtime native and {flag} contradict each other: transformers' classes do that")
        raise NotNative(flag)


def _check_dtype(spec: Spec, dtype: str) -> None:
    """Raises NotNative for an unsupported dtype."""
    if dtype not in DTYPES.values():
        raise NotNative(f"config.json: dtype = {dtype!r:.40} is not known to the native runtime")
    if spec.encoder is not None and dtype == "float16":
        raise NotNative("transformers cuts off an encoder-decoder's float16 sums where they overflow")


def _weight_plan(checkpoint: Checkpoint) -> WeightPlan:
    """The native runtime's plan for the weights. Raises NotNative."""
    if checkpoint.weights.pickled:
        raise NotNative("its weights are pickled")
    config = checkpoint.config
    family = facts_of(checkpoint.model_type).native
    if family is not None:
        # An encoder-decoder may be saved as the class without a head: the head is the embeddings.
        expected = family.model_class
        stem = expected.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
        classes = {expected.lower(), (expected if stem == expected else f"{stem}Model").lower()}
        names = config.get("architectures") or [expected]
        # in lower case: MosaicML writes MPTForCausalLM
        if not isinstance(names, list) or not classes & {str(name).lower() for name in names}:
            raise NotNative(f"config.json: architectures = {names!r:.80}")
    tensors = checkpoint.weights.tensors
    shapes, held = {name: tensor.shape for name, tensor in tensors.items()}, None
    if checkpoint.gguf:
        from genctl.models import gguf
        from genctl.native.plan import in_gguf

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


def as_it_lies(
    runtime: Runtime, checkpoint: Checkpoint, native: WeightPlan | None, device: torch.device | None, reason: str
) -> tuple[Runtime, str]:
    """The options for running a GGUF file: its matrices as stored, unless something prevents that.

    Also a note if blocks are unpacked without a request. `native` is the native runtime's plan, or None
    for the `reason`; `device` is None if accelerate chooses. Raises ModelError if --quantize gguf is impossible.
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
        return runtime, f"{runtime.model} is unpacked: {obstacle}" if forms.keys() - DTYPES.keys() else ""
    runtime = replace(runtime, quantize="gguf")
    unknown = {form: number for form, number in forms.items() if form not in DTYPES and form not in KINDS}
    if not unknown:
        return runtime, ""
    held = f"hold {', '.join(sorted(unknown))}, which nothing multiplies"
    several = f"{sum(unknown.values())} of {forms.total()} matrices"
    if explicit:
        raise ModelError(f"--quantize gguf: {several} of {runtime.model} {held}", hint="without it they are unpacked")
    return runtime, f"{several} of {runtime.model} are unpacked: they {held}"


def dtype_of(runtime: Runtime, checkpoint: Checkpoint) -> str:
    """The dtype to compute in: --dtype, else the stored one, else float32."""
    return runtime.dtype if runtime.dtype != "auto" else stored_dtype(checkpoint) or "float32"


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of config.json, else that of the weight files (see `weights.WeightFiles`); "" if neither says."""
    dtype = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else checkpoint.weights.dtype


def dtype_on_gpu(stored: str, *, bfloat16: bool) -> tuple[str, list[str]]:
    """The dtype of `--dtype auto` on a GPU for a checkpoint stored as `stored`, and a note if they differ.

    float32 is much slower on a GPU, so it becomes bfloat16, or float16 if the GPU has no `bfloat16`.
    """
    if stored != "float32":
        return stored, []
    chosen = "bfloat16" if bfloat16 else "float16"
    return chosen, [f"{stored} weights are read as {chosen} on this GPU; --dtype {stored} keeps them"]


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


# -- load a native model -----------------------------------------------------------------------------------------------


def load(
    plan_: WeightPlan,
    runtime: Runtime,
    checkpoint: Checkpoint,
    device: torch.device,
    check_tensor: Callable[[str, Tensor], None],
    on_event: OnEvent | None,
) -> tuple[NativeModel, list[str]]:
    """Map the weights, or move them to a GPU while reading. Returns the model, and notes for --verbose.

    `check_tensor` receives each tensor and may raise. On a GPU `--dtype auto` is that of `dtype_on_gpu`.
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
        on_gpu, more = dtype_on_gpu(chosen, bfloat16=torch.cuda.is_bf16_supported())
        # see `_check_dtype` and `check_options`
        if on_gpu != "float16" or (plan_.spec.encoder is None and runtime.quantize is None):
            chosen, notes = on_gpu, more
    dtype = getattr(torch, chosen)
    why_slow = ""  # why a GPU has no kernels for rounded weights
    kernels = device.type == "cuda" and runtime.pack
    if kernels:
        from genctl.native.kernel_decoder import unusable

        why_slow = unusable(device, dtype)
        kernels = not why_slow
    settings = check.settings_of_config(checkpoint.config) if checkpoint.gguf else checkpoint.generation.values
    family = facts_of(plan_.spec.family).native
    assert family is not None
    model = read(
        plan_,
        checkpoint.weights.files,
        checkpoint.config,
        SpecialTokens(settings),
        dtype=dtype,
        device=None if device.type == "cpu" else device,
        check_tensor=receive,
        products=Products(runtime.quantize, pack=runtime.pack, kernels=kernels),
        name=family.model_class,
    )
    if runtime.quantize is not None:
        held = Counter(product.form for product in model.products())
        forms = ", ".join(f"{number} {form}" for form, number in sorted(held.items()))
        sizes = f"all weights {size(model.bytes())}, {size(checkpoint.weights.bytes)} as read"
        notes.append(f"{held.total()} linear layers with weights in {runtime.quantize} ({forms}); {sizes}")
        if why_slow:
            notes.append(f"torch multiplies with {runtime.quantize} weights: {why_slow}")
    return model, notes
