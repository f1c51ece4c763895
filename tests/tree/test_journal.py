"""The file of a tree: cut anywhere, opened by two, of another checkpoint, damaged, foreign."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from genctl.errors import GenctlError, InputError, OutputError, UsageError
from genctl.tree.beside import Second
from genctl.tree.explorer import Explorer
from genctl.tree.journal import Differs, new_file, read_tree
from genctl.tree.language import COMMANDS
from genctl.tree.nodes import Tree
from tests.tree.trees import PROMPT, explorer, stories

SCRIPT = ["generate 3", "left 2", "take 2 2", "start", "sample 2 3", "set temperature=0.7", "beams 2 2", "edit  cat",
          "undo", "expand mass=0.3,depth=2"]  # fmt: skip


def saved(path: Path, lines: list[str]) -> Tree:
    made = explorer(path)
    for line in lines:
        made.all(line)
    made.close()
    return made.tree


@pytest.mark.parametrize("count", range(1, len(SCRIPT) + 1))
def test_a_command_that_was_killed_is_finished_with_equal_bytes(count: int, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tree = saved(whole, SCRIPT[:count])
    content = whole.read_bytes()
    (tmp_path / "before").unlink(missing_ok=True)
    saved(tmp_path / "before", SCRIPT[: count - 1])
    begin = (tmp_path / "before").stat().st_size
    ends = [place for place in range(begin + 1, len(content)) if content[place - 1 : place] == b"\n"]
    for end in {*ends, *(each + 7 for each in ends), *(each - 1 for each in ends)}:
        cut.write_bytes(content[:end])
        again = Explorer.reopen(stories(), cut)
        unfinished = bool(again.space.journal and again.space.journal.unfinished)
        assert unfinished == (any(each <= end for each in ends))
        list(again.resume())
        again.close()
        if unfinished:
            assert cut.read_bytes() == content
            assert again.tree == tree
        cut.unlink()


BEFORE = ["generate 3", "left 1", "take 2 1", "bookmark m1"]
# every command, with arguments that let it do something where it can
EVERY = {
    "left": "left 2", "right": "right", "up": "up", "down": "down", "start": "start", "end": "end", "goto": "goto m1",
    "next": "next 0", "previous": "previous 0", "take": "take 3 1", "generate": "generate 2", "sample": "sample 2 2",
    "beams": "beams 2 2", "edit": "edit  cat", "expand": "expand mass=0.2,depth=2", "undo": "undo", "redo": "redo",
    "set": "set top_k=3", "preset": "preset greedy", "reset": "reset", "bookmark": "bookmark here", "show": "show",
    "find": "find a", "why": "why", "layers": "layers", "compare": "compare m1", "beside": "beside", "text": "text",
    "copy": "copy", "repeat": "repeat",
}  # fmt: skip
READS = {"show", "find", "why", "layers", "compare", "beside", "text", "copy", "repeat"}
# what comes before it, so that it has something to do
MOMENTS = {
    "goto": ["start"],
    "next": ["start"],
    "redo": ["undo"],
    "right": ["start"],
    "end": ["start"],
    "up": ["goto 2"],
    "down": ["goto 2"],
    "reset": ["set top_k=3"],
}


def test_every_command_is_killed_below_or_writes_nothing(tmp_path: Path) -> None:
    assert set(EVERY) == set(COMMANDS)
    made = explorer(tmp_path / "t")
    for line in BEFORE:
        made.all(line)
    content = (tmp_path / "t").read_bytes()
    made.second = Second(made.space, knobs={"top_k": 3})
    for name in sorted(READS):
        made.all(EVERY[name])
        assert (tmp_path / "t").read_bytes() == content, name
    made.close()


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - READS))
def test_a_kill_at_each_line_of_a_command_ends_with_equal_bytes(name: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    made = explorer(whole)
    for line in [*BEFORE, *MOMENTS.get(name, [])]:
        made.all(line)
    begin = whole.stat().st_size
    made.all(EVERY[name])
    made.close()
    content = whole.read_bytes()
    assert len(content) > begin, "it writes nothing here, so nothing is tested"
    ends = [place + 1 for place in range(begin, len(content)) if content[place : place + 1] == b"\n"]
    for end in (begin, *ends):
        cut.write_bytes(content[:end])
        again = Explorer.reopen(stories(), cut)
        list(again.resume())
        if end == begin:  # nothing of it was written
            again.all(EVERY[name])
        again.close()
        assert cut.read_bytes() == content
        assert again.tree == made.tree
        cut.unlink()


def test_no_byte_of_the_last_lines_is_a_bad_place_to_die(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    saved(whole, ["generate 2", "take 2 1"])
    content = whole.read_bytes()
    lines = content.splitlines(keepends=True)
    for end in range(len(b"".join(lines[:-3])), len(content) + 1):
        cut.write_bytes(content[:end])
        before = len([None for number in range(len(lines)) if len(b"".join(lines[: number + 1])) <= end])
        tree = read_tree(cut)
        assert len(tree) == sum(b'"grown"' in line for line in lines[:before])  # at most the line at work is lost
        if end % 9 == 0:
            Explorer.reopen(stories(), cut).close()
            assert cut.read_bytes() == b"".join(lines[:before])


def test_a_file_without_its_first_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    saved(path, [])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="it has no whole line"):
        read_tree(path)


def test_a_killed_process_loses_one_token_at_most(tmp_path: Path) -> None:
    path = tmp_path / "t"
    code = (
        "import sys; from pathlib import Path; from tests.tree.trees import explorer\n"
        "made = explorer(Path(sys.argv[1]))\n"
        "for number, result in enumerate(made.do('generate 40')):\n"
        "    print(number, flush=True)\n"
        "    sys.stdin.readline() if number == 5 else None\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != b"5":
            pass
        os.kill(process.pid, signal.SIGKILL)
    again = Explorer.reopen(stories(), path)
    assert len(again.tree) == 6
    list(again.resume())
    again.close()
    whole = tmp_path / "whole"
    saved(whole, ["generate 40"])
    assert path.read_bytes() == whole.read_bytes()


def test_a_tree_is_open_once(tmp_path: Path) -> None:
    made = explorer(tmp_path / "t")
    with pytest.raises(UsageError, match="another run is at work on"):
        Explorer.reopen(stories(), tmp_path / "t")
    made.close()
    Explorer.reopen(stories(), tmp_path / "t").close()


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    saved(tmp_path / "t", [])
    with pytest.raises(OutputError, match="exists already") as error:
        explorer(tmp_path / "t")
    assert "--open" in error.value.hint


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    saved(path, ["generate 1"])
    lines = path.read_text().splitlines(keepends=True)
    opened = json.loads(lines[0]) | {"checkpoint": "sha256:" + "0" * 64, "model": "other/model"}
    path.write_text(json.dumps(opened) + "\n" + "".join(lines[1:]))
    with pytest.raises(
        InputError, match=r"was made with other/model \(000000000000…\), and builtin:stories is another"
    ):
        Explorer.reopen(stories(), path)
    path.write_text("".join(lines))
    Explorer.reopen(stories(), path).close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"nothing\n", "is damaged at line 3"),
        (b'{"event": "grown", "node": 9, "parent": 0, "id": 4, "logprob": -1.0}\n', "node 9 follows node 0"),
        (b'{"event": "grown", "node": 1, "parent": 7, "id": 4, "logprob": -1.0}\n', "node 7 is not there"),
        (b'{"event": "grown", "node": 1, "parent": 0, "id": 4, "logprob": -1.0, "settings": 3}\n', "has settings 3"),
        (b'{"event": "grown", "node": 1, "parent": 0, "id": "4", "logprob": -1.0}\n', "expected a whole number"),
        (b'{"event": "grwn", "node": 1}\n', "did you mean grown"),
        (b'{"event": "undone"}\n{"event": "undone"}\n', "nothing is left to undo"),
        (b'{"event": "settled", "cursor": 12}\n', "node 12 is not there"),
        (b'{"event": "opened", "schema": "genctl-tree/1", "model": "", "checkpoint": "", "prompt": "", '
         b'"prompt_ids": [], "seed": 1}\n', "a tree has one beginning"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_and_left_alone(line: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    saved(path, [])
    content = path.read_bytes() + b'{"event": "begun", "line": "x", "step": true}\n' + line
    path.write_bytes(content)
    for read in (read_tree, lambda path: Explorer.reopen(stories(), path)):
        with pytest.raises(InputError, match=words):
            read(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"hello\n", b"[]\n", b'{"event": "began"}\n', b"\xff\xfe\n", b"{" * 99999])
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not the file of a tree"):
        read_tree(path)


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    saved(path, [])
    path.write_text(path.read_text().replace("genctl-tree/1", "genctl-tree/2"))
    with pytest.raises(InputError, match="of another version of genctl: 'genctl-tree/2'"):
        read_tree(path)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_regular_file_is_refused(make: object, tmp_path: Path) -> None:
    path = tmp_path / "t"
    make(path)  # type: ignore[operator]
    with pytest.raises(GenctlError, match=r"not a regular file|Is a directory|is a link"):
        Explorer.reopen(stories(), path)


def test_what_does_not_come_out_the_same_is_left_as_the_file_has_it(tmp_path: Path) -> None:
    path = tmp_path / "t"
    saved(path, ["generate 4"])
    lines = path.read_text().splitlines(keepends=True)
    third = json.loads(lines[4]) | {"id": 99, "text": " another"}
    path.write_text("".join([*lines[:4], json.dumps(third) + "\n"]))
    content, tree = path.read_bytes(), read_tree(path)
    again = Explorer.reopen(stories(), path)
    with pytest.raises(Differs, match="does not come out the same"):
        list(again.resume())
    assert path.read_bytes() == content
    assert again.tree == tree
    again.all("generate 1")
    again.close()
    assert read_tree(path) == again.tree


def test_a_command_that_is_interrupted_while_it_comes_again_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t"
    saved(path, ["generate 6"])
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    content = path.read_bytes()
    again = Explorer.reopen(stories(), path)
    again.interrupted = lambda: "interrupted"
    list(again.resume())
    again.close()
    assert path.read_bytes() == content + b'{"event": "settled"}\n'
    assert read_tree(path) == again.tree
    assert again.tree.depths[again.tree.cursor] == 5


def test_the_folder_of_sessions_is_that_of_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = new_file("explore", PROMPT)
    assert first.parent == tmp_path / "genctl" / "sessions"
    assert first.parent.is_dir()
    assert first.name.endswith("-explore-once-upon-a-time.jsonl")
    first.touch()
    assert new_file("explore", PROMPT) != first
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert new_file("chat", "Ünïcode?").parent == tmp_path / "home" / ".local" / "state" / "genctl" / "sessions"
