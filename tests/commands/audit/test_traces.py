"""`genctl audit`: files, prompts of other files, and documents that fit no shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from genctl.commands.parity.audit import prompts_of
from genctl.errors import GenctlError, InputError
from genctl.parity import traces
from genctl.parity.prompts import AuditPrompts
from genctl.parity.traces import rows_of
from tests.cli.tool import genctl
from tests.commands.audit.test_reading import shapes
from tests.commands.audit.traces import BOS, MARKS, STORIES, audit, reference, written

pytestmark = MARKS
ENTRY = {"id": 14, "token": ",", "logprob": -0.1, "top_logprobs": []}


# -- prompts -----------------------------------------------------------------------------------------------------------


def bare(count: int = 2, **fields: Any) -> list[dict[str, Any]]:
    """Rows without prompts; the only token of each is its index."""
    return [{"completion_ids": [place], "logprobs": [-1.0], **fields} for place in range(count)]


def paired(folder: Path, rows: list[Any], prompts: bytes, fields: tuple[str, ...] = (), name: str = "p.jsonl") -> Any:
    """The prompt of each row; the key is the row's first token."""
    (folder / name).write_bytes(prompts)
    found = traces.read(written(folder, rows), 64, traces.field_paths(fields))
    traces.with_prompts(found, name, [*prompts_of(str(folder / name), note=print)])
    return {row.pieces[0].id: row.prompt for row in found.rows}


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_numbers_of_rows_are_no_ids(tmp_path: Path) -> None:
    """Regression: row 1 of a trace got the prompt with id 1, which is the second prompt."""
    prompts = lines({"id": 0, "prompt": "a"}, {"id": 1, "prompt": "b"})
    assert paired(tmp_path, bare(), prompts) == {0: "a", 1: "b"}
    assert paired(tmp_path, [{**row, "index": 0} for row in bare()], prompts) == {0: "a", 1: "b"}
    ids = [{**row, "request": {"id": 1 - place}} for place, row in enumerate(bare())]
    assert paired(tmp_path, ids, prompts, ("id=request.id",)) == {0: "b", 1: "a"}


def test_a_byte_order_mark_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    bom = "\ufeff".encode()
    assert paired(tmp_path, bare(), bom + lines({"prompt": "a"}, {"prompt": "b"}) + b"\n\n") == {0: "a", 1: "b"}
    assert paired(tmp_path, bare(), bom + b"a\r\nb\n\n", name="p.txt") == {0: "a", 1: "b"}
    document = tmp_path / "document.json"
    document.write_bytes(bom + b"\n\n" + json.dumps(bare(3), indent=1).encode())
    assert len(traces.read(str(document), 64).rows) == 3


def test_a_prompt_counts_for_all_choices_of_its_request(tmp_path: Path) -> None:
    def answer(*ids: int) -> dict[str, Any]:
        content = [[{"id": id, "token": "x", "logprob": -1.0}] for id in ids]
        return {"choices": [{"text": "", "logprobs": {"content": each}} for each in content]}

    assert paired(tmp_path, [answer(0, 1), answer(2, 3)], b"a\nb\n", name="p.txt") == {0: "a", 1: "a", 2: "b", 3: "b"}
    record = {"schema": "genctl/1", "id": "0", "prompt": "x"}
    records = [{**record, "sequence": place, "tokens": [{"id": place, "logprob": -1.0}]} for place in (0, 1)]
    assert paired(tmp_path, records, b"a\n", name="p.txt") == {0: "a", 1: "a"}


def test_a_row_that_cannot_be_read_keeps_its_prompt(tmp_path: Path) -> None:
    """Regression: later rows got the prompt of the row before."""
    rows = [bare()[0], {"completion_ids": "x", "logprobs": []}, {**bare()[0], "completion_ids": [2]}]
    assert paired(tmp_path, rows, b"a\nb\nc\n", name="p.txt") == {0: "a", 2: "c"}


def test_prompts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 3 prompts, and the trace 2 rows"):
        paired(tmp_path, bare(), b"a\nb\nc\n", name="p.txt")
    with pytest.raises(InputError, match=r"p\.jsonl: line 2: no prompt: expected one of"):
        paired(tmp_path, bare(), lines({"prompt": "a"}, {"id": "b"}))
    with pytest.raises(InputError, match="line 2: the id 'a' is already used in line 1"):
        paired(tmp_path, [{**row, "id": "a"} for row in bare()], lines({"id": "a", "prompt": "a"}) * 2)
    with pytest.raises(InputError, match="a prompt has no id, and others have"):
        paired(tmp_path, [{**row, "id": "a"} for row in bare()], lines({"id": "a", "prompt": "a"}, {"prompt": "b"}))
    rows = [{**row, "id": place} for place, row in enumerate(bare())]  # counted from 0; the prompts from 1
    with pytest.raises(InputError, match="no prompt has the id"):
        paired(tmp_path, rows, lines({"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}))


def test_names_may_have_an_at_sign(tmp_path: Path) -> None:
    path = written(tmp_path, [shapes()["a trainer"]], "runs@step=1.jsonl")
    (tmp_path / "model@step=2").symlink_to(STORIES)
    for words in ((path,), (f"{path}@dtype=float32",)):
        done = audit(*words, model=tmp_path / "model@step=2")
        assert (done.status, done.records[0]["verdict"]) == (0, "same"), done.err


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": {"content": [ENTRY]}}]},
        {"index": 0, "content": "x", "stop": False, "completion_probabilities": [ENTRY], "tokens": [14]},
        {"message": {"role": "assistant", "content": "x"}, "logprobs": [ENTRY], "done": False},
    ],
    ids=["OpenAI", "llama-server", "Ollama"],
)
@pytest.mark.parametrize("before", ["", "data: "])
def test_events_of_a_stream_are_refused(event: Any, before: str, tmp_path: Path) -> None:
    """Regression: each event of llama-server counted as a row."""
    path = tmp_path / "stream.txt"
    path.write_text(f"{before}{json.dumps(event)}\n\n" * 2)
    with pytest.raises(InputError, match="line 1: an event of a stream: record answers without stream"):
        traces.read(str(path), 64)


# -- what fits no shape ------------------------------------------------------------------------------------------------

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 5, -0.5, float("nan"), 10**400, 2**63, "", "a", "\ud800", [], {}, [[]], [{}], [1, 2], ["a"], [None],
    [[1, -1.0]], {"5": -1.0}, {"content": 5}, {"role": "user", "content": "a"},
)  # fmt: skip


def mutations(value: Any) -> Iterator[Any]:
    """Variants of a document: each of its parts is replaced by a hostile value, or removed."""

    def parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
        for key, inner in items:
            yield from parts(inner, (*path, key))

    for *path, key in [path for path in parts(value) if path]:
        for hostile in (..., *HOSTILE):
            copy = deepcopy(value)
            holder = copy
            for step in path:
                holder = holder[step]
            if hostile is ...:
                del holder[key]
            else:
                holder[key] = hostile
            yield copy


def documents() -> dict[str, Any]:
    """A document of every shape."""
    message = {"role": "user", "content": "Once"}
    content = {"content": [{**ENTRY, "top_logprobs": [ENTRY]}]}
    return {
        "a chat": {"id": "a", "messages": [message], "tools": [{}], "chat_template_kwargs": {"a": 1}, "choices": [
            {"index": 0, "message": {"content": ","}, "logprobs": content, "token_ids": [14]}]},
        "a record": {"schema": "genctl/1", "id": "0", "sequence": 0, "prompt": "Once", "text": ",", "usage": {
            "prompt_tokens": 2}, "tokens": [{"id": 14, "text": ",", "logprob": -1.0, "top": [[14, ",", -1.0]]}]},
        "a score": {"schema": "genctl/1", "text": "Once,", "token_ids": [1, 580, 14], "tokens": 1, "scores": [
            {"id": 14, "text": ",", "logprob": -1.0}]},
        "a trainer": {"prompt_ids": [[1, 580]], "completion_ids": [14], "logprobs": [[-0.1]], "top_logprobs": [
            {"14": {"logprob": -0.1}, "5": -1.0}]},
        "pairs": {"prompt": [message], "params": {"system": "a"}, "completion_ids": [14], "logprobs": [-1.0],
                  "top_logprobs": [[[5, -1.0], [5, "x", -1.0], ENTRY]]},
        **{name: shape for name, shape in shapes().items() if name != "a trainer"},
    }  # fmt: skip


def test_a_document_of_the_wrong_shape_is_a_failed_row() -> None:
    """Regression: 16 of 17 such documents caused an internal error."""
    prompts = AuditPrompts(reference().session.loaded, reference().resolved, bos=BOS)
    for name, whole in documents().items():
        found = {"read": 0, "refused": 0}
        for document in mutations(whole):
            try:
                for row in rows_of(document, "the row", "1"):
                    prompts.row(row)
                found["read"] += 1
            except GenctlError:
                found["refused"] += 1
        assert min(found.values()) > 20, name


@pytest.mark.parametrize(
    "line",
    [
        'data: {"choices":[{}]}', '{"choices":[{"index":null}]}', '{"a": 1, "a": 2}', '{"logprobs": [-1',
        '{"completion_ids": [5], "logprobs": [1' + "0" * 400 + "]}", "[" * 100 + "]" * 100, '"x"', "\\x",
        '{"completion_ids": [5], "logprobs": [-1.0], "prompt": {"a": 1}}',
    ],
)  # fmt: skip
def test_a_line_of_the_wrong_shape_costs_no_other_one(line: str, tmp_path: Path) -> None:
    """Regression: a line that is not JSON, or has a key twice, ended the audit."""
    path = tmp_path / "trace.jsonl"
    good = json.dumps(shapes()["a trainer"])
    for content in (f"{good}\n{line}\n", f"{line}\n{good}\n"):
        path.write_text(content)
        done = genctl("audit", str(path), "-m", str(STORIES), "--format", "jsonl")
        assert (done.status, len(done.records[0]["failed_rows"])) == (1, 1), done.err
        assert done.records[0]["verdict"] == "same"
    path.write_text(line)
    done = audit(str(path))
    assert done.status == 2
    assert "bug" not in done.err
