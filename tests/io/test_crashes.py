"""Every writer of files, cut after each of its system calls: the old file or the new one is there, never less."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from genctl.commands.chat.log import ChatLog
from genctl.commands.recording import PageFile, event_writer
from genctl.errors import GenctlError
from genctl.events import Began, to_json
from genctl.io import resumable
from genctl.io.output import open_beside
from genctl.io.record_output import RecordOutput
from genctl.io.sessions import begin_session
from genctl.io.writers import FORMATS, open_output, open_writer
from genctl.tree import token_tree
from tests.commands.chat.test_log import contents, log, turn
from tests.io.disk import Disk, Files, restore
from tests.io.test_batch_resumable import LINES, WHOLE, run
from tests.tree.trees import explorer, read_tree, reopened

NAME = "file.jsonl"
OLD = b"the old file, which is worth something\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "disk"
    made.mkdir()
    return made


# -- files that appear, or are replaced, when they are whole ---------------------------------------------------------


class Page(PageFile):
    def content(self) -> bytes:
        return b"<html>" + b"x" * 100


def page(path: Path) -> None:
    with Page(str(path), force=True):
        pass


def events(path: Path) -> None:
    with ExitStack() as stack:
        write = event_writer(stack, str(path), force=True)
        for number in range(3):
            write(Began(str(number), "a prompt", "greedy"))


def records(format: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        sink = open_output(path, None, force=True)
        output = RecordOutput(open_writer(format, sink, on_error=lambda record: None), sink)
        for number in range(3):
            output.put(number, [{"id": str(number), "text": "a text", "usage": {"new_tokens": 2}}])
        output.close(cut_short=False)

    return write


def tree(path: Path) -> None:
    opened = token_tree.TreeOpened(token_tree.SCHEMA, "tiny", "sha256:0", "", (), 3)
    file = open_beside(path, force=True)
    begin_session(file, [to_json(opened)])
    file.close()


REPLACING: dict[str, Callable[[Path], None]] = {
    "page": page, "events": events, "tree": tree, **{name: records(name) for name in FORMATS},
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACING)
def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(name: str, folder: Path) -> None:
    path = folder / NAME
    path.write_bytes(OLD)
    disk = Disk(folder)
    with disk.recording():
        REPLACING[name](path)
    new = path.read_bytes()
    assert {files.get(NAME) for files in disk.crashes} == {OLD, new}, disk.calls
    assert [files.get(NAME) for files in disk.left] == [new], "what is done has to last"


def test_a_new_page_is_there_when_it_is_whole(folder: Path) -> None:
    path = folder / NAME
    disk = Disk(folder)
    with disk.recording():
        page(path)
    assert {files.get(NAME) for files in disk.crashes} == {None, path.read_bytes()}
    assert len(disk.left) == 1


# -- trees and chats, which grow -------------------------------------------------------------------------------------


def is_beginning(files: Files, whole: bytes) -> bool:
    return whole.startswith(files.get(NAME, b""))


def test_a_new_tree_is_there_with_its_first_line(folder: Path, tmp_path: Path) -> None:
    path = folder / NAME
    disk = Disk(folder)
    with disk.recording():
        opened = token_tree.TreeOpened(token_tree.SCHEMA, "tiny", "sha256:0", "", (), 3)
        file = open_beside(path)
        begin_session(file, [to_json(opened)])
    assert [list(files) for files in disk.left] == [[NAME]], "the file and its name last"
    for files in disk.crashes:
        if NAME in files:
            assert vars(read_tree(restore(files, tmp_path / "after") / NAME)) == vars(token_tree.TokenTree(opened))
    file.close()


def test_a_tree_that_is_cut_anywhere_is_a_beginning_of_it(folder: Path, tmp_path: Path) -> None:
    path = folder / NAME
    disk = Disk(folder)
    with disk.recording():
        made = explorer(path)
        for line in ("generate 3", "take 2 1"):
            list(made.do(line))
        made.close()
    whole = path.read_bytes()
    assert len(disk.crashes) > 10
    for files in disk.crashes:
        assert is_beginning(files, whole)
        if NAME in files:
            after = restore(files, tmp_path / "after") / NAME
            again = reopened(after)
            again.close()
    assert [files.get(NAME) for files in disk.left] == [whole]


def test_an_answer_that_is_over_lasts(folder: Path, tmp_path: Path) -> None:
    """Cut anywhere, a chat can be opened, and has all turns whose answers were over."""
    path = folder / NAME
    disk = Disk(folder)
    one = log(path)
    turns: list[tuple[int, list[str]]] = []
    with disk.recording():
        for text, answer in (("Hello", "Hi"), ("More", "No")):
            turn(one, text, answer)
            turns.append((len(disk.crashes), contents(one)))
            assert {files.get(NAME) for files in disk.left} == {path.read_bytes()}
        one.close()
    for number, files in enumerate(disk.crashes):
        done = max((said for place, said in turns if place <= number), key=len, default=[])
        if NAME in files:
            again = ChatLog.open(restore(files, tmp_path / "after") / NAME)
            again.close()
            assert contents(again)[: len(done)] == done
        else:
            assert not done


# -- a batch with a journal ------------------------------------------------------------------------------------------


@pytest.fixture(params=["often", "seldom"])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(resumable, "EVERY_S", 0.0 if request.param == "often" else 1e9)
    return str(request.param)


def test_a_batch_goes_on_after_any_crash(pace: str, folder: Path, tmp_path: Path) -> None:
    """No mark vouches for bytes that a power cut can take, and the journal is there before its output is."""
    path = folder / NAME
    disk = Disk(folder)
    with disk.recording():
        run(path)
    assert path.read_bytes() == WHOLE
    assert len(disk.crashes) > 40
    for files in disk.crashes:
        after = restore(files, tmp_path / "after") / NAME
        try:
            run(after)
        except GenctlError as error:
            raise AssertionError(f"{files}: {error.message}") from error
        assert after.read_bytes() == WHOLE, files
    assert len(disk.left) == 1, "a batch that is done lasts"


def test_a_batch_that_goes_on_can_be_cut_again(pace: str, folder: Path, tmp_path: Path) -> None:
    path = folder / NAME
    run(path, upto=4)
    with path.open("ab") as file:
        file.write(LINES[4][0][:3])
    disk = Disk(folder)
    with disk.recording():
        run(path)
    for files in disk.crashes:
        after = restore(files, tmp_path / "after") / NAME
        run(after)
        assert after.read_bytes() == WHOLE


# -- the harness itself ----------------------------------------------------------------------------------------------


def test_the_disk_loses_what_was_not_flushed(folder: Path) -> None:
    disk = Disk(folder)
    with disk.recording():
        sink = open_output(folder / NAME, None)
        sink.write(b"one\n")
        assert {files.get(NAME) for files in disk.left} == {None, b"", b"on", b"one\n"}
        sink.sync()
        assert {files.get(NAME) for files in disk.left} == {None, b"one\n"}
        sink.close()
    assert disk.calls == [f"create {NAME}", f"write {NAME}", f"fsync {NAME}"]
