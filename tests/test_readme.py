"""The fenced blocks of README.md and docs/*.md run and print what the pages show; links and tables are right."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

from genctl.commands.app import COMMANDS
from genctl.errors import Exit
from genctl.models import resolve
from tests.cli.tool import genctl
from tests.commands.chat import templates
from tests.commands.parity.test_pytest_plugin import run as run_pytest
from tests.document_blocks import (
    LANGUAGES,
    PAGES,
    ROOT,
    TEXTS,
    Block,
    at_a_pipe,
    at_a_terminal,
    blocks,
    printed_by,
    unknown_flags,
)
from tests.engines.server.stand_in import running
from tests.models.hub_standin import serve

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("clean_environment")

BLOCKS = blocks()
SHORT = ("presets", "report", "models")  # commands without --help-all
PROMPTS = ("Once upon a time", "One day")


def in_language(*languages: str) -> pytest.MarkDecorator:
    found = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=str)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader of the pages: a checkpoint, prompts, and the example from docs."""
    place = tmp_path / "reader"
    place.mkdir()
    (place / "model").symlink_to(Path(resolve.resolve("builtin:stories").folder))
    (place / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    for example in (ROOT / "docs").glob("*.py"):
        shutil.copy(example, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(place))
    return place


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The services that commands use: environment variables that name a Hub, and the address of a server."""
    root = tmp_path_factory.mktemp("world")
    chats = templates.stories(root / "chats", templates.CHATML)
    with serve({"Qwen/Qwen2.5-0.5B-Instruct": chats}) as hub, running() as server:
        yield {"HF_ENDPOINT": hub.url, "HF_HOME": str(root / "home"), "SERVER": server.url.removeprefix("openai:")}


def test_every_block_has_a_language_that_is_checked() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert len(BLOCKS) > 50
    stated = [line for text in TEXTS.values() for line in re.findall(r"^\$ .+$", text, re.MULTILINE)]
    consoles = [block for block in BLOCKS if block.language.startswith("console")]
    assert [f"$ {command}" for block in consoles for command, _ in block.commands] == stated


def test_a_shown_figure_that_the_command_does_not_print_is_found() -> None:
    block = Block("page", 1, "console", "$ genctl x\none 1.5\n", varying=("2.1e-05",))
    block.check("one 1.5\n", ["one 1.5"])
    block.check("a tie below 1.3e-06 nats", ["a tie below 2.1e-05 nats"])
    block.check("zero\none 1.5\ntwo\n", ["…", "one 1.5", "…"])
    for printed, shown in (("one 1.6", ["one 1.5"]), ("one 1.5\ntwo", ["one 1.5"]), ("one 1.52", ["…", "one 1.5"])):
        with pytest.raises(AssertionError, match=r"page-1: shown"):
            block.check(printed, shown)
    assert unknown_flags("torchrun --no-python genctl run -m X --tensor-parallel --fdsp=1 'a --b'") == ["--fdsp"]
    assert unknown_flags("genctl rum X") == ["rum"]


@in_language("console")
def test_a_console_block_prints_what_the_page_shows(block: Block, folder: Path) -> None:
    """One command after the other: a block creates the files that it reads."""
    for command, shown in block.commands:
        done = at_a_pipe(command, folder)
        assert done.status == 0, f"{command}: {done.err}"
        assert "error" not in done.err, command
        writes = re.search(r" -o | > |^genctl report ", command)
        assert done.out or writes, command
        block.check(done.out, shown)


@in_language("console terminal")
def test_a_terminal_shows_what_the_page_shows(block: Block, folder: Path, world: dict[str, str]) -> None:
    if ".gguf" in block.text:
        from tests.models.test_gguf import written

        written(folder / "model.gguf")
    environment = {**world, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    for command, shown in block.commands:
        asked = command.replace("http://localhost:8000", world["SERVER"])
        status, screen = at_a_terminal(asked, shown, folder / "state", **environment)
        assert status == 0, f"{command}:\n{screen}"
        assert "error:" not in screen, f"{command}:\n{screen}"
        assert screen, command
        block.check(screen, shown)


@in_language("sh", "yaml")
def test_commands_that_need_more_than_a_machine_have_flags_that_exist(block: Block) -> None:
    assert [(line, flags) for line in block.shell_lines if (flags := unknown_flags(line))] == []


@pytest.mark.parametrize("name", TEXTS)
def test_commands_in_sentences_have_flags_that_exist(name: str) -> None:
    prose = re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.MULTILINE | re.DOTALL)
    commands = re.findall(r"`((?:uvx )?genctl [a-z][^`]+)`", prose)
    assert [(command, flags) for command in commands if (flags := unknown_flags(command))] == []


@in_language("python")
def test_every_python_example_runs(block: Block, folder: Path, pytester: pytest.Pytester) -> None:
    if "def test_" not in block.text:
        assert printed_by(block.text)
        return
    (pytester.path / "model").symlink_to(folder / "model")
    pytester.makepyfile(block.text)
    for way in ("--genctl-update", "-q"):
        run_pytest(pytester, way).assert_outcomes(passed=block.text.count("def test_"))


@in_language("json", "toml")
def test_examples_of_files_can_be_read(block: Block) -> None:
    assert tomli.loads(block.text) if block.language == "toml" else json.loads(block.text)


def test_the_order_of_processors_is_the_one_that_runs() -> None:
    from genctl.config.listed_knobs import PROCESSORS

    section = TEXTS["presets.md"].split("## Logits processors")[1].split("| processor |")[0]
    arrows = "→".join(line for line in section.splitlines() if "→" in line or line.startswith("`"))
    names = [name for name in re.findall(r"`(\w+)`", arrows)]
    expected = [entry.name for entry in PROCESSORS.values()]
    assert names[: len(expected)] == expected


def test_exit_statuses_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", TEXTS["records.md"], re.MULTILINE)
    stated = {int(number) for row in rows for number in row.split(",")}
    assert stated == {int(code) for code in Exit} | {143}


def test_the_page_for_agents_is_that_of_the_program() -> None:
    """It has every command, status and kind of output; every option and message on it exists in the program."""
    page = TEXTS["skill.md"]
    assert genctl("--skill").out == page
    assert len(page.splitlines()) <= 80
    assert {*re.findall(r"^\| `genctl ([\w-]+)` \|", page, re.MULTILINE)} == set(COMMANDS)
    statuses = re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
    assert {int(number) for row in statuses for number in row.split(",")} == {int(code) for code in Exit} | {129, 143}
    options = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", page))
    helps = [(), *((name, "--help" if name in SHORT else "--help-all") for name in COMMANDS)]
    everything = "".join(genctl(*(words or ("--help",))).out for words in helps)
    assert len(options) > 30
    assert [flag for flag in options if not re.search(rf"(?<![\w-]){flag}(?![\w-])", everything)] == []
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "genctl").rglob("*.py"))
    messages = re.findall(r"^\| `([^`]+)` \|", page.partition("## After an error")[2], re.MULTILINE)
    assert len(messages) > 7
    assert [message for message in messages if message not in source] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for target in re.findall(r"\]\(([^)#]+)", TEXTS[page.name]):
        ours = re.fullmatch(re.escape(project["urls"]["Source"]) + r"/(?:raw|blob)/main/(.+)", target)
        place = ROOT / ours[1] if ours else page.parent / target
        assert place.exists() or (target.startswith("https://") and not ours), target


def test_the_readme_is_short_and_its_speeds_are_those_of_the_whole_table() -> None:
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 150
    rows = [line for line in text.splitlines() if line.startswith("| GPT-2") or line.startswith("| T5")]
    assert len(rows) == 7
    measured = re.search(r"<!-- bench:begin -->\n\n([\d-]+); (AMD EPYC) .*?, 2 cores", TEXTS["performance.md"])
    assert measured is not None
    assert f"on {measured[1]} with two cores of an {measured[2]}" in text
    whole = {line.split(" | ")[0]: line.strip("| ").split(" | ") for line in TEXTS["performance.md"].splitlines()}
    for row in rows:
        work, *speeds = row.strip("| ").split(" | ")
        assert speeds == whole[f"| {work}"][2:6], work


def test_the_events_section_has_the_fields_of_every_event() -> None:
    from genctl import events

    parts = {"a row": events.Row, "a token": events.Token, "a trace": events.Trace, "a hypothesis": events.Hypothesis}
    section = TEXTS["records.md"].split("\n## Events")[1].split("\n## ")[0]
    stated = dict(re.findall(r"^\| `?([^`|]+?)`? \| (.+) \|$", section, re.MULTILINE))
    for name, kind in (events.KINDS | parts).items():
        fields_cell = re.sub(r"\([^)]*\)", "", stated[name]).split(";")[0]
        assert re.findall(r"`(\w+)`", fields_cell) == [field.name for field in dataclasses.fields(kind)], name
    assert stated.keys() == events.KINDS.keys() | parts.keys() | {"event", "part"}
