"""Compiles genctl's products while a wheel is built, or an editable installation is made."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PRODUCTS = "genctl/native/products"


class ProductsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Where nothing can compile, the wheel is pure Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile: an editable installation beside the sources, a wheel elsewhere; and name it after its platform."""
        folder = Path(self.root, PRODUCTS)
        spec = importlib.util.spec_from_file_location("products_build", folder / "build.py")
        assert spec is not None
        assert spec.loader is not None
        products = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(products)
        why = ""
        if not products.is_built():
            if version != "editable":
                folder = self._elsewhere
                folder.mkdir(parents=True, exist_ok=True)
            why = products.build(folder)
        if why:
            self.app.display_warning(f"genctl's own products are not compiled, torch's are used: {why}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        for name in products.built(folder):
            build_data["force_include"][str(folder / f"{name}.so")] = f"{PRODUCTS}/{name}.so"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        shutil.rmtree(self._elsewhere, ignore_errors=True)

    @property
    def _elsewhere(self) -> Path:
        return Path(self.directory, ".products")
