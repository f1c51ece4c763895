"""docs/structure.md names files and functions that exist, and every package; docs/contributing.md files that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import tomli

from tests.source import tree_of

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")


def defined(path: Path) -> set[str]:
    """Functions, classes and Class.method of a file."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_structure_has_ten_steps_and_each_package_in_80_lines() -> None:
    steps = re.split(r"^\d+\. ", TEXT.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    assert len(steps) == 10
    assert all(re.search(r"`genctl/[a-z_/]+\.py`", step) for step in steps)
    packages = {path.parent.name for path in (ROOT / "genctl").glob("*/__init__.py")}
    rows = re.findall(r"^\| (`genctl/.*?) \|", TEXT.partition("\n## The packages")[2], flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`genctl/(\w+)`", row)]
    assert sorted(named) == sorted(packages)
    assert len(TEXT.splitlines()) <= 80


def test_what_is_named_is_there() -> None:
    for name in re.findall(r"`(genctl/[\w/]+(?:\.py)?)/?`", TEXT):
        assert (ROOT / name).exists(), name
    everything = set().union(*(defined(path) for path in (ROOT / "genctl").rglob("*.py")))
    for path, name in re.findall(r"`(genctl/[\w/]+\.py)`\s+`([A-Za-z_.]+)`", TEXT):
        assert name in defined(ROOT / path), f"{path} has no {name}"
    for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", TEXT):
        assert name in everything or name == "Lane", name


def test_the_guide_names_files_that_are_there() -> None:
    guide = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:genctl|tests|scripts)/[\w/]+(?:\.\w+)?)/?[ `]", guide)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_nothing_recommends_a_command_that_imports_from_the_working_folder() -> None:
    """`python -m` and `torchrun -m` put it first on the path. Contributors may run them in the checkout."""
    files = [*(ROOT / "genctl").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    unsafe = re.compile(r"(?:python3?|torchrun|accelerate launch)\b[^`\n]*? -m (?:genctl|lm_eval)\b")
    allowed = {"docs/evaluation.md", "genctl/__main__.py", "genctl/process.py"}  # which explain what it does
    found = {str(path.relative_to(ROOT)) for path in files if unsafe.search(path.read_text(encoding="utf-8"))}
    assert found <= allowed
    scripts = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    for place in scripts.values():
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(module), name))


COMPAT = Path("genctl/compat.py")
LISTED = {"_exit"}  # looks private, but os documents it


@cache
def files() -> dict[Path, ast.Module]:
    """Every file of the package and the scripts, parsed when a test needs them: every worker imports this module."""
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
    """All names of other objects and modules that a file uses, with their lines; torch.ops and torch.jit as private."""
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
    found: dict[bool, list[str]] = {True: [], False: []}  # by whether it is compat.py
    for path, tree in files().items():
        for line, name in private_uses(tree) if path.parts[0] == "genctl" else ():
            if name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name not in own:
                found[path == COMPAT].append(f"{path}:{line} {name}")
    assert not found[False], "\n".join(found[False])
    assert found[True], "nothing is looked for"


def test_the_additions_that_the_guide_shows_are_in_the_files() -> None:
    """Each added line of the diffs in contributing.md: an outdated example misleads the next person."""
    path, shown = Path(), list[str]()
    for line in (ROOT / "docs/contributing.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("--- a/"):
            path = Path(line.removeprefix("--- a/"))
        elif line.startswith("+") and line.strip("+ ") not in ("", "…"):
            shown.append(line[1:])
            assert line[1:] in (ROOT / path).read_text(encoding="utf-8").splitlines(), f"{path} has no {line[1:]!r}"
    assert len(shown) > 40
