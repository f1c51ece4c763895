"""Who may import whom, and what starting must not cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers

PACKAGE = Path(__file__).resolve().parent.parent / "genctl"

# room -> rooms it may import, besides itself, `errors` and `plural`
ALLOWED: dict[str, set[str]] = {
    "cli": {
        "backend",
        "config",
        "session",
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
        "workers",
        "ranks",
    },
    "workers": {"config", "events", "identity", "inspecting", "params", "requests", "scoring", "session"},
    "backend": {"config", "params", "events", "requests", "batch", "scoring.scored_text", "models.tokenizer_alone"},
    "ranks": {"params", "cli", "batch.rows", "events", "requests"},
    "api": {"config", "session", "requests", "batch", "params", "events", "results"},
    "session": {
        "config",
        "params",
        "models",
        "native",
        "strategies",
        "decode",
        "events",
        "lane_text",
        "rerank",
        "request_planner",
        "requests",
    },
    "inspecting": {
        "session",
        "requests",
        "compat",
        "request_planner",
        "models",
        "native",
        "decode",
        "events",
        "params",
        "config",
        "results",
        "sequences",
    },
    "scoring": {"session", "requests", "request_planner", "models", "decode", "events"},
    "request_planner": {
        "events",
        "lane_text",
        "params",
        "models",
        "native",
        "strategies",
        "decode",
        "stop_text",
        "forced_phrases",
        "rerank",
        "requests",
    },
    "requests": {"config"},
    "stop_text": {"decode.stopping", "events"},
    "forced_phrases": {"strategies", "params", "events"},
    "lane_text": {"decode", "events", "forced_phrases", "models", "rerank", "stop_text"},
    "history": {"events"},
    "results": {"events", "history"},
    "comparing": {"config", "params", "batch", "events", "results", "identity", "sequences"},
    "rerank": {"events", "params"},
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
        "sequences",
        "strict_json",
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
        "session",
        "request_planner",
        "scoring",
        "inspecting",
        "workers",
        "ranks",
    },
    "transformers": {"models", "decode", "inspecting", "ranks"},
    "rich": {"render", "cli"},
    "tomli": {"config"},
    "pydantic": {"config"},
    "ray": {"workers"},
    "typer": {"cli"},
    "httpx2": {"backend"},
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
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "genctl" and rest and rest.split(".")[0] not in (room, "errors", "plural", "__version__"):
            allowed = any(rest == other or rest.startswith(f"{other}.") for other in ALLOWED[room])
            assert allowed, f"{room} imports genctl.{rest}"
        if top in HEAVY:
            assert room in HEAVY[top], f"{room} imports {top}"


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
