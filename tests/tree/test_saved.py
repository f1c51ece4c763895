"""The file of a tree: cut anywhere, opened by two, of another checkpoint, damaged, foreign."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from genctl.errors import GenctlError, InputError, UsageError
from genctl.io.sessions import new_file
from genctl.tree.token_tree import TokenTree
from tests.tree.trees import PROMPT, explorer, read_tree, reopened

SCRIPT = ["generate 3", "left 2", "take 2 2", "start", "sample 2 3", "set temperature=0.7", "beams 2 2", "edit  cat",
          "undo", "expand mass=0.3,depth=2"]  # fmt: skip


def saved(path: Path, lines: list[str]) -> TokenTree:
    made = explorer(path)
    for line in lines:
        list(made.do(line))
    made.close()
    return made.tree


def test_a_killed_command_loses_one_line_and_the_tree_goes_on(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    saved(whole, SCRIPT)
    content = whole.read_bytes()
    lines = content.splitlines(keepends=True)
    ends = [len(b"".join(lines[:count])) for count in range(1, len(lines) + 1)]
    for count, end in enumerate(ends, 1):
        for more in (0, 7):
            cut.write_bytes(content[: end + more])
            again = reopened(cut)
            assert cut.read_bytes() == content[:end]
            nodes = len(again.tree)
            list(again.do("take 1 0"))
            list(again.do("undo"))
            again.close()
            assert (len(again.tree), vars(read_tree(cut))) == (nodes, vars(again.tree)), count
            cut.unlink()


def test_commands_that_only_look_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t"
    made = explorer(path)
    for line in ("generate 3", "left 1"):
        list(made.do(line))
    content = path.read_bytes()
    for line in ("show", "find a", "why", "text"):
        list(made.do(line))
        assert path.read_bytes() == content, line
    made.close()


def edited(path: Path, **fields: object) -> None:
    """Change fields of the first line."""
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps(json.loads(first) | fields) + "\n", *rest]))


FOREIGN = {
    "json_schema": "/etc/passwd",
    "grammar": "../grammar.lark",
    "amateur_model": "other/model",
    "assistant_model": "builtin:stories",
    "processors": [{"use": "package.module:Class"}],
    "stopping": [{"use": "anything"}],
    "trust_remote_code": True,
    "allow_pickle": True,
    "backend": "openai:http://localhost:1",
    "adapter": "folder",
    "nonsense": 1,
}


@pytest.mark.parametrize("where", ["first line", "step"])
def test_settings_that_reach_out_are_left_out_and_told(where: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    saved(path, ["generate 1"])
    values = FOREIGN | {"top_k": 7, "processors": [*FOREIGN["processors"]]}  # type: ignore[misc]
    if where == "step":
        path.write_text(path.read_text() + json.dumps({"event": "treestep", "line": "set", "settings": values}) + "\n")
    else:
        edited(path, layers=[{"origin": "flag", "kind": "command", "typed": True, "values": values}])
    notes: list[str] = []
    again = reopened(path, notes.append)
    assert [note.split()[2] for note in notes] == list(FOREIGN)
    assert again.resolved().generation.top_k == 7
    assert again.resolved().generation.grammar is None
    again.close()


@pytest.mark.parametrize("schema", ["genctl-tree/1", "genctl-tree/3"])
def test_another_format_is_refused_by_name(schema: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    saved(path, [])
    edited(path, schema=schema)
    with pytest.raises(InputError, match=f"has the format '{schema}' of another version of genctl") as error:
        read_tree(path)
    assert error.value.hint == "this version reads genctl-tree/2"


def test_a_tree_is_open_once(tmp_path: Path) -> None:
    made = explorer(tmp_path / "t")
    with pytest.raises(UsageError, match="is locked by another genctl process"):
        reopened(tmp_path / "t")
    made.close()
    reopened(tmp_path / "t").close()


@pytest.mark.parametrize(
    "content",
    [b"", b'{"event": "treeopened"}', b"hello\n", b"[]\n", b'{"event": "began"}\n', b"\xff\xfe\n", b"{" * 99999],
)
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not the file of a tree"):
        read_tree(path)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_regular_file_is_refused(make: object, tmp_path: Path) -> None:
    path = tmp_path / "t"
    make(path)  # type: ignore[operator]
    with pytest.raises(GenctlError, match=r"not a regular file|Is a directory|is a link"):
        reopened(path)


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
