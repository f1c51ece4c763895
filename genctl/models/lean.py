"""A lean import of torch and transformers: what only training, sharding and compiling need waits until it is used.

Importing one model class brings in torch.distributed.tensor, FSDP, torch._dynamo, sympy and torch._inductor: measured,
a third of the time from the start of a process to its first token. transformers asks in each place whether torch has
its distributed parts, and works without; a mark that concerns torch.compile alone can be left out where nothing is
compiled. So the question is answered with no from here on, and while the model's modules are imported the marks do
nothing; torch._dynamo is whole as soon as something asks for it. Of torch itself one part waits, see `core`.

transformers cannot shard a model over processes then, and torch.compile would not know the marks. It is therefore done
in the process of the command line alone, never for a program that uses genctl as a library, for models on the CPU, and
not where a quantisation library or a checkpoint's own code is wanted.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from genctl.models import names

_ITEMS = "torch._dynamo._trace_wrapped_higher_order_op"  # masking_utils wants one class of it, for vmapped masks
_UTILS = "transformers.utils.import_utils"
_DYNAMO = "torch._dynamo"
_SHAPES = "torch._meta_registrations"
# parts of torch that must find that imported, as they do where torch is imported as usual
_BEHIND = (_DYNAMO, "torch._inductor", "torch._prims", "torch._refs", "torch._decomp", "torch.utils._content_store")
_PROCESSES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")

_lean: list[bool] = []  # not empty within `imports`


def possible() -> bool:
    """Whether this is the command line's own process, with something left to save."""
    if any(name in os.environ for name in _PROCESSES):
        return False
    return "genctl.cli.app" in sys.modules and "transformers.modeling_utils" not in sys.modules


def core() -> None:
    """Import torch without what it can say in Python of tensors that hold no numbers: a quarter of its own import.

    Nothing that is computed needs it. `whole` brings it in: to be called before something runs on the meta device, and
    by itself when a part of torch's compiler is imported. Where torch is imported already, nothing happens.
    """
    if "torch" in sys.modules:
        return
    sys.modules[_SHAPES] = waiting = _Waiting(_SHAPES, {})
    try:
        torch = importlib.import_module("torch")
    finally:
        if sys.modules.get(_SHAPES) is waiting:
            del sys.modules[_SHAPES]
    if torch.__dict__.get("_meta_registrations") is waiting:
        del torch.__dict__["_meta_registrations"]
    sys.meta_path.insert(0, _Rest)
    if not _generates(torch):  # the part that waits would have given generators their metaclass
        with suppress(ImportError, AttributeError):
            torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
        if not _generates(torch):
            whole()


def _generates(torch: Any) -> bool:
    try:
        torch.Generator()
    except RuntimeError:
        return False
    return True


def whole() -> None:
    """Import what `core` left out."""
    _rest()
    importlib.import_module(_SHAPES)


def _rest() -> None:
    # another list: an import may be going through the old one, and would pass over a finder
    sys.meta_path = [finder for finder in sys.meta_path if finder is not _Rest]


@contextmanager
def imports() -> Iterator[None]:
    """Within, transformers' modules are imported without what decoding never uses.

    Raises ImportError or AttributeError where torch or transformers is not built as this supposes.
    """
    with ExitStack() as undo:
        _lean.append(True)
        undo.callback(_lean.pop)
        undo.enter_context(names.on_demand())
        import torch
        import transformers.utils

        def replace(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for owner in (sys.modules[_UTILS], transformers.utils):
            # for good: modules that hear yes do not go with those that heard no
            setattr(owner, "is_torch_distributed_available", _no)  # noqa: B010
        if _DYNAMO not in sys.modules:
            for name in ("disable", "allow_in_graph"):
                replace(torch.compiler, name, _unmarked)
            undo.callback(_forget)
            marks = dict.fromkeys(("assume_constant_result", "allow_in_graph", "disable"), _unmarked)
            torch.__dict__["_dynamo"] = sys.modules[_DYNAMO] = _Waiting(_DYNAMO, {**marks, "__path__": []})
            sys.modules[_ITEMS] = _Waiting(_ITEMS, {"TransformGetItemToIndex": _items_as_indices})
            sys.meta_path.insert(0, _Whole)
        # a thousand patterns, for the renamed weights of all architectures; a checkpoint needs few of them or none
        replace(importlib.import_module("transformers.core_model_loading"), "re", _LateRe("re"))
        yield


def _no(*_: Any, **__: Any) -> bool:
    return False


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator of torch.compiler that leaves the function alone, written with or without arguments."""
    return _unmarked if function is None else function


def _items_as_indices(*arguments: Any, **keywords: Any) -> Any:
    """TransformGetItemToIndex, the real one, when a mask is made with it."""
    _forget()
    return importlib.import_module(_ITEMS).TransformGetItemToIndex(*arguments, **keywords)


class _LateRe(ModuleType):
    """The module `re`, except that a pattern is compiled when it is first used."""

    compile = staticmethod(lambda source, flags=0: _LatePattern(source, flags))

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)


class _LatePattern:
    def __init__(self, source: str, flags: int) -> None:
        self.source, self.late_flags = source, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("source", "late_flags"):  # copying asks before anything is set
            raise AttributeError(name)
        return getattr(re.compile(self.source, self.late_flags), name)  # `re` remembers what it has compiled


class _Waiting(ModuleType):
    """A stand-in for a module: what is named here is at hand, everything else imports the real one."""

    def __init__(self, name: str, known: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _forget()
        return getattr(importlib.import_module(self.__name__), name)


class _Whole:
    """Finds a part of torch._dynamo while a stand-in is in its place: the real one is imported, with the part."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_DYNAMO}."):
            return None
        _forget()
        module = importlib.import_module(name)
        return ModuleSpec(name, _Made(module))


class _Rest:
    """Finds a part of torch that supposes the whole of it: what was left out is imported first, and maybe the part."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "transformers" and not _lean:  # imported as usual, which takes torch as it is usually
            whole()
            return None
        if name == _SHAPES:
            _rest()
        if not f"{name}.".startswith(tuple(f"{part}." for part in _BEHIND)):
            return None
        whole()
        return ModuleSpec(name, _Made(sys.modules[name])) if name in sys.modules else None


class _Made(Loader):
    """A loader of a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _forget() -> None:
    """Take the stand-ins away, wherever they still are."""
    torch = sys.modules["torch"]
    if _Whole in sys.meta_path:
        sys.meta_path.remove(_Whole)
    for name in (_DYNAMO, _ITEMS, _SHAPES):
        if isinstance(sys.modules.get(name), _Waiting):
            del sys.modules[name]
    if isinstance(torch.__dict__.get("_dynamo"), _Waiting):
        del torch.__dict__["_dynamo"]  # torch imports it when it is asked for
