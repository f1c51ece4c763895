"""A fake GPU: tensors that report the device `cuda:0` while their data is on the CPU.

Every torch function that gets one checks its operands as on a real GPU: two devices are an error, except for indices
and single numbers on the CPU. So code that creates a tensor on the wrong device fails here, without a GPU.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

HERE = torch.device("cuda", 0)
OF_TENSOR = {torch.Tensor.is_cuda.__get__: True, torch.Tensor.is_cpu.__get__: False, torch.Tensor.device.__get__: HERE}  # type: ignore[attr-defined]
COPIES = {torch.Tensor.copy_, torch.Tensor.__setitem__}  # between devices


class Memory:
    """Counts the bytes of the tensors on the fake GPU, of which `total` fit."""

    def __init__(self, total: int = 2**34) -> None:
        self.total, self.used, self.most = total, 0, 0
        self._uses: dict[int, int] = {}  # tensors of each storage

    def hold(self, tensor: OnGpu) -> None:
        storage = tensor.inner.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return
        if place not in self._uses:
            if self.used + size > self.total:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
            self.used += size
            self.most = max(self.most, self.used)
        self._uses[place] = self._uses.get(place, 0) + 1
        weakref.finalize(tensor.inner, self._leave, place, size)

    def _leave(self, place: int, size: int) -> None:
        self._uses[place] -= 1
        if not self._uses[place]:
            del self._uses[place]
            self.used -= size


memory = Memory()  # of the device


class OnGpu(Tensor):
    """A tensor on the fake GPU; `inner` has its data."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        made = Tensor._make_subclass(cls, inner)
        made.inner = inner.detach()
        memory.hold(made)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_TENSOR:
            return OF_TENSOR[func]
        if func is Tensor.numpy or func is Tensor.__array__:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")
        if func in (Tensor.cpu, Tensor.to, Tensor.cuda, Tensor.type):
            return _moved(func, args, kwargs)
        flat = _leaves((args, kwargs))
        if func is Tensor.__getitem__:
            _same_device(func, [])
        elif func not in COPIES:
            _same_device(func, flat)
        elif len(args) == 3:
            _same_device(func, [args[0], args[2]])
        known = {id(each.inner): each for each in flat if isinstance(each, OnGpu)}
        result = func(*_mapped(_bare, args), **_mapped(_bare, kwargs))
        if isinstance(result, torch.Size):
            return result
        return _mapped(lambda each: known.get(id(each), each) if id(each) in known else _wrapped(each), result)


def _leaves(value: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, because torch's own tree functions would take most of the time."""
    if isinstance(value, (tuple, list)):
        return [leaf for each in value for leaf in _leaves(each)]
    return [leaf for each in value.values() for leaf in _leaves(each)] if isinstance(value, dict) else [value]


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same tree with changed leaves."""
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    if not isinstance(value, (tuple, list)):
        return change(value)
    found = [_mapped(change, each) for each in value]
    return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)


def _bare(value: Any) -> Any:
    if _is_gpu(value):
        return torch.device("cpu")
    return value.inner if isinstance(value, OnGpu) else value


def _wrapped(value: Any) -> Any:
    return OnGpu(value) if isinstance(value, Tensor) and not isinstance(value, OnGpu) else value


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of `to` and its relatives for a tensor on the fake GPU."""
    named = [each for each in (*args[1:], kwargs.get("device")) if isinstance(each, (str, torch.device))]
    away = func is Tensor.cpu or any(not _is_gpu(each) for each in named)
    tensors = [each for each in args[1:] if isinstance(each, Tensor)]  # to(other)
    away = away or any(not isinstance(each, OnGpu) for each in tensors)
    inner = args[0].inner
    made = func(inner, *_mapped(_bare, args[1:]), **{**_mapped(_bare, kwargs)}) if func is not Tensor.cuda else inner
    if away:
        return made.clone() if made is inner else made
    return args[0] if made is inner else OnGpu(made)


def _same_device(func: Any, operands: Any) -> None:
    found = [each for each in operands if isinstance(each, Tensor)]
    alien = [each for each in found if not isinstance(each, OnGpu) and each.dim() > 0]
    if alien and len(alien) < len(found):
        name = getattr(func, "__name__", func)
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu")


def _is_gpu(value: Any) -> bool:
    if isinstance(value, str):
        return value.split(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


class _Mode(TorchFunctionMode):
    """Redirects functions that name the GPU. Nothing is pinned: there is no driver to do it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        kwargs.pop("pin_memory", None)
        flat = _leaves((args, kwargs))
        if any(isinstance(each, OnGpu) for each in flat) or not any(map(_is_gpu, flat)):
            return func(*args, **kwargs)
        if func is torch.device or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        return _mapped(_wrapped, _copied(func(*_mapped(_bare, args), **_mapped(_bare, kwargs)), args))


def _copied(result: Any, args: Any) -> Any:
    return result.clone() if args and result is args[0] else result


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch, total: int = 2**34) -> Iterator[Memory]:
    """The fake GPU, with `total` bytes of memory."""
    assert transformers.LlamaForCausalLM  # imported before torch looks as if it had a GPU
    global memory
    memory = own = Memory(total)

    class Generator(torch.Generator):
        def __new__(cls, device: Any = None) -> Any:
            return super().__new__(cls)

    class Event:
        """An event in the queue of a GPU that finishes everything at once."""

        def record(self, stream: Any) -> None: ...

        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (7, 5))  # one without our kernels
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (own.total - own.used, own.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *args: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *args: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args: None)  # without one no step is captured
    with _Mode():
        yield own


def moved(model: Any) -> Any:
    """A copy of a transformers model with its weights on the fake GPU. Call it within `fake_gpu`."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = torch.nn.Parameter(OnGpu(tensor.detach().clone()), requires_grad=False)
    return model
