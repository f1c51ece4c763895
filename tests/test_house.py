"""Who may import whom, and what starting must not cost."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers

PACKAGE = Path(__file__).resolve().parent.parent / "genctl"

# room -> rooms it may import, besides itself, `errors`, `plural` and `version`
ALLOWED: dict[str, set[str]] = {
    "cli": {
        "engines",
        "config",
        "requests",
        "scoring",
        "comparing",
        "inspecting",
        "batch",
        "render",
        "errors",
        "params",
        "events",
        "results",
        "models.hub",
        "models.listing",
        "identity",
        "collection",
        "ranks",
    },
    "engines": {"config", "events", "params", "requests", "scoring.scored_text"},
    "engines.local": {
        "engines.protocol",
        "config",
        "decode",
        "events",
        "models",
        "native",
        "params",
        "requests",
        "scoring",
        "strategies",
    },
    "engines.server": {
        "engines.protocol",
        "batch",
        "config",
        "events",
        "models.tokenizer_alone",
        "params",
        "requests",
        "scoring.scored_text",
    },
    "engines.pool": {
        "engines.local",
        "engines.protocol",
        "collection",
        "config",
        "events",
        "identity",
        "inspecting",
        "params",
        "requests",
        "scoring",
    },
    "engines.ranks": {"engines.local", "engines.protocol", "config", "events", "ranks", "requests"},
    "ranks": {"params"},
    "api": {"config", "engines.local", "engines.protocol", "requests", "batch", "params", "events", "results"},
    "inspecting": {
        "engines.local",
        "engines.protocol",
        "requests",
        "compat",
        "models",
        "native",
        "decode",
        "events",
        "params",
        "config",
        "results",
        "sequences",
    },
    "scoring": {"events"},
    "requests": {"config"},
    "history": {"events"},
    "results": {"events", "history"},
    "comparing": {"config", "params", "batch", "events", "results", "identity", "sequences"},
    "config": {"params", "plugins", "listed_knobs", "fit"},
    "strategies": {"decode", "params", "sequences"},
    "models": {
        "byte_level",
        "strict_json",
        "compat",
        "decode.types",
        "generation_fields",
        "native",
        "params",
        "events",
        "identity",
        "collection",
        "ranks",
    },
    "batch": {"strict_json", "events", "identity", "results"},
    "render": {"events", "history", "sequences"},
    "decode": {
        "byte_level",
        "compat",
        "params",
        "plugins",
        "listed_knobs",
        "fit",
        "events",
        "identity",
        "models.architectures",
        "sequences",
        "strict_json",
        "native.products",
    },
    "native": {"compat", "decode", "generation_fields"},
    "generation_fields": set(),
    "compat": set(),
    "identity": set(),
    "collection": set(),
    "sequences": set(),
    "byte_level": set(),
    "plugins": set(),
    "strict_json": set(),
    "params": set(),
    "listed_knobs": set(),
    "fit": set(),
    "events": set(),
    "errors": set(),
    "plural": set(),
}
HEAVY = {
    "torch": {
        "compat",
        "models",
        "native",
        "decode",
        "strategies",
        "inspecting",
        "engines.local",
        "engines.pool",
        "engines.ranks",
        "ranks",
    },
    "transformers": {"models", "decode", "inspecting", "ranks"},
    "rich": {"render", "cli"},
    "tomli": {"config"},
    "pydantic": {"config"},
    "ray": {"engines.pool"},
    "typer": {"cli"},
    "httpx2": {"engines.server"},
}


def imports(path: Path) -> list[str]:
    """Every module that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [f"{node.module}.{alias.name}" if node.module == "genctl" else node.module for alias in node.names]
    return found


def room_of(path: Path) -> str:
    """The room of a file; each kind of engine has its own."""
    parts = path.relative_to(PACKAGE).parts
    deep = 2 if parts[0] == "engines" and len(parts) > 2 else 1
    return ".".join(parts[:deep]).removesuffix(".py")


def is_in(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "genctl" and rest:
            allowed = ALLOWED[room] | {room, "errors", "plural", "version"}
            assert any(is_in(rest, other) for other in allowed), f"{room} imports genctl.{rest}"
        if top in HEAVY:
            assert room in HEAVY[top], f"{room} imports {top}"


def test_engines_know_no_commands() -> None:
    """Imports in functions and for types count too: an engine is given to a command, never the other way round."""
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in FILES
        if room_of(path).startswith("engines")
        for name in imports(path)
        if is_in(name, "genctl.cli") or is_in(name, "genctl.commands")
    ]
    assert wrong == []


def test_a_command_has_one_job_class() -> None:
    """Where tokens are computed is an engine (`engines.protocol`), not a subclass of a job."""
    bases = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    jobs = {name for name, above in bases.items() if "Job" in above}
    assert len(jobs) > 3
    assert [name for name, above in bases.items() if above & jobs] == []


def test_no_flag_says_where_tokens_are_computed() -> None:
    assert [path.name for path in FILES if re.search(r"\bis_remote\b", path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["--version"], ["presets", "list"], ["presets", "schema"]]
)
def test_what_needs_no_model_imports_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from genctl.cli.app import run; status = run(sys.argv[1:]);"
        "assert status == 0, status;"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_costs_nothing() -> None:
    code = "import sys, genctl; genctl.__version__; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_tiers_name_files_that_are_there() -> None:
    tests = Path(__file__).parent
    assert [name for name in (*tiers.EVERYDAY, *tiers.SLOWEST) if not (tests / name).is_file()] == []
    assert len(tiers.SLOWEST) == len(set(tiers.SLOWEST))
