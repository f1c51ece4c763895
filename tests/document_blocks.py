"""The fenced blocks of README.md, docs/*.md and skill.md: their languages, commands and outputs.

`console`: commands that run in order in one folder, with their output to a pipe. `console terminal`: the same in a
terminal of 80 columns, with the user's input after `> `. A line `…` stands for omitted output. `sh`: commands that
need a network, a cluster or a checkpoint of one's own: only their flags are checked. `python`: is run. `json`, `toml`
and `yaml` are parsed; `diff` is a commit, `text` a formula or a layout.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from genctl.commands.app import COMMANDS
from tests.cli.tool import Done, genctl
from tests.commands.chat.talk import Talk

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "genctl" / "commands" / "skill.md"]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
LANGUAGES = {"console", "console terminal", "sh", "python", "json", "toml", "yaml", "diff", "text"}
LEFT_OUT = "…"
KEYS = {"explore": "q", "chat": "\x04"}  # the key that ends an interactive program


@dataclass(frozen=True)
class Block:
    """A fenced block: `line` is that of the fence, from 1; `varying` are figures marked as varying by machine."""

    page: str
    line: int
    language: str
    text: str
    varying: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}-{self.line}"

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command after `$ `, and the lines of its output."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not parts[0], f"{self}: a block begins with a command"
        return [(command, shown.splitlines()) for command, _, shown in (part.partition("\n") for part in parts[1:])]

    @property
    def shell_lines(self) -> list[str]:
        """The lines that begin with a program, continued ones joined; of YAML those that a step runs."""
        steps = re.findall(r"- run: (.+)", self.text) if self.language == "yaml" else [self.text]
        return [line for step in steps for line in step.replace("\\\n", " ").splitlines()]

    def check(self, printed: str, shown: list[str]) -> None:
        """Assert that a command printed what the page shows: all of it, or the part between two `…`."""
        if shown:
            wanted = "\n".join(line.rstrip() for line in shown if line != LEFT_OUT)
            pattern = re.escape(wanted)
            for figure in self.varying:
                pattern = pattern.replace(re.escape(figure), r"[\d.,e+-]+")
            before, after = (".*^" if shown[0] == LEFT_OUT else ""), ("$.*" if shown[-1] == LEFT_OUT else "")
            lines = "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n")
            whole = f"{before}{pattern}{after}"
            assert re.fullmatch(whole, lines, re.MULTILINE | re.DOTALL), f"{self}: shown\n{wanted}\nprinted\n{lines}"


def blocks() -> list[Block]:
    """All blocks of all pages."""
    found = []
    for name, text in TEXTS.items():
        varying = tuple(re.findall(r"`([^`]+)`", " ".join(re.findall(r"Varies by machine: (.*?`)\.", text, re.DOTALL))))
        for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(name, line, match[1], match[2], varying))
    return found


def at_a_pipe(command: str, folder: Path) -> Done:
    """Run a pipeline in `folder`, which is the current one: genctl in this process, all other commands in bash."""
    parts = re.split(r" \| ", re.sub(r"\s+#.*", "", command))
    ours = next((at for at, part in enumerate(parts) if part.startswith("genctl ")), None)
    if ours is None:
        return Done(0, in_bash(command, folder), "")
    before, after = " | ".join(parts[:ours]), " | ".join(parts[ours + 1 :])
    done = genctl(*shlex.split(parts[ours])[1:], stdin=in_bash(before, folder) if before else None)
    return Done(done.status, in_bash(after, folder, done.raw), done.err) if after else done


def in_bash(command: str, folder: Path, content: bytes = b"") -> bytes:
    """The output of a command line without genctl."""
    assert "genctl" not in command, command
    return subprocess.run(["bash", "-euc", command], cwd=folder, input=content, capture_output=True, check=True).stdout


def at_a_terminal(command: str, shown: list[str], state: Path, **environment: str) -> tuple[int, str]:
    """Run one in a terminal, with the folder `state`, and type the `> ` lines of `shown`; its status and screen."""
    program, name, *words = shlex.split(command.removeprefix("uvx "), comments=True)
    assert program == "genctl", command
    with Talk(state, *words, command=name, height=160, **environment) as talk:
        if name in KEYS:
            talk.wait(lambda: talk.screen.cursor.x == 2 if name == "chat" else len(talk.lines) > 5)
            for line in shown:
                if line.startswith("> "):
                    talk.say(line[2:])
            before = talk.lines[:-1] if name == "chat" else talk.lines
            talk.press(KEYS[name])
            return talk.end(), "\n".join(before)
        return talk.end(), "\n".join(talk.lines)


def printed_by(code: str) -> str:
    """Run a Python example, and return its output."""
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def unknown_flags(line: str) -> list[str]:
    """The flags of a command line that its command does not have."""
    found = re.search(r"(?:^|^uvx (?:.* )?|--no-python )genctl ([\w-]+)(.*)", line)
    if found is None or found[1] == "help":
        return []
    if found[1] not in COMMANDS:
        return [found[1]]
    flags = {word.partition("=")[0] for word in shlex.split(found[2], comments=True) if re.match(r"--?[a-z]", word)}
    listed = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", genctl(found[1], "--help-all").out))
    return sorted(flag for flag in flags - listed if "no such option" in genctl(found[1], flag, "--help").err)
