"""Import transformers without reading all its files for the names that they define.

The package looks through its 2,500 files for names, twice, as it is imported, so that `transformers.AnyModel` can be
found; a checkpoint needs the names of one folder. Here the search is left out at first, and made when a name is asked
for that is not known yet: after that, the package knows what it would have known.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_UTILS, _SEARCH, _LAZY = "transformers.utils.import_utils", "create_import_structure_from_path", "_LazyModule"
_PACKAGES = ("transformers", "transformers.models")
_AUTO = "auto"  # the folder whose names are looked up in any case


@contextmanager
def on_demand() -> Iterator[None]:
    """Import `transformers`; within, and for what is imported within, names are searched for on demand.

    Nothing is different where transformers is imported already.
    """
    if "transformers" in sys.modules:
        yield
        return
    undo: list[Callable[[], None]] = []

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
                    undo.append(_shorten(module))

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder)
    try:
        try:
            importlib.import_module("transformers.models")
        finally:
            sys.meta_path.remove(Finder)
        yield
    finally:
        for step in undo:
            step()


def _shorten(utils: Any) -> Callable[[], None]:
    search, lazy = getattr(utils, _SEARCH), getattr(utils, _LAZY)

    def only_auto(path: Any) -> Any:
        folder = Path(path).parent if Path(path).is_file() else Path(path)
        if folder.name == "models" and (folder / _AUTO).is_dir():
            return {_AUTO: search(str(folder / _AUTO))}
        return search(path)

    def use(found: Any, kind: Any) -> None:
        setattr(utils, _SEARCH, found)
        for owner in (utils, sys.modules.get("transformers.utils")):
            if owner is not None:
                setattr(owner, _LAZY, kind)
        forget = getattr(utils.define_import_structure, "cache_clear", None)  # what it remembers is of the other search
        if forget is not None:
            forget()

    class OnDemand(lazy):  # type: ignore[misc,valid-type]
        """A package that searches for its names when it is asked for one that it does not know."""

        def __getattr__(self, name: str) -> Any:
            known = (self._objects, self._object_missing_backend, self._class_to_module, self._modules)
            if not name.startswith("_") and not any(name in names for names in known):
                self._complete()
            return lazy.__getattr__(self, name)

        def __dir__(self) -> list[str]:
            self._complete()
            return list(lazy.__dir__(self))

        def _complete(self) -> None:
            if self.__name__ not in _PACKAGES or self.__dict__.get("_is_complete"):
                return
            self._is_complete = True
            root = self.__name__ == "transformers"
            folder = str(Path(self.__path__[0]) / "models") if root else self.__path__[0]
            before = getattr(utils, _SEARCH), getattr(utils, _LAZY)
            use(search, lazy)
            try:
                names = utils.define_import_structure(folder, prefix="models" if root else None)
            finally:
                use(*before)
            whole = lazy(self.__name__, self.__file__, names)
            self._modules |= whole._modules
            for part in ("_class_to_module", "_object_missing_backend", "_import_structure"):
                held = getattr(self, part)
                held.update({key: value for key, value in getattr(whole, part).items() if key not in held})
            listed: list[str] = self.__dict__["__all__"]
            self.__dict__["__all__"] = [*listed, *sorted(set(whole.__all__) - set(listed))]

    use(only_auto, OnDemand)
    return lambda: use(search, lazy)
