"""What holds for all files: private names of libraries stay in one file, no cycles, no class name twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from tests.source import tree_of

ROOT = Path(__file__).resolve().parent.parent
COMPAT = Path("genctl/compat.py")
STILL_TWICE = {"_Candidates", "_Enough"}  # of beam search, with constraints and without
LISTED = {"_exit"}  # private by its look alone: os documents it


@cache
def files() -> dict[Path, ast.Module]:
    """Every file of the package and of the scripts, parsed when a test asks: every worker imports this module."""
    return {
        path.relative_to(ROOT): tree_of(path)
        for folder in ("genctl", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def own_private_names() -> set[str]:
    """Names with a leading underscore that this project defines."""
    own = set()
    for tree in files().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
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
            if node.attr in ("ops", "jit") and ast.unparse(node) in ("torch.ops", "torch.jit"):
                yield node.lineno, f"_{ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, part) for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, part) for part in node.module.split("."))
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def test_private_names_of_libraries_are_in_compat_alone() -> None:
    own = own_private_names() | LISTED
    found = [
        f"{path}:{line} {name}"
        for path, tree in files().items()
        if path != COMPAT and path.parts[0] == "genctl"
        for line, name in private_uses(tree)
        if name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name not in own
    ]
    assert not found, "\n".join(found)
    assert list(private_uses(files()[COMPAT])), "nothing is looked for"


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__").removeprefix("scripts.")  # as they import


def imported_files(tree: ast.AST, modules: dict[str, Path]) -> set[Path]:
    """The files of this project that a file imports when it runs, inside functions too; types alone do not count."""
    for_types = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    names: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if id(node) not in for_types:
            if isinstance(node, ast.Import):
                names += [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
    return {
        modules[whole] if whole in modules else modules[parent]
        for whole, parent in names
        if {whole, parent} & {*modules}
    }


def on_cycles(imports: dict[Path, set[Path]]) -> list[Path]:
    """The files that import themselves by way of others."""

    def reaches(start: Path) -> bool:
        seen, waiting = set(), list(imports[start] - {start})
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                waiting += imports[path]
        return start in seen

    return [path for path in imports if reaches(path)]


def test_no_files_import_each_other() -> None:
    modules = {module_name(path): path for path in files()}
    imports = {path: imported_files(tree, modules) for path, tree in files().items()}
    assert sum(map(len, imports.values())) > 500
    assert not on_cycles(imports), "\n".join(map(str, on_cycles(imports)))


def test_a_cycle_is_found() -> None:
    a, b, c = Path("a"), Path("b"), Path("c")
    assert on_cycles({a: {b}, b: {c}, c: {b}}) == [b, c]


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in files().items():
        if path.parts[0] == "genctl":
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert set(twice) <= STILL_TWICE, twice


def test_what_the_loop_and_a_search_tell_each_other_is_small() -> None:
    from genctl.decode.types import Choice, Scores

    assert len(fields(Scores)) <= 8
    assert len(fields(Choice)) <= 8


def test_the_additions_that_the_guide_shows_are_in_the_files() -> None:
    """Each added line of the diffs in contributing.md: an example that no longer holds misleads the next person."""
    path, shown = Path(), list[str]()
    for line in (ROOT / "docs/contributing.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("--- a/"):
            path = Path(line.removeprefix("--- a/"))
        elif line.startswith("+") and line.strip("+ ") not in ("", "…"):
            shown.append(line[1:])
            assert line[1:] in (ROOT / path).read_text(encoding="utf-8").splitlines(), f"{path} has no {line[1:]!r}"
    assert len(shown) > 40
