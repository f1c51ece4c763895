"""What holds for all files: private names of libraries stay in one file, no cycles, no class name twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("genctl", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
COMPAT = Path("genctl/compat.py")
LISTED = {"_exit"}  # private by its look alone: os documents it


def own_private_names() -> set[str]:
    """Names with a leading underscore that this project defines."""
    own = set()
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "new"):
                    own.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
    return own


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines with a name that only its owner should use, or with an operator that torch does not list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
            if ast.unparse(node) in ("torch.ops", "torch.jit"):
                yield node.lineno, f"_{ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, part) for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, part) for part in node.module.split("."))
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def test_private_names_of_libraries_are_in_compat_alone() -> None:
    own = own_private_names() | LISTED
    found = [
        f"{path}:{line} {name}"
        for path, tree in FILES.items()
        if path != COMPAT and path.parts[0] == "genctl"
        for line, name in private_uses(tree)
        if name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name not in own
    ]
    assert not found, "\n".join(found)
    assert list(private_uses(FILES[COMPAT])), "nothing is looked for"
