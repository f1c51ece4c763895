"""Compile the kernels for a wheel or an editable installation, and prepare the README for a package index."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PRODUCTS = "genctl/kernels"
COMPILER = "ziglang==0.17.1"  # clang, as a package


class ProductsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compile the kernels and add them to the wheel. If that fails, the wheel is pure Python."""

    def dependencies(self) -> list[str]:
        """The compiler, only if there is something to compile: its package takes longer to install than genctl."""
        products = self._products
        return [COMPILER] if products.variants() and not products.is_built() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile beside the sources (editable installation) or elsewhere (wheel), and set the platform tag."""
        products, folder = self._products, Path(self.root, PRODUCTS)
        why = ""
        if not products.is_built():
            if version != "editable":
                folder = self._elsewhere
                folder.mkdir(parents=True, exist_ok=True)
            why = products.build(folder)
        if why:
            self.app.display_warning(f"genctl's own products are not compiled, torch's are used: {why}")
        if why:
            return
        tag = products.wheel_tag() or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{tag}"
        for name in (products.CPU, *products.built(folder)):
            build_data["force_include"][str(folder / f"{name}.so")] = f"{PRODUCTS}/{name}.so"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the files that were compiled for the wheel."""
        shutil.rmtree(self._elsewhere, ignore_errors=True)

    @property
    def _elsewhere(self) -> Path:
        return Path(self.directory, ".products")

    @cached_property
    def _products(self) -> Any:
        spec = importlib.util.spec_from_file_location("products_build", Path(self.root, PRODUCTS, "build.py"))
        assert spec is not None
        assert spec.loader is not None
        products = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(products)
        return products


class ReadmeHook(MetadataHookInterface):
    """README.md for a package index: links to files of the checkout point to the repository instead."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata."""
        pages = f"{metadata['urls']['Source']}/blob/main/"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\((?!https?:|#)", f"]({pages}", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
