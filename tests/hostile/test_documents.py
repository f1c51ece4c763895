"""Something else in place of every file that a command reads: one error line, in bounded time and memory.

`READERS` are the commands and the flags that name a file, `FORMS` what lies there. A pipe that nobody writes to is
waited for as long as `reader.SILENCE_S` says, which is a moment here.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from genctl.commands.parity import golden_file
from genctl.commands.recording import read_recording
from genctl.config import reader
from genctl.config.reader import DEEPEST, Unreadable
from genctl.errors import GenctlError
from tests.cli.tool import Done, genctl, ok

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")

STORIES = ("-m", "builtin:stories")
PROMPT = ("Once upon", *STORIES, "-n", "2")

# what reads a file FILE; `{}` is its name
READERS: dict[str, tuple[str, ...]] = {
    "report": ("report", "{}", "-o", "page.html"),
    "explore --open": ("explore", "--open", "{}", "--expand", "depth=1"),
    "explore --script": ("explore", "Once upon", *STORIES, "--script", "{}"),
    "chat --open": ("chat", "--open", "{}", *STORIES, "-i", os.devnull),
    "compare --references": ("compare", *PROMPT, "-p", "greedy", "-p", "nucleus", "--references", "{}"),
    "parity --expect": ("parity", "builtin:stories", "--expect", "{}"),
    "--template": ("run", *PROMPT, "--template", "@{}"),
    "--json-schema": ("run", *PROMPT, "--json-schema", "{}"),
    "--grammar": ("run", *PROMPT, "--grammar", "{}"),
    "--prompt-cache": ("run", *PROMPT, "--prompt-cache", "{}"),
    "--preset": ("run", *PROMPT, "-p", "{}"),
    "presets show": ("presets", "show", "{}"),
    "presets check": ("presets", "check", "{}"),
    "a model in one file": ("run", "Once upon", "-m", "{}"),
}
NAMES = {"--preset": "f.toml", "presets show": "./f.toml", "presets check": "./f.toml", "a model in one file": "f.gguf"}
LINES = {"compare --references", "--template", "explore --script"}  # any text will do


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(4 << 30)


def endless_line(path: Path) -> None:
    with path.open("wb") as file:
        for _ in range(66):
            file.write(b"x" * (1 << 20))


def forbidden(path: Path) -> None:
    path.write_text("{}\n")
    path.chmod(0)


LARGE: dict[str, Callable[[Path], object]] = {
    "a sparse file of 4 GiB": sparse,
    "a line without end": endless_line,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "another endless device": lambda path: path.symlink_to("/dev/urandom"),
}
FORMS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a pipe that nobody writes to": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("gone"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a file without permission": forbidden,
    "no UTF-8": lambda path: path.write_bytes(b'{"a": "\xff\xfe"}\n'),
    "UTF-16": lambda path: path.write_bytes('{"a": 1}\n'.encode("utf-16")),
    "a byte order mark": lambda path: path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n'),
    "deep lists": lambda path: path.write_text("[" * 100_000 + "\n"),
    "deep objects": lambda path: path.write_text('{"a":' * 100_000 + "\n"),
    "NaN": lambda path: path.write_text('{"a": NaN}\n'),
    "infinity": lambda path: path.write_text('{"a": -Infinity}\n'),
    "a number beyond floats": lambda path: path.write_text('{"a": 1e999}\n'),
    "a number of 5000 digits": lambda path: path.write_text('{"a": ' + "9" * 5000 + "}\n"),
    "a key twice": lambda path: path.write_text('{"a": 1, "a": 2}\n'),
    "an empty file": lambda path: path.write_bytes(b""),
    "an empty line": lambda path: path.write_bytes(b"\n"),
    "null": lambda path: path.write_text("null\n"),
    "a list": lambda path: path.write_text("[1, 2]\n"),
    "a NUL": lambda path: path.write_bytes(b"\0\0\0\n"),
}
TEXTS = {"no UTF-8", "UTF-16"}  # what no reader of text takes
# what these commands may take: an empty script, no results, a schema after a byte order mark
TAKEN = {
    "--json-schema": {"a byte order mark"},
    "explore --script": {"an empty file", "an empty line"},
    "--preset": {"an empty file", "an empty line"},
    "presets show": {"an empty file", "an empty line"},
    "presets check": {"an empty file", "an empty line"},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reader, "SILENCE_S", 0.05)


def made(name: str, make: Callable[[Path], object]) -> tuple[str, ...]:
    """The command line of a reader, after the file is made in a folder of its own."""
    folder = Path(f"{len(list(Path().iterdir()))}")
    folder.mkdir()
    file = folder / NAMES.get(name, "f")
    make(file)
    word = f"./{file}" if name.startswith(("presets", "--preset")) else str(file)
    return tuple(part.replace("{}", word) for part in READERS[name])


def check_refused(done: Done, what: str) -> None:
    assert done.status in (2, 3), (what, done)
    assert done.out == "", what
    lines = [line for line in done.err.splitlines() if not line.startswith(("hint: ", "note: "))]
    assert lines, what
    for line in lines:
        assert line.startswith("error: "), (what, done.err)
        assert len(line) < 1000, what
    assert len(lines) <= 2, (what, done.err)  # a row that is refused, and what follows from that
    assert "this is a bug" not in done.err, (what, done.err)
    assert "Traceback" not in done.err, what


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_document_is_refused_in_a_line(name: str) -> None:
    for form, make in FORMS.items():
        if form == "a file without permission" and os.geteuid() == 0:
            continue
        done = genctl(*made(name, make), stdin="")
        if name in LINES and not make.__name__.startswith(("mk", "forbid")) and done.status in (0, 1):
            assert "this is a bug" not in done.err
            assert form not in TEXTS
        elif form in TAKEN.get(name, ()):
            assert "this is a bug" not in done.err
        else:
            check_refused(done, form)


MEMORY = 1 << 30  # above what the process has
SECONDS = 30  # of the processor, above what the process has used
PATIENCE = 600.0  # seconds until a process that only waits is ended


def in_little_memory(arguments: list[str]) -> Done:
    """Run a command line in a process of its own, with bounds on its memory and time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run(arguments, writer)
    os.close(writer)
    data, end = b"", time.monotonic() + PATIENCE
    while (left := end - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        data += piece
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    assert data, f"ended without a word, by the processor's time or that of the clock ({status})"
    return Done(raw=b"", **json.loads(data))


def _run(arguments: list[str], writer: int) -> None:
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        spent = int(time.process_time()) + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (spent, spent + 5))
        done = genctl(*arguments)
        os.write(writer, json.dumps({"status": done.status, "err": done.err[:10_000]}).encode())
    finally:
        os._exit(0)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited as on Linux")
@pytest.mark.parametrize("name", READERS)
def test_what_never_ends_is_refused_in_bounded_memory(name: str) -> None:
    for form, make in LARGE.items():
        colour = () if "preset" in name else ("--color", "never")
        done = in_little_memory([*made(name, make), *colour])
        assert done.status in (1, 2, 3), (form, done)
        assert done.err.startswith(("error: ", "note: ")), (form, done)
        for fault in ("this is a bug", "Traceback", "not enough memory", "error: unexpected "):
            assert fault not in done.err, form
        assert len(done.err) < 1500, form
        assert done.err.replace("\n", "").isprintable(), form


def test_prompts_from_an_endless_device_are_refused() -> None:
    for command in (("run",), ("score",), ("explore", "--expand", "depth=1")):
        done = genctl(*command, *STORIES, "-i", "/dev/zero")
        assert (done.status, done.err) == (2, "error: cannot read /dev/zero: a device, not a file\n")


def test_a_line_of_prompts_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from genctl.io import contents

    monkeypatch.setattr(contents, "ENDLESS", 1 << 20)
    Path("long").write_bytes(b"a\n" + b"x" * (3 << 20))
    done = genctl("run", *STORIES, "-n", "1", "-i", "long")
    assert done.status == 2
    assert "error: cannot read long: a line does not end within 1 GiB\n" in done.err


@pytest.mark.parametrize("command", ["compare", "explore", "parity"])
def test_a_command_that_needs_all_prompts_takes_a_bounded_number(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from genctl.io import readers

    monkeypatch.setattr(readers, "MOST_HELD", 3)
    words = {
        "compare": ("compare", *STORIES, "-p", "greedy", "-p", "nucleus"),
        "explore": ("explore", *STORIES, "--expand", "depth=1"),
        "parity": ("parity", "builtin:stories", "builtin:stories"),
    }[command]
    done = genctl(*words, "-i", "-", stdin="a\n" * 9)
    assert (done.status, done.out) == (2, "")
    assert "there are more than 3 prompts" in done.err


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("nothing", "a link to nothing")])
def test_a_golden_file_of_pytest_ends(form: str, tmp_path: Path) -> None:
    path = tmp_path / "golden.jsonl"
    FORMS[form](path)
    if form == "a file without permission" and os.geteuid() == 0:
        return
    with pytest.raises((GenctlError, OSError)):
        golden_file.check(path, "builtin:stories", ["a"])


def written(path: Path) -> bytes:
    ok("run", *PROMPT, "--events", str(path))
    return path.read_bytes()


def test_a_pipe_is_a_document_if_somebody_writes_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SILENCE_S", 20.0)
    content = written(tmp_path / "e.jsonl")
    whole = read_recording(str(tmp_path / "e.jsonl"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for pieces in ([content], [content[:50], content[50:]]):

        def write(pieces: list[bytes] = pieces) -> None:
            with pipe.open("wb", buffering=0) as file:
                for piece in pieces:
                    file.write(piece)

        writer = threading.Thread(target=write)
        writer.start()
        assert read_recording(str(pipe)) == whole
        writer.join()


def test_a_process_substitution_and_a_pipe_on_standard_input_are_read(tmp_path: Path) -> None:
    content = written(tmp_path / "e.jsonl")
    page = tmp_path / "page.html"
    code = "import sys; from genctl.__main__ import main; main()"
    for words in ("report <(cat e.jsonl) -o page.html", "report - -o page.html < <(cat e.jsonl)"):
        command = f"{sys.executable} -c '{code}' {words}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        page.unlink()
    assert genctl("report", "-", "-o", str(page), stdin=content).status == 0
    assert genctl("report", "-", "-o", str(page), "--force", stdin=b"x" * (65 << 20)).err == (
        "error: cannot read standard input: line 1 is longer than 64 MiB, the most that is read\n"
    )


def test_a_pipe_that_stays_open_and_silent_is_given_up(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    try:
        with pytest.raises(Unreadable, match=r"a pipe that brings nothing for 0\.05 s"):
            reader.read(pipe)
        os.write(held, b"half a document")
        with pytest.raises(Unreadable, match=r"a pipe that brings nothing for 0\.05 s"):
            reader.read(pipe)
    finally:
        os.close(held)


def test_the_error_names_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 20)
    with pytest.raises(Unreadable, match="larger than 10 bytes, the most that is read"):
        reader.read(path, 10)
    with pytest.raises(Unreadable, match="line 1 is longer than 10 bytes"):
        list(reader.lines(path, 10))
    path.write_bytes(b"123456789\n" * 3)
    with pytest.raises(Unreadable, match="larger than 25 bytes"):
        list(reader.lines(path, 10, 25))
    path.write_text(json.dumps({"event": "began", "lane": "0", "prompt": "p", "strategy": "s", "settings": {}}) + "\n")
    deep = path.read_text().replace("{}}", '{"a": ' + "[" * 64 + "]" * 64 + "}}")
    path.write_text(path.read_text() + deep)
    assert f"line 2: nested too deeply: more than {DEEPEST} levels" in genctl("report", str(path)).err
