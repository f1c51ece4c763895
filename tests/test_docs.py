"""docs/structure.md names files and functions that exist, and every package; docs/contributing.md files that exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import tomli

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


def test_there_are_ten_steps_and_each_names_a_file() -> None:
    steps = re.split(r"^\d+\. ", TEXT.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    assert len(steps) == 10
    assert all(re.search(r"`genctl/[a-z_/]+\.py`", step) for step in steps)


def test_what_is_named_is_there() -> None:
    for name in re.findall(r"`(genctl/[\w/]+(?:\.py)?)/?`", TEXT):
        assert (ROOT / name).exists(), name
    everything = set().union(*(defined(path) for path in (ROOT / "genctl").rglob("*.py")))
    for path, name in re.findall(r"`(genctl/[\w/]+\.py)`\s+`([A-Za-z_.]+)`", TEXT):
        assert name in defined(ROOT / path), f"{path} has no {name}"
    for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", TEXT):
        assert name in everything or name == "Lane", name


def test_every_package_has_its_line() -> None:
    packages = {path.parent.name for path in (ROOT / "genctl").glob("*/__init__.py")}
    rows = re.findall(r"^\| (`genctl/.*?) \|", TEXT.partition("\n## The packages")[2], flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`genctl/(\w+)`", row)]
    assert sorted(named) == sorted(packages)


def test_the_life_of_a_run_is_short() -> None:
    assert len(TEXT.splitlines()) <= 80


def test_the_guide_names_files_that_are_there() -> None:
    guide = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:genctl|tests|scripts)/[\w/]+(?:\.\w+)?)/?[ `]", guide)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_nothing_recommends_a_command_that_imports_from_the_working_folder() -> None:
    """`python -m` and `torchrun -m` put it on the path, first. Contributors start them in the checkout."""
    files = [*(ROOT / "genctl").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    unsafe = re.compile(r"(?:python3?|torchrun|accelerate launch)\b[^`\n]*? -m (?:genctl|lm_eval)\b")
    allowed = {"docs/evaluation.md", "genctl/__main__.py", "genctl/process.py"}  # which say what it does
    found = {str(path.relative_to(ROOT)) for path in files if unsafe.search(path.read_text(encoding="utf-8"))}
    assert found <= allowed
    scripts = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    for place in scripts.values():
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(module), name))
