"""The operations between matrix products (norms, activations, attention), by the compiled library. Callers check
`compiled` first.

A row has the same bits in any batch, with any number of threads, and in float32 on every instruction set.

N rows, F tokens fed to each, H heads of queries, K heads of keys and values, T columns, D features of a head.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from genctl.kernels import build

# -- the compiled library, in the variant that this CPU runs (`build.choice`), and its functions -----------------------


TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as lanes.h numbers them
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Layout(ctypes.Structure):
    """`Layout` of products.h."""

    _fields_: ClassVar[Any] = [(name, _INT) for name in ("numbers", "bytes", "bits", "scales", "low", "high", "halves")]


class Library:
    """One variant of the library, and the functions that it exports."""

    def __init__(self, path: Path) -> None:
        self.variant, self.path = path.stem, path
        loaded = ctypes.CDLL(str(path))
        loaded.built_from.restype = ctypes.c_char_p
        self.built_from = build.read_mark(loaded.built_from().decode())[0]
        self.products = _typed(loaded.products, _POINTER, _INT, _POINTER, _POINTER, _LONG, _INT, _INT)
        self.attention = _typed(loaded.attention, _POINTER, _INT)
        self.rms_norm = _typed(loaded.rms_norm, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG, _INT, _INT, _INT)
        norm = _POINTER, _POINTER, _POINTER, _FLOAT, _POINTER
        self.layer_norm = _typed(loaded.layer_norm, *norm, _LONG, _LONG, _LONG, _INT, _INT)
        rows = _POINTER, _LONG, _POINTER, _LONG, _POINTER
        self.activate = _typed(loaded.activate, _INT, *rows, _LONG, _LONG, _INT, _INT)
        self.angles = _typed(loaded.angles, _POINTER, _POINTER, _POINTER, _LONG, _INT)
        self.run = _typed(loaded.run, _POINTER, _INT, _LONG, _LONG, _LONG, _INT)
        self.softmax = _typed(loaded.softmax, _INT, _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT)
        self.entropy = _typed(loaded.entropy, _POINTER, _POINTER, _LONG, _LONG, _INT)
        self.unpack = _typed(loaded.unpack, ctypes.POINTER(Layout), _POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER)
        loaded.unpack.restype = _INT
        loaded.use_openmp.argtypes, loaded.use_openmp.restype = (_POINTER,), None
        loaded.use_openmp(_openmp())


def _typed(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def _openmp() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP library that torch has loaded; None if there is none.

    The library then shares torch's threads. A second pool would compete with them for the processor.
    """
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted(path for pattern in ("libgomp*", "libiomp5*", "libomp*") for path in folder.glob(pattern)):
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, _POINTER).value
    return None


@cache
def _loaded(name: str) -> tuple[Library | None, str]:
    """The library of a variant, or why it cannot be used."""
    try:
        found = Library(build.LIBRARIES / f"{name}.so")
    except (OSError, AttributeError):
        return None, build.OUTDATED
    return (found, "") if found.built_from == build.digest() else (None, build.OUTDATED)


def library() -> Library | None:
    """The library; None if torch's products are used. Raises UsageError for a variant that is not available."""
    name, _ = build.choice()
    return _loaded(name)[0] if name else None


def why_not() -> str:
    """Why there is no library; "" if there is one."""
    name, why = build.choice()
    return _loaded(name)[1] if name else why


def is_unusable() -> bool:
    """Whether there is a library, but not for these sources or this CPU: everything is slow, though not by choice."""
    return why_not().endswith(build.AGAIN)


ACTIVATIONS = {name: number for number, name in enumerate(("silu", "relu", "gelu", "gelu_tanh", "quick_gelu", "tanh"))}
_Pair = ctypes.c_int64 * 2


class Attention(ctypes.Structure):
    """`Attention` of products.h."""

    _fields_: ClassVar[Any] = [
        *[(name, ctypes.c_int32) for name in ("type", "causal")],
        *[(name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "fed", "size")],
        ("q", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("q_row", "q_head", "q_token")],
        *[(name, ctypes.c_void_p * 2) for name in ("k", "v")],
        ("columns", _Pair),
        ("each", ctypes.c_int64),
        ("of", ctypes.c_void_p),
        *[(name, _Pair) for name in ("k_row", "k_head", "k_column", "v_row", "v_head", "v_column")],
        ("mask", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("mask_row", "window")],
        *[(name, ctypes.c_float) for name in ("scaling", "softcap")],
        ("bias", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("bias_row", "bias_head", "bias_token")],
        ("sinks", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    ]


def compiled(x: Tensor) -> Library | None:
    """The library, if it supports tensors like x; else None."""
    return library() if x.device.type == "cpu" and x.dtype in TYPES else None


def rms_norm(found: Library, x: Tensor, weight: Tensor, eps: float, *, late: bool) -> Tensor:
    """x [..., E], weight [E]. `late`: round once, after multiplying by the weight, rather than also before it."""
    x, weight = x.contiguous(), weight.float().contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // size
    where = x.data_ptr(), weight.data_ptr(), eps, y.data_ptr()
    found.rms_norm(*where, rows, size, TYPES[x.dtype], late, torch.get_num_threads())
    return y


def layer_norm(found: Library, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., E], weight and bias [E], or x [..., H, D] with a weight [H, D]."""
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    rows, period = x.numel() // size, 1 if weight is None else weight.numel() // size
    wide = [None if part is None else part.float().contiguous() for part in (weight, bias)]  # held until the call ends
    parts = (None if part is None else part.data_ptr() for part in wide)
    found.layer_norm(
        x.data_ptr(), *parts, eps, y.data_ptr(), rows, size, period, TYPES[x.dtype], torch.get_num_threads()
    )
    return y


def activate(found: Library, name: str, x: Tensor, up: Tensor | None = None) -> Tensor:
    """act(x), or act(x) · up, each [..., I]; parts of a wider tensor are read without a copy."""
    x, x_row = _rows(x)
    y, up_row = x.new_empty(x.shape), 0
    if up is not None:
        up, up_row = _rows(up)
    where = x.data_ptr(), x_row, None if up is None else up.data_ptr(), up_row, y.data_ptr()
    size = x.shape[-1]
    found.activate(ACTIVATIONS[name], *where, y.numel() // size, size, TYPES[x.dtype], torch.get_num_threads())
    return y


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x, copied if its rows have no constant stride, and that stride."""
    if x.stride(-1) == 1 and x.ndim > 1:
        step, apart = x.stride(-2), x.shape[-2]
        even = x.ndim == 2 or all(
            size == 1 or x.stride(axis) == step * apart * x.shape[axis + 1 : -2].numel()
            for axis, size in enumerate(x.shape[:-2])
        )
        if even:
            return x, step
    x = x.contiguous()
    return x, x.shape[-1]


def turns(found: Library, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of angles f32."""
    angles = angles.contiguous()
    cosines, sines = torch.empty_like(angles), torch.empty_like(angles)
    where = angles.data_ptr(), cosines.data_ptr(), sines.data_ptr()
    found.angles(*where, angles.numel(), torch.get_num_threads())
    return cosines, sines


def unpack(found: Library, layout: Layout, raw: Tensor, rows: Tensor, width: int) -> Tensor:
    """Rows int64 [N] of a matrix in a file's blocks, raw uint8 [O, bytes of a row]: float32 [N, width].

    Raises IndexError for a row outside the matrix.
    """
    rows = rows.reshape(-1).contiguous()
    y = torch.empty(len(rows), width)
    if not found.unpack(layout, raw.data_ptr(), len(raw), width, rows.data_ptr(), len(rows), y.data_ptr()):
        raise IndexError(f"rows {rows.tolist()[:4]} of a matrix with {len(raw)}")
    return y


def log_softmax(x: Tensor) -> Tensor:
    """x f32 [..., V] -> the logarithm of its softmax; by torch if there is no library for it."""
    found = compiled(x) if x.dtype == torch.float32 and x.numel() else None
    return x.log_softmax(-1) if found is None else softmax(found, x)


def softmax(found: Library, x: Tensor, *, plain: bool = False) -> Tensor:
    """x f32 [..., V] -> the logarithm of its softmax; `plain`: the softmax itself."""
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    where = x.data_ptr(), size, y.data_ptr()
    found.softmax(plain, *where, x.numel() // size, size, torch.get_num_threads())
    return y


def total(x: Tensor) -> Tensor:
    """The sum of each row of x [..., V]. On the CPU its order is fixed; torch's depends on the rows and the threads."""
    plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    sums: Tensor = torch.from_numpy(np.asarray(x.detach().numpy().sum(-1))) if plain else x.sum(-1)
    return sums


def entropy(logprobs: Tensor) -> Tensor:
    """logprobs f32 [..., V] -> the entropy of each row in nats, f32 [...]; by torch if there is no library for it."""
    found = compiled(logprobs) if logprobs.dtype == torch.float32 and logprobs.numel() else None
    if found is None:
        return total(torch.special.entr(logprobs.exp()))
    x, size = logprobs.contiguous(), logprobs.shape[-1]
    y: Tensor = x.new_empty(x.shape[:-1])
    found.entropy(x.data_ptr(), y.data_ptr(), x.numel() // size, size, torch.get_num_threads())
    return y


def attention(
    found: Library,
    query: Tensor,
    parts: list[tuple[Tensor, Tensor]],
    *,
    scaling: float,
    mask: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [N, H, F, D], one or two parts of the columns, keys and values [P, K, T, D] -> [N, F, H·D].

    N / P consecutive rows read one row of keys and values; P is 1 for a prompt that all rows share. mask bool [N, T] is
    True for valid columns. `causal`: the fed tokens are the last columns, and see none after themselves. bias f32
    [N or 1, H, F or 1, T], sinks [H].
    """
    rows, heads, fed, size = query.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    y = query.new_empty(rows, fed, heads * size)
    made = fields(query, y, parts[0][0].shape[1], scaling=scaling, softcap=softcap)
    made.each = rows // max(len(keys) for keys, _ in parts)
    kept: list[Any] = see(made, mask=mask, causal=causal, window=window, bias=bias)
    if sinks is not None:
        kept.append(sinks.float().contiguous())
        made.sinks = kept[-1].data_ptr()
    for number, (keys, values) in enumerate(parts):
        keys = keys if keys.stride(-1) == 1 else keys.contiguous()
        values = values if values.stride(-1) == 1 else values.contiguous()
        kept += [keys, values]
        point(made, number, keys, values)
        made.columns[number] = keys.shape[2]
    found.attention(ctypes.byref(made), torch.get_num_threads())
    del kept  # held until the call ended
    return y


def fields(query: Tensor, y: Tensor, kv_heads: int, *, scaling: float, softcap: float | None = None) -> Attention:
    """The library's fields for queries [N, H, F, D] and their output `y`, [N, F, H·D]."""
    rows, heads, fed, size = query.shape
    made = Attention(TYPES[query.dtype], True, rows, heads, kv_heads, fed, size, query.data_ptr())
    made.q_row, made.q_head, made.q_token, _ = query.stride()
    made.scaling, made.softcap, made.y = scaling, softcap or 0.0, y.data_ptr()
    return made


def point(fields: Attention, number: int, keys: Tensor, values: Tensor) -> None:
    """Set the addresses of one part of the columns: keys and values [P, K, T, D]. P = 1: all rows read this row."""
    shared = len(keys) == 1
    fields.k[number], fields.v[number] = keys.data_ptr(), values.data_ptr()
    row, fields.k_head[number], fields.k_column[number], _ = keys.stride()
    fields.k_row[number] = 0 if shared else row
    row, fields.v_head[number], fields.v_column[number], _ = values.stride()
    fields.v_row[number] = 0 if shared else row


def see(
    fields: Attention, *, mask: Tensor | None, causal: bool, window: int | None = None, bias: Tensor | None = None
) -> list[Any]:
    """Set which columns are visible (see `attention`). Returns tensors to keep alive until the call returns."""
    fields.causal, fields.window = causal, window or 0
    kept: list[Any] = []
    fields.mask = fields.bias = None
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        kept.append(mask)
        fields.mask, fields.mask_row = mask.data_ptr(), 0 if len(mask) == 1 else mask.stride(0)
    if bias is not None:
        bias = bias.float() if bias.stride(-1) == 1 else bias.float().contiguous()
        kept.append(bias)
        strides = (0 if length == 1 else stride for length, stride in zip(bias.shape, bias.stride(), strict=True))
        fields.bias, (fields.bias_row, fields.bias_head, fields.bias_token, _) = bias.data_ptr(), strides
    return kept
