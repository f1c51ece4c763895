"""Which package ("room") may import which, and what must not be imported at the start."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from genctl.commands.app import COMMANDS
from genctl.commands.table import Command
from genctl.config import listed_knobs
from genctl.decode.processors.build import maker_of
from genctl.errors import UsageError
from genctl.io import writers
from genctl.io.writers import FORMATS, Format, Unclosed, open_writer
from genctl.params import Generation, knobs
from scripts import mutants
from tests import tiers
from tests.source import nodes_of

PACKAGE = Path(__file__).resolve().parent.parent / "genctl"

# room -> rooms that it may import, besides itself, `errors`, `config.reader` and `config.shapes`
_SLICE = {"commands", "config", "engines", "events", "io", "models", "params", "process", "terminal"}
_EARLIER = {"events", "params"}
ALLOWED: dict[str, set[str]] = {
    "api": {"config", "engines", "io", *_EARLIER},
    "lm_eval": {"api", "process", "engines", "models", "terminal", *_EARLIER},
    "tree": {"config", "decode", "engines", "events", "io", "models", "kernels", "params"},
    "commands": {*_SLICE, "comparing", "engines.pool", "engines.server", "pages", "tree"},
    "commands.explore": {*_SLICE, "commands.run", "decode", "tree"},
    "commands.run": {*_SLICE, "decode", "pages", "parity"},
    "commands.chat": {*_SLICE, "commands.run"},
    "commands.compare": {*_SLICE, "comparing"},
    "commands.score": _SLICE,
    "commands.parity": {*_SLICE, "comparing", "engines.server", "pages", "parity"},
    "commands.inspect": {*_SLICE, "compat", "decode", "native"},
    "comparing": {"io", *_EARLIER},
    "parity": {
        "config", "decode", "engines", "engines.server", "models", "native", "process", "transformers", *_EARLIER,
    },
    "pages": {"terminal", *_EARLIER},
    "terminal": {"process", *_EARLIER},
    "io": {"config.check", "config.names", *_EARLIER},
    "engines": {"config", "decode", "kernels", "models", "native", "strategies", "transformers", *_EARLIER},
    "engines.server": {"config", "engines", "io", "models.tokenizer_alone", *_EARLIER},
    "engines.pool": {
        "process", "config", "decode.step_costs", "engines", "kernels", "models", "native", *_EARLIER,
    },
    "config": {"params"},
    "strategies": {"compat", "config.modes", "decode", "events", "kernels", "params"},
    "models": {"process", "compat", "config.names", "decode", "events", "kernels", "native", "params"},
    "transformers": {"process", "compat", "decode", "models.architectures", "models.packed_layers"},
    "native": {"compat", "config.names", "decode", "kernels"},
    "decode": {"compat", "config.check", "config.listed_knobs", "events", "kernels", "params"},
}  # fmt: skip
HEAVY = {
    "torch": {
        "commands.inspect", "commands.parity", "commands.run", "compat", "decode", "engines.pool", "engines",
        "kernels", "lm_eval", "models", "native", "parity", "strategies", "transformers", "tree",
    },
    "transformers": {"commands.inspect", "decode", "models", "transformers"},
    "rich": {
        "commands", "commands.chat", "commands.compare", "commands.explore", "commands.inspect",
        "commands.parity", "commands.run", "commands.score", "terminal",
    },
    "tomli": {"config"},
    "pydantic_core": {"config"},
    "ray": {"engines.pool"},
    "typer": {"commands"},
    "httpx2": {"engines.server"},
    "prompt_toolkit": {"commands.chat"},
    "textual": {"commands.explore"},
}  # fmt: skip


@cache
def imports(path: Path) -> list[str]:
    """Every module that a file imports, anywhere in it."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [_imported(node.module, alias.name) for alias in node.names]
    return found


def _imported(module: str, name: str) -> str:
    whole = f"{module}.{name}"
    is_file = (PACKAGE.parent / whole.replace(".", "/")).with_suffix(".py").is_file()
    return whole if is_file or module == "genctl" else module


def room_of(path: Path) -> str:
    """The room of a file; each command and each kind of engine has its own."""
    parts = path.relative_to(PACKAGE).parts
    deep = 2 if parts[0] in ("commands", "engines") and len(parts) > 2 else 1
    return ".".join(parts[:deep]).removesuffix(".py")


def is_in(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) not in ("__init__", "__main__")]


def test_a_room_imports_only_what_it_may() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        allowed = ALLOWED.get(room, set()) | {room, "errors", "config.reader", "config.shapes"}
        for name in imports(path):
            top, _, rest = name.partition(".")
            inside = top == "genctl" and rest
            if (inside and not any(is_in(rest, other) for other in allowed)) or room not in HEAVY.get(top, {room}):
                wrong.append(f"{path.relative_to(PACKAGE)} ({room}) imports {name}")
    assert wrong == []


def folder_of(path: Path) -> str:
    """The folder of a file, or the file itself at the top."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) or parts[0]


@pytest.mark.parametrize("place_of", [folder_of, str], ids=["folders", "files"])
def test_no_import_leads_back(place_of: Callable[[Path], str]) -> None:
    """Imports in functions and for types count too."""
    paths = {".".join(("genctl", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    leads: dict[str, set[str]] = {}
    for path in FILES:
        tree = nodes_of(path)
        for node in (node for node in tree if isinstance(node, ast.ImportFrom)):
            for alias in node.names:
                found = paths.get(f"{node.module}.{alias.name}") or paths.get(f"{node.module}")
                if found is not None and place_of(found) != place_of(path):
                    leads.setdefault(place_of(path), set()).add(place_of(found))
    assert len(leads) > 20
    TopologicalSorter(leads).prepare()  # raises CycleError, which names the cycle


def test_the_protocol_of_engines_knows_no_engine() -> None:
    known = {name for name in imports(PACKAGE / "engines" / "protocol.py") if is_in(name, "genctl")}
    assert known == {"genctl.config.layers", "genctl.errors", "genctl.events", "genctl.params"}


def test_what_needs_no_model_imports_no_torch() -> None:
    """One process for all of them: a module that one imports is still there for the next."""
    code = (
        "import sys; from genctl.commands.app import run\n"
        "assert not {'torch', 'rich'} & set(sys.modules)\n"
        "for line in ('--help', 'help run', '--version', '--skill', 'help tokens', 'presets list'):\n"
        "    assert run(line.split()) == 0, line\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "    assert not heavy, f'{line} imports {heavy}'\n"
        "assert run(['models', '-v']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_options_are_read_without_pydantic() -> None:
    arguments = ["run", "-m", "./nowhere", "--format", "jsonl", "--no-do-sample", "--batch-size", "2", "Once"]
    code = (
        "import sys; from genctl.commands.app import run; status = run(sys.argv[1:]);"
        "assert status == 3, status; sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False).returncode == 0


def test_the_tiers_name_tests_that_are_there() -> None:
    tests = Path(__file__).parent
    assert [name for name in tiers.WIDE if not (tests / name).is_file()] == []
    functions = {name: functions_of(tests / name) for name in tiers.WIDE}
    assert [f"{name}::{one}" for name, found in tiers.WIDE.items() for one in found if one not in functions[name]] == []


def test_no_folder_is_without_an_everyday_test() -> None:
    tests = Path(__file__).parent
    files = sorted(tests.rglob("test_*.py"))
    everyday = {
        path.parent
        for path in files
        if functions_of(path) - {one for one, stays in tiers.WIDE.get(tiers.name_of(path), {}).items() if not stays}
    }
    assert {path.parent for path in files} - everyday == set()


def functions_of(path: Path) -> set[str]:
    """The names of the tests of a file, except those that run only at night."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            found |= set() if "pytest.mark.night" in map(ast.unparse, node.decorator_list) else {node.name}
    return found


def test_every_fault_that_is_planted_has_its_place() -> None:
    """For `scripts/mutants.py`: if code changes, its faults must change with it."""
    planted = [fault.planted(fault.path.read_text(encoding="utf-8")) for fault in mutants.faults()]
    assert len(planted) >= 50
    tests = {test for fault in mutants.faults() for test in fault.tests}
    assert [test for test in tests if not (PACKAGE.parent / test).exists()] == []


@cache
def attributes(path: Path) -> set[str]:
    """The names of all attributes that a file reads."""
    return {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)}


def idle_knobs(files: list[Path]) -> set[str]:
    """Generation knobs that are in no list, and that none of the files reads."""
    rows = [*(row.knobs for row in listed_knobs.PROCESSORS.values()), *listed_knobs.CRITERIA.values()]
    listed = {knob for row in rows for knob in row}
    return set(knobs(Generation)) - listed - set().union(*map(attributes, files))


def test_every_knob_has_a_row_or_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    single = {"mbr_utility"}  # it has one value
    idle = idle_knobs(FILES) - single
    assert not idle, (
        f"{', '.join(sorted(idle))}: a flag that does nothing. A knob of a processor needs a row in "
        "listed_knobs.PROCESSORS; one of a stopping criterion a row in listed_knobs.CRITERIA; any other is read as "
        "generation.NAME"
    )
    rows = {name: row for name, row in listed_knobs.PROCESSORS.items() if name != "top_p"}
    monkeypatch.setattr(listed_knobs, "PROCESSORS", rows)
    assert "top_p" in idle_knobs([path for path in FILES if "processors" not in path.parts])


def missing_parts(row: listed_knobs.ProcessorRow) -> list[str]:
    """What a processor lacks, in sentences that say what to do."""
    place = f"listed_knobs.PROCESSORS {row.name}"
    missing = [
        f"{place}: add the knob {knob} to params.Generation: without it there is no flag"
        for knob in row.knobs
        if knob not in knobs(Generation)
    ]
    file, _, function = row.maker.partition(".")
    try:
        inspect.signature(maker_of(row)).bind("context", "value")
    except (AttributeError, TypeError):
        missing.append(f"{place}: write {function}(context, value) in decode/processors/{file}.py")
    return missing


def test_every_processor_has_its_knobs_and_its_function() -> None:
    assert [sentence for row in listed_knobs.PROCESSORS.values() for sentence in missing_parts(row)] == []
    row = listed_knobs.ProcessorRow("x", "a paper", "samplers.x", ("x_factor",), reads="scores")
    assert missing_parts(row) == [
        "listed_knobs.PROCESSORS x: add the knob x_factor to params.Generation: without it there is no flag",
        "listed_knobs.PROCESSORS x: write x(context, value) in decode/processors/samplers.py",
    ]


def test_every_output_format_is_a_key() -> None:
    assert get_args(Format) == tuple(FORMATS), "a format is one value of writers.Format and one key of writers.FORMATS"
    with pytest.raises(UsageError, match="unknown output format 'xml': expected one of text, json, jsonl, tsv"):
        open_writer("xml", Unclosed(), on_error=lambda record: None)


def test_no_command_offers_a_format_that_nobody_writes() -> None:
    offered = {}
    for name, (place, _) in COMMANDS.items():
        module, _, attribute = place.partition(":")
        command = getattr(import_module(module), attribute)
        if isinstance(command, Command) and "format" in (hints := get_type_hints(command.options)):
            offered[name] = {choice for choice in get_args(hints["format"]) if isinstance(choice, str)}
    assert {"run", "score", "compare", "inspect-cache", "models"} <= set(offered)
    assert offered["score"] == set(writers.SCORE_FORMATS), "score writes other records"
    unknown = {name: some - set(FORMATS) for name, some in offered.items()}
    assert {name: some for name, some in unknown.items() if some} == {}, "writers.FORMATS has no such format"
