"""Import transformers without reading all its files for the names that they define.

The package looks through its 2,500 files for names, twice, as it is imported, so that `transformers.AnyModel` can be
found; a checkpoint needs the names of one folder. Here the search is left out at first, and made when a name is asked
for that is not known yet: after that, the package is as it would have been.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_UTILS, _SEARCH = "transformers.utils.import_utils", "create_import_structure_from_path"
_AUTO = "auto"  # the folder whose names are looked up in any case


def import_transformers() -> None:
    """Import `transformers` and `transformers.models`; their other names are searched for on demand."""
    if "transformers" in sys.modules:
        return
    found: list[tuple[ModuleType, Any]] = []

    class Finder:
        """Finds the module that has the search, and takes hold of it between its execution and its use."""

        @staticmethod
        def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
            if name != _UTILS:
                return None
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    execute(module)
                    if hasattr(module, _SEARCH):
                        found.append((module, getattr(module, _SEARCH)))
                        setattr(module, _SEARCH, _only_auto(getattr(module, _SEARCH)))

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder)
    try:
        importlib.import_module("transformers.models")
    finally:
        sys.meta_path.remove(Finder)
        for module, search in found:
            setattr(module, _SEARCH, search)
            for name in ("transformers", "transformers.models"):
                if type(sys.modules.get(name)) is module._LazyModule:
                    sys.modules[name].__class__ = _completing(module)


def _only_auto(search: Any) -> Any:
    def searched(path: Any) -> Any:
        folder = Path(path).parent if Path(path).is_file() else Path(path)
        if folder.name == "models" and (folder / _AUTO).is_dir():
            return {_AUTO: search(str(folder / _AUTO))}
        return search(path)

    return searched


def _completing(utils: Any) -> Any:
    """A lazy module that searches for names when it is asked for one that it does not know."""
    lazy: Any = utils._LazyModule

    class Completing(lazy):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            known = (self._objects, self._object_missing_backend, self._class_to_module, self._modules)
            if not name.startswith("_") and not any(name in names for names in known):
                _complete(self, utils)
            return lazy.__getattr__(self, name)

        def __dir__(self) -> list[str]:
            _complete(self, utils)
            return list(lazy.__dir__(self))

    return Completing


def _complete(module: Any, utils: Any) -> None:
    """Give a lazy module all its names, and the class that it had."""
    module.__class__ = utils._LazyModule
    root = module.__name__ == "transformers"
    folder = str(Path(module.__path__[0]) / "models") if root else module.__path__[0]
    whole = utils._LazyModule(
        module.__name__, module.__file__, utils.define_import_structure(folder, prefix="models" if root else None)
    )
    module._modules |= whole._modules
    for name in ("_class_to_module", "_object_missing_backend", "_import_structure"):
        held = getattr(module, name)
        held.update({key: value for key, value in getattr(whole, name).items() if key not in held})
    module.__all__ = [*module.__all__, *(name for name in whole.__all__ if name not in set(module.__all__))]
