"""An output with a journal: cut anywhere, it goes on; whatever changed is noticed; nobody else's file is touched."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genctl.errors import InputError, OutputError, UsageError
from genctl.io import output, resumable
from genctl.io.record_output import RowTally
from genctl.io.resumable import KIND, ResumedOutput
from genctl.io.rows import BadRow, InputRow

HEADER = {"seed": 7, "settings": {"temperature": 0.5}, "batch": {}}
SPAN = 4

Write = tuple[str, bytes]  # which file, what


def row(index: int, prompt: str = "") -> InputRow:
    return InputRow(str(index), index, prompt=prompt or f"prompt {index}")


ROWS: list[InputRow | BadRow] = [
    BadRow("2", 2, "", "input", "line 3: empty prompt") if index == 2 else row(index) for index in range(7)
]
LINES = [[f"{index}.{part} {'x' * (3 * index)}\n".encode() for part in range(1 + index % 3)] for index in range(7)]
WHOLE = b"".join(line for lines in LINES for line in lines)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def beside(path: Path) -> Path:
    return path.with_name("out.jsonl.journal")


def opened(path: Path) -> ResumedOutput:
    return ResumedOutput(path, "text", RowTally(), lambda record: None)


def write(file: ResumedOutput, rows: Sequence[InputRow | BadRow] = ROWS, upto: int = 7) -> None:
    """What a job does: each row is read, and its records are written unless they are there."""
    for one in rows[:upto]:
        file.consume(one)
        file.put(one.index, [{"text": line.decode().removesuffix("\n")} for line in LINES[one.index]])
    if upto == len(rows):
        file.end_of_input(upto)


def run(path: Path, *, upto: int = 7, rows: Sequence[InputRow | BadRow] = ROWS) -> None:
    file = opened(path)
    try:
        file.begin(HEADER, SPAN, {}, seed_given=True)
        write(file, rows, upto)
    except BaseException:
        file.abandon()
        raise
    file.close(cut_short=upto != 7)


def test_the_rows_beside_an_unfinished_one_are_decoded_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "EVERY_S", 0.0)
    run(path, upto=6)
    file = opened(path)
    file.begin(HEADER, SPAN, {}, seed_given=True)
    assert (file.done, file.again) == (6, 4)
    file.abandon()


@pytest.fixture(params=["often", "seldom"])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(resumable, "EVERY_S", 0.0 if request.param == "often" else 1e9)
    return str(request.param)


def test_a_run_in_one_go_and_one_in_pieces_write_the_same(path: Path, beside: Path, pace: str) -> None:
    for upto in (0, 1, 3, 6, 7):
        run(path, upto=upto)
        assert path.read_bytes() == b"".join(line for lines in LINES[:upto] for line in lines)
    file = opened(path)
    assert (file.finished, file.done, file.journal.marks[-1].bytes) == (True, 7, len(WHOLE))
    file.abandon()
    assert beside.stat().st_mode & 0o777 == 0o600
    assert json.loads(beside.read_text().splitlines()[0])["journal"] == KIND
    assert "prompt" not in beside.read_text()


class Recorder:
    """Remembers every write, so that the two files can be made as they were at any moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[Write] = []
        before = output.unbuffered
        writes = self.writes

        class Raw:
            def __init__(self, descriptor: int) -> None:
                self.raw: Any = before(descriptor)
                self.name = str(Path(f"/proc/self/fd/{descriptor}").readlink())

            def write(self, data: memoryview) -> int:
                writes.append((self.name, bytes(data)))
                return int(self.raw.write(data))

            def close(self) -> None:
                self.raw.close()

        for module in (output, resumable):
            monkeypatch.setattr(module, "unbuffered", Raw)


def moments(writes: Sequence[Write]) -> Iterator[dict[str, bytes]]:
    """The files before, in the middle of, and after every write."""
    state: dict[str, bytes] = {}
    for name, data in writes:
        for cut in sorted({0, 1, len(data) // 2, len(data) - 1}):
            yield {**state, name: state.get(name, b"") + data[:cut]}
        state[name] = state.get(name, b"") + data
    yield state


def test_killed_at_any_write_it_goes_on_to_the_same_bytes(
    path: Path, beside: Path, pace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        recorder = Recorder(patch)
        run(path)
    assert path.read_bytes() == WHOLE
    seen = 0
    for state in moments(recorder.writes):
        for file in (path, beside):
            file.unlink(missing_ok=True)
            if content := state.get(str(file)):
                file.write_bytes(content)
        if not beside.exists():
            beside.touch()  # it is made before anything is written
        before = path.read_bytes() if path.exists() else b""
        run(path)
        assert path.read_bytes() == WHOLE, before
        seen += 1
    assert seen > 40


def failure_of(path: Path) -> str | None:
    """What a run says if it cannot write."""
    try:
        run(path)
    except OutputError as error:
        return error.message
    return None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("partly", [False, True])
def test_a_disk_that_fails_at_any_write_loses_nothing(
    path: Path, beside: Path, pace: str, number: int, partly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = output.unbuffered
    fatal = 0
    while True:
        fatal += 1
        left = fatal

        class Failing:
            def __init__(self, descriptor: int) -> None:
                self.raw: Any = before(descriptor)

            def write(self, data: memoryview) -> int:
                nonlocal left
                left -= 1
                if left == 0 and partly:
                    return int(self.raw.write(data[:2]))
                if left <= 0:
                    raise OSError(number, os.strerror(number))
                return int(self.raw.write(data))

            def close(self) -> None:
                self.raw.close()

        for file in (path, beside):
            file.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            for module in (output, resumable):
                patch.setattr(module, "unbuffered", Failing)
            message = failure_of(path)
        if message is None:
            break
        assert os.strerror(number) in message
        assert str(path.parent) in message
        made = path.read_bytes() if path.exists() else b""
        assert WHOLE.startswith(made)
        assert not made or made.endswith(b"\n")  # cut back to whole records at once
        run(path)
        assert path.read_bytes() == WHOLE
    assert path.read_bytes() == WHOLE
    assert fatal > 10


def test_a_disk_that_cannot_make_things_last_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OutputError, match="Input/output error"):
            run(path)
    run(path)
    assert path.read_bytes() == WHOLE


def test_marks_are_written_once_a_second_and_at_every_group(
    path: Path, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count()
    # the clock is read once for each row that ends no group, and once for each mark
    monkeypatch.setattr(resumable, "time", SimpleNamespace(monotonic=lambda: 0.3 * next(times)))
    file = opened(path)
    file.begin(HEADER, SPAN, {}, seed_given=True)
    write(file)
    file.hurried = True
    file.close(cut_short=True)
    marks = [json.loads(line)["rows"] for line in beside.read_text().splitlines()[1:]]
    assert marks == [0, 1, 4]  # at once; the group of four; no second later


def changed(index: int) -> list[InputRow | BadRow]:
    return [row(index, "another prompt") if one.index == index else one for one in ROWS]


@pytest.mark.parametrize("pace", ["often"], indirect=True)
@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (changed(0), "row 1 is not what was read"),
        (changed(3), "row 4 is not what was read"),
        ([*ROWS[:2], row(2), *ROWS[3:]], "row 3 is not what was read"),
        (ROWS[:4], "it had at least 5 rows, now 4"),
    ],
)
def test_a_changed_input_is_noticed_with_its_place(
    path: Path, pace: str, rows: list[InputRow | BadRow], sentence: str
) -> None:
    run(path, upto=5)
    before = path.read_bytes()
    with pytest.raises(InputError, match=f"cannot be resumed: the input has changed: {sentence}"):
        run(path, rows=rows, upto=len(rows))
    assert path.read_bytes() == before
    run(path)
    assert path.read_bytes() == WHOLE


def test_where_marks_are_far_apart_the_row_is_named_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "EVERY_S", 1e9)
    run(path, upto=6)
    with pytest.raises(InputError, match="row 3 is not what was read"):
        run(path, rows=changed(2))


HI = {"role": "user", "content": "Hi"}
FIELDS: dict[str, tuple[Any, Any]] = {
    "prompt_ids": ((5, 6), (5, 7)),
    "messages": ((HI,), ({**HI, "content": "Ho"},)),
    "params": ({"top_k": 1}, {"top_k": 2}),
    "extra": ({"prefix": "a"}, {"prefix": "b"}),
    "columns": ({"label": "a"}, {"label": "b"}),
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_a_row_is_part_of_the_input(path: Path, field: str) -> None:
    before, after = ([InputRow("0", 0, **{field: value}), *ROWS[1:]] for value in FIELDS[field])
    run(path, rows=before, upto=3)
    run(path, rows=before, upto=5)
    with pytest.raises(InputError, match="the input has changed: row 1 is not what was read"):
        run(path, rows=after)


def test_a_finished_job_has_no_more_rows(path: Path) -> None:
    run(path)
    file = opened(path)
    write(file)
    with pytest.raises(InputError, match="it had 7 rows, now 8"):
        file.end_of_input(8)
    file.abandon()


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda path, beside: path.write_bytes(WHOLE[:5] + b"!" + WHOLE[6:]), "was changed since it was written"),
        (lambda path, beside: path.write_bytes(WHOLE[:20]), "was changed since it was written"),
        (lambda path, beside: beside.write_text(beside.read_text().replace('"rows": 5', '"rows": 6')), "is damaged"),
        (lambda path, beside: path.unlink(), "is gone, but its journal"),
        (lambda path, beside: beside.unlink(), "was not written with --resume"),
        (lambda path, beside: beside.write_bytes(b"{}\n"), "is no journal of this version"),
        (lambda path, beside: beside.write_bytes(b"[" * 5000 + b"\n"), "is no journal of this version"),
        (lambda path, beside: beside.write_bytes(beside.read_bytes() + b"{}\n"), "is damaged at line"),
        (lambda path, beside: beside.write_bytes(beside.read_bytes() + b"\xff\n"), "is damaged at line"),
    ],
)
def test_what_was_tampered_with_is_refused_and_left_alone(
    path: Path, beside: Path, harm: Callable[[Path, Path], object], sentence: str
) -> None:
    run(path, upto=5)
    harm(path, beside)
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(UsageError, match=sentence) as caught:
        opened(path)
    assert caught.value.hint
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


def test_an_output_of_somebody_else_is_never_taken_for_ours(path: Path, beside: Path) -> None:
    path.write_bytes(b"precious\n")
    with pytest.raises(UsageError, match="was not written with --resume"):
        opened(path)
    assert path.read_bytes() == b"precious\n"
    assert not beside.exists()


def test_links_are_not_followed(path: Path, beside: Path) -> None:
    victim = path.with_name("victim")
    victim.write_bytes(b"")
    beside.symlink_to(victim)
    with pytest.raises(UsageError, match="is a link"):
        opened(path)
    beside.unlink()
    path.symlink_to(path.with_name("nothing"))
    with pytest.raises(UsageError, match="was not written with --resume"):
        opened(path)
    path.unlink()
    run(path, upto=4)
    path.rename(victim)
    path.symlink_to(victim)
    with pytest.raises(OutputError, match="it is a link"):
        opened(path)
    assert victim.read_bytes() == b"".join(line for lines in LINES[:4] for line in lines)


def test_a_pipe_or_a_folder_under_the_name_is_refused_at_once(path: Path, beside: Path) -> None:
    os.mkfifo(beside)
    with pytest.raises(UsageError, match="is not a regular file"):
        opened(path)
    beside.unlink()
    beside.mkdir()
    with pytest.raises(OutputError, match="Is a directory"):
        opened(path)
    with pytest.raises(OutputError, match="there is no folder"):
        opened(path.parent / "missing" / "out.jsonl")


def test_two_runs_do_not_write_to_one_output(path: Path) -> None:
    file = opened(path)
    file.begin(HEADER, SPAN, {}, seed_given=True)
    with pytest.raises(UsageError, match="is locked by another genctl process"):
        opened(path)
    file.abandon()
    run(path)
    assert path.read_bytes() == WHOLE


def test_a_job_that_never_began_leaves_nothing(path: Path) -> None:
    opened(path).abandon()
    assert list(path.parent.iterdir()) == []


def test_a_header_that_was_torn_is_written_again(path: Path, beside: Path) -> None:
    run(path, upto=0)
    path.unlink()
    beside.write_bytes(beside.read_bytes()[:30])
    run(path)
    assert path.read_bytes() == WHOLE
