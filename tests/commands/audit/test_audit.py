"""`genctl audit`: traces with and without a planted cause."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genctl.decode.runtime import Pass
from genctl.engines.server import failure
from genctl.models.resolve import BUILTIN
from genctl.models.text import detokenizer
from genctl.parity import numbers, rereading, traces
from genctl.parity.audit import Auditor
from genctl.parity.forms import FORMS
from genctl.parity.prompts import AuditPrompts
from genctl.parity.shapes import TraceRow, rows_of
from genctl.parity.sides import LocalSide
from genctl.parity.trial import Way
from genctl.parity.values import Text
from tests.cli.tool import Done, genctl
from tests.commands.parity.test_servers import Model
from tests.engines.server.stand_in import running
from tests.parity.sides import side

pytestmark = pytest.mark.usefixtures("clean_environment")

STORIES = "builtin:stories"
BOS = 1
PROMPTS = ("Once upon a time", "The dog ran to the park", "Lily had a red ball.", "One day, a boy")
LONG = {
    "Once upon a time": ", there was a little girl named Lily. She loved to play outside in the park with her mom and "
    "her big red ball. One day, she saw a bird.",
    "The dog": " ran to the park and saw a big ball. He wanted to play with it, so he ran and ran until he was very "
    "tired and went home.",
    "Lily had": " a red ball. She liked to play with it every day. Her brother Tom wanted to play too, but Lily did "
    "not want to share.",
    "One day,": " a boy named Tim went to the park with his mom. They saw a big tree with many birds in it, and Tim "
    "was very happy to see it.",
}
Rows = list[dict[str, Any]]
Number = Callable[[Tensor], Tensor]  # logits f64 [V] to what is written


@cache
def loaded(dtype: str = "float32") -> LocalSide:
    return side(STORIES, dtype=dtype)


def ids_of(text: str) -> list[int]:
    found: list[int] = loaded().session.loaded.tokenizer(text)["input_ids"]  # type: ignore[misc]
    return found


def plain(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


@cache
def rollouts(
    read: Callable[[list[int]], list[int]] = list,
    number: Number = plain,
    dtype: str = "float32",
    draw: Number = plain,
    prompts: Sequence[str] = PROMPTS,
    top: int = 20,
    most: int = 25,
) -> Rows:
    """What an engine writes that reads `read` of each prompt: prompt_ids, completion_ids, logprobs, top_logprobs."""
    forward, random, rows = loaded(dtype).session.forward, torch.Generator().manual_seed(1), []
    for prompt in map(ids_of, prompts):
        ids, numbers, tops, seen = list[int](), list[float](), list[list[list[float]]](), read(prompt)
        for _ in range(most):
            with torch.inference_mode():
                whole = torch.tensor([[*seen, *ids]])
                logits = forward(Pass(whole, None, first=True, keep=1)).logits[0, -1].double()
            ids.append(int(torch.multinomial(draw(logits).exp(), 1, generator=random)))
            values = number(logits)
            numbers.append(float(values[ids[-1]].float()))
            best = values.topk(top)
            pairs = zip(best.indices.tolist(), best.values.float().tolist(), strict=True)
            tops.append([[id, value] for id, value in pairs if math.isfinite(value)])
        rows.append({"prompt_ids": prompt, "completion_ids": ids, "logprobs": numbers, "top_logprobs": tops})
    return rows


def mapped(change: Callable[[float], float], rows: Rows) -> Rows:
    return [
        {
            **row,
            "logprobs": [change(value) for value in row["logprobs"]],
            "top_logprobs": [[[id, change(value)] for id, value in top] for top in row["top_logprobs"]],
        }
        for row in rows
    ]


def chosen(rows: Rows) -> Rows:
    return [{key: value for key, value in row.items() if key != "top_logprobs"} for row in rows]


def written(folder: Path, rows: Sequence[Any], name: str = "trace.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def audit(trace: str, *words: str, model: str = STORIES) -> Done:
    return genctl("audit", trace, "-m", model, "--format", "jsonl", "-q", *words)


def causes(done: Done) -> list[str]:
    """The causes of the verdict."""
    one = done.records[0]
    assert (one["verdict"] == "explained") == bool(one["causes"]), one
    assert done.status == (0 if one["verdict"] == "same" else 4), done.err
    return [cause["key"] for cause in one["causes"]]


# -- verdicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [rollouts, lambda: chosen(rollouts())], ids=["lists", "chosen tokens"])
def test_a_trace_without_a_cause_is_the_same(rows: Callable[[], Rows], tmp_path: Path) -> None:
    done = audit(written(tmp_path, rows()))
    assert causes(done) == []
    assert done.records[0]["verdict"] == "same"
    assert (done.records[0]["rows"], done.records[0]["positions"]) == (4, 100)


def test_a_declared_dtype_is_no_cause(tmp_path: Path) -> None:
    path = written(tmp_path, rollouts(dtype="bfloat16"))
    assert audit(f"{path}@dtype=bfloat16").records[0]["verdict"] == "same"
    assert audit(path, "--dtype", "bfloat16").records[0]["verdict"] == "same"


def _kept(logits: Tensor) -> Tensor:
    logits = (logits / 0.8).log_softmax(-1)
    order = logits.sort(descending=True)
    before = order.values.exp().cumsum(-1) - order.values.exp()
    out = order.indices[before >= 0.9]
    return logits.index_fill(0, out, -torch.inf).log_softmax(-1)


def _warm(logits: Tensor) -> Tensor:
    return (logits / 0.7).log_softmax(-1)


NUMBERS: dict[str, Callable[[], Rows]] = {
    "temperature": lambda: rollouts(number=_warm),
    "temperature top-p": lambda: rollouts(number=_kept, draw=_kept),
    "base-10": lambda: mapped(lambda value: value / math.log(10), rollouts()),
    "probability": lambda: mapped(math.exp, rollouts()),
    "shifted": lambda: [{**row, "logprobs": [None, *row["logprobs"][:-1]], "top_logprobs": None} for row in rollouts()],
    "drafted": lambda: [
        {**row, "logprobs": [top[0][1] for top in row["top_logprobs"]], "top_logprobs": None} for row in rollouts()
    ],
    "digits": lambda: mapped(lambda value: round(value, 2), rollouts()),
}
PROMPT_CAUSES: dict[str, Callable[[], Rows]] = {
    "bos-missing": lambda: rollouts(read=_without_bos),
    "bos-doubled": lambda: rollouts(read=_doubled),
    "truncated": lambda: rollouts(read=_cut, prompts=("Once upon a time there was a girl and a dog.", *PROMPTS)),
    "bos-doubled temperature": lambda: rollouts(read=_doubled, number=_warm),
}


def _without_bos(ids: list[int]) -> list[int]:
    return ids[1:]


def _doubled(ids: list[int]) -> list[int]:
    return [BOS, *ids]


def _cut(ids: list[int]) -> list[int]:
    return ids[-5:]


@pytest.mark.parametrize("name", [*NUMBERS, *PROMPT_CAUSES])
def test_a_cause_is_named_with_what_it_explains(name: str, tmp_path: Path) -> None:
    done = audit(written(tmp_path, (NUMBERS | PROMPT_CAUSES)[name]()))
    assert sorted(causes(done)) == sorted(name.split()), done.records[0]
    assert done.records[0]["explained"] > 0.95
    assert done.records[0]["rows_left"] == 0
    assert done.records[1]["causes"] == [cause["key"] for cause in done.records[0]["causes"]]


def test_a_narrow_dtype_is_named_by_what_it_changes(tmp_path: Path) -> None:
    assert causes(audit(written(tmp_path, rollouts(dtype="bfloat16")))) == ["bfloat16"]


def test_a_config_that_the_engine_does_not_obey_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN / "stories", folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    done = audit(written(tmp_path, rollouts()), model=str(folder))
    assert causes(done) == ["rope-scaling-ignored"]


@pytest.mark.parametrize("name", ["temperature", "bos-doubled", "bfloat16", "bos-doubled temperature"])
def test_a_large_model_is_read_less_often(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a billion weights took six minutes: every cause read the whole sample, also where one explained all."""
    monkeypatch.setattr(rereading, "DEAR", 0)
    rows = rollouts(dtype="bfloat16") if name == "bfloat16" else (NUMBERS | PROMPT_CAUSES)[name]()
    done = audit(written(tmp_path, rows))
    assert sorted(causes(done)) == sorted(name.split()), done.records[0]
    if name == "temperature":
        assert any("not every cause is tried" in note for note in done.records[0]["notes"])


@pytest.mark.parametrize("name", ["temperature", "bos-doubled"])
def test_a_large_model_may_have_positions_without_a_number(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Positions of the sample were taken for those with a number: an IndexError."""
    monkeypatch.setattr(rereading, "DEAR", 0)
    rows = [
        {**row, "logprobs": [None, *row["logprobs"][1:]], "top_logprobs": None}
        for row in (NUMBERS | PROMPT_CAUSES)[name]()
    ]
    assert causes(audit(written(tmp_path, rows))) == [name]


def _ten(logits: Tensor) -> Tensor:
    best = logits.log_softmax(-1).topk(10)
    return torch.full_like(logits, -torch.inf).scatter(0, best.indices, best.values).log_softmax(-1)


def _greedy(logits: Tensor) -> Tensor:
    return torch.full_like(logits, -torch.inf).index_fill(0, logits.argmax()[None], 0.0)


def test_a_large_model_is_first_read_where_a_cause_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row was read, a greedy one, where a filter changes little."""
    monkeypatch.setattr(rereading, "DEAR", 0)
    greedy = rollouts(number=_ten, draw=_greedy, prompts=PROMPTS[:1])
    rows = chosen([*greedy, *rollouts(number=_ten, draw=_ten)])
    assert causes(audit(written(tmp_path, rows))) == ["top-k"]


def _auditor(trace: str, dtype: torch.dtype) -> Auditor:
    one = loaded()
    prompts = AuditPrompts(one.session.loaded, as_chat=False, variables={}, bos=BOS)
    rows = traces.read(trace, 1, traces.field_paths(())).rows
    return Auditor(one, [prompts.row(row, row.id) for row in rows], prompts, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [key for key, form in FORMS.items() if form.cache is not None])
def test_a_narrow_cache_changes_what_a_large_model_reads(
    form: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled attention reads a cache as it is, so that its dtype had no effect in float32."""
    monkeypatch.setattr(rereading, "DEAR", 0)
    auditor = _auditor(written(tmp_path, rollouts()), dtype)
    with torch.inference_mode():
        moved = auditor._logits(Way(form=FORMS[form]), [0]) - auditor._logits(Way(dtype=dtype), [0])
    assert float(moved.abs().mean()) > 1e-4


def test_texts_are_read_side_by_side_as_far_as_their_logits_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass has logits from the shortest prompt on: a long prompt among short ones took a gigabyte."""
    one, widths = loaded(), list[int]()
    together = one.together

    def counted(texts: Sequence[Text]) -> list[Tensor]:
        longest = max(len(text.prompt_ids) + len(text.token_ids) for text in texts)
        widths.append(len(texts) * (longest - min(len(text.prompt_ids) for text in texts)))
        return together(texts)

    monkeypatch.setattr(one, "together", counted)
    monkeypatch.setattr(rereading, "PADDED", 12 * one.vocabulary)
    texts = [Text(str(place), (BOS,) + (5,) * (60 if place % 2 else 3), (7, 9)) for place in range(6)]
    texts.insert(2, Text("none", (BOS,), ()))
    with torch.inference_mode():
        logits = rereading._read(one, texts)
        alone = torch.cat([rereading._read(one, [text]) for text in texts if text.token_ids])
        assert rereading._read(one, texts[2:3]).shape == (0, one.vocabulary)
    assert max(widths) == 6
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("planted", [
    numbers.Number(temperature=0.7), numbers.Number(temperature=0.8, kept=("top-p", 0.9)),
    numbers.Number(repetition=1.2),
])  # fmt: skip
def test_parameters_are_fitted_where_a_vocabulary_is_large(planted: numbers.Number) -> None:
    """A temperature took two minutes with 150,000 tokens: each try of a parameter read them all."""
    random = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(24, 20_000, generator=random, dtype=torch.float64)
    best = logits.topk(20).indices
    positions = torch.arange(len(logits)).repeat_interleave(20)
    before = tuple(((5, 9), tuple(best[:place, 1].tolist())) for place in range(len(logits)))
    chosen, follows = torch.arange(len(positions)) % 20 == 1, torch.ones(len(logits), dtype=torch.bool)
    places = numbers.Entries(
        best[:, 1], follows, positions, best.flatten(), chosen, torch.zeros(len(positions), dtype=torch.float64), before
    )
    places = replace(places, value=-numbers.remains(planted, logits, places))
    left = {one: float(places.sizes(numbers.remains(one, logits, places)).median())
            for one in numbers.numbers(logits, places)}  # fmt: skip
    found = min(left, key=lambda one: left[one])
    assert (found.temperature, found.kept, found.repetition) == (planted.temperature, planted.kept, planted.repetition)
    assert left[found] < 1e-9


def test_what_no_cause_explains_accuses_nobody(tmp_path: Path) -> None:
    """Noise of 0.1 nats in every number: too much for rounding, and in no cause's direction."""
    random = torch.Generator().manual_seed(3)
    rows = mapped(lambda value: value + 0.1 * float(torch.randn((), generator=random)), rollouts(most=10))
    done = audit(written(tmp_path, rows))
    assert causes(done) == []
    assert done.records[0]["verdict"] == "unexplained"
    assert done.records[0]["first"] == {"id": "1", "index": 0}


def test_too_few_tokens_name_no_cause(tmp_path: Path) -> None:
    rows = [
        {**row, "completion_ids": row["completion_ids"][:2], "logprobs": row["logprobs"][:2]}
        for row in chosen(rollouts(number=_warm))[:2]
    ]
    path = written(tmp_path, rows)
    assert causes(audit(path)) == []
    assert audit(path, "--allow", "unexplained").status == 0


def test_sums_of_a_harness_are_compared_as_sums(tmp_path: Path) -> None:
    tokenizer: Any = loaded().session.loaded.tokenizer
    rows = []
    for row, prompt in zip(rollouts(prompts=PROMPTS[:2], most=5), PROMPTS, strict=False):
        text = tokenizer.decode(row["completion_ids"])
        if tokenizer(prompt + text)["input_ids"] == [*row["prompt_ids"], *row["completion_ids"]]:
            rows.append({"doc": {}, "arguments": [[prompt, text]], "resps": [[[str(sum(row["logprobs"])), "False"]]]})
    assert rows
    assert audit(written(tmp_path, rows)).records[0]["verdict"] == "same"


def test_the_rounding_of_a_sum_is_that_of_all_its_tokens(tmp_path: Path) -> None:
    """Sums of 30 tokens in bfloat16 were unexplained: they were compared with the rounding of one token."""
    forward, rows = loaded("bfloat16").session.forward, []
    for prompt, text in LONG.items():
        begin, whole = len(ids_of(prompt)), ids_of(prompt + text)
        with torch.inference_mode():
            logits = forward(Pass(torch.tensor([whole]), None, first=True, keep=len(whole))).logits[0].double()
        own = logits.log_softmax(-1)[range(begin - 1, len(whole) - 1), whole[begin:]]
        assert len(own) >= 30
        rows.append({"doc": {}, "arguments": [[prompt, text]], "resps": [[[str(float(own.sum())), "False"]]]})
    done = audit(f"{written(tmp_path, rows)}@dtype=bfloat16").records[0]
    assert done["verdict"] == "same", done["reason"]


# -- a server is asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "expected"), [(plain, []), (lambda logits: logits / 0.7, ["temperature"])])
def test_a_server_is_asked_greedily_and_at_random(
    change: Number, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "FIRST_S", 0.001)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS[:2]))
    with running(answers=Model(change)) as server:
        done = audit(server.url, "-i", str(prompts), "-n", "12")
    assert causes(done) == expected
    assert done.records[0]["rows"] == 4


# -- shapes ------------------------------------------------------------------------------------------------------------


def shapes() -> dict[str, Any]:
    """One row in every shape."""
    row = rollouts(prompts=("Once upon a time",), most=4, top=3)[0]
    piece = detokenizer(loaded().session.loaded.tokenizer).piece
    ids, values, tops = row["completion_ids"], row["logprobs"], row["top_logprobs"]
    texts, prompt = [*map(piece, ids)], "Once upon a time"
    content = [
        {"token": text, "logprob": value, "top_logprobs": [{"token": piece(id), "logprob": each} for id, each in top]}
        for text, value, top in zip(texts, values, tops, strict=True)
    ]
    logprobs = {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": [{piece(id): value for id, value in top} for top in tops],
    }
    body = {"prompt": prompt, "choices": [{"index": 0, "text": "".join(texts), "logprobs": logprobs}]}
    named = {**logprobs, "tokens": [f"token_id:{id}" for id in ids], "top_logprobs": [
        {f"token_id:{id}": value for id, value in top} for top in tops]}  # fmt: skip
    return {
        "a completion": body,
        "token ids as texts": {"prompt": prompt, "choices": [{"text": "", "logprobs": named}]},
        "a line of a batch file": {"custom_id": "a", "response": {"status_code": 200, "body": body}},
        "llama-server": {"prompt": prompt, "content": "".join(texts), "completion_probabilities": [
            {"id": id, **entry} for id, entry in zip(ids, content, strict=True)]},
        "llama-server, drawn": {"prompt": prompt, "content": "".join(texts), "completion_probabilities": [
            {"content": entry["token"], "probs": [
                {"tok_str": one["token"], "prob": math.exp(one["logprob"])} for one in entry["top_logprobs"]]}
            for entry in content]},
        "SGLang": {"prompt": prompt, "text": "".join(texts), "meta_info": {
            "output_token_logprobs": [[value, id, None] for value, id in zip(values, ids, strict=True)],
            "output_top_logprobs": [[[value, id, None] for id, value in top] for top in tops]}},
        "Ollama": {"prompt": prompt, "response": "".join(texts), "logprobs": content},
        "LM Studio": {"input": prompt, "output": [{"content": [
            {"type": "output_text", "text": "".join(texts), "logprobs": content}]}]},
        "a trainer": {"prompt_ids": row["prompt_ids"], "response_ids": ids, "rollout_log_probs": values},
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "a completion", "token ids as texts", "a line of a batch file", "llama-server", "SGLang", "Ollama", "a trainer",
])  # fmt: skip
def test_a_shape_is_read(name: str, tmp_path: Path) -> None:
    done = audit(written(tmp_path, [shapes()[name]]))
    assert (done.records[0]["verdict"], done.records[0]["positions"]) == ("same", 4), done.err


def test_chats_are_read_with_the_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Once upon a time"}]
    content = [{"token": "x", "id": 5, "logprob": -1.0, "top_logprobs": []}]
    row = {"messages": messages, "choices": [{"message": {"content": "x"}, "logprobs": {"content": content}}]}
    (found,) = rows_of(row, "row 1", "1")
    assert found.messages == tuple(messages)
    assert found.is_chat
    (lone,) = rows_of(shapes()["LM Studio"], "row 1", "1")
    assert (lone.prompt, len(lone.pieces)) == ("Once upon a time", 4)


def test_chunks_of_a_stream_are_one_answer(tmp_path: Path) -> None:
    body = shapes()["a completion"]
    choice = body["choices"][0]
    parts = [
        {"id": "c", "choices": [{"index": 0, "text": text, "logprobs": {
            "tokens": [text], "token_logprobs": [value], "top_logprobs": [top]}}]}
        for text, value, top in zip(*choice["logprobs"].values(), strict=True)
    ]  # fmt: skip
    path = tmp_path / "stream.txt"
    path.write_text("".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n")
    (row,) = traces.read(str(path), 10).rows
    (whole,) = rows_of(body, "row", "1")
    assert (row.pieces, row.text) == (whole.pieces, whole.text)


def test_names_of_fields_are_given(tmp_path: Path) -> None:
    row = rollouts(prompts=("Once upon a time",), most=4)[0]
    nested = {"in": {"ids": row["prompt_ids"]}, "out": {"ids": row["completion_ids"], "lp": row["logprobs"]}}
    names = ("prompt_ids=in.ids", "completion_ids=out.ids", "logprobs=out.lp")
    path = written(tmp_path, [nested])
    assert audit(path, *(word for name in names for word in ("--field", name))).records[0]["verdict"] == "same"
    done = audit(path, "--field", "completion=out.ids", "--field", "logprob=x")
    assert (done.status, done.err.splitlines()[-1]) == (2, "hint: did you mean logprobs?")


def test_prompts_come_from_a_file_by_id_or_in_order(tmp_path: Path) -> None:
    rows = [dict(shapes()["a completion"], id=f"r{place}") for place in range(2)]
    bare = [{key: value for key, value in row.items() if key != "prompt"} for row in rows]
    path = written(tmp_path, bare)
    assert "--prompts FILE" in audit(path).err
    lines = written(tmp_path, [{"id": id, "prompt": "Once upon a time"} for id in ("r1", "r0")], "by-id.jsonl")
    assert audit(path, "--prompts", lines).records[0]["verdict"] == "same"
    (tmp_path / "plain.txt").write_text("Once upon a time\n")
    assert "has 1 prompts, and the trace 2 rows" in audit(path, "--prompts", str(tmp_path / "plain.txt")).err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "no numbers of tokens: it has text"),
        ({"choices": [{"text": "x", "logprobs": None}]}, "choices[0].logprobs: expected an object, got null"),
        ({"completion_ids": [1, "a"], "logprobs": [0, 0]}, "completion_ids[1]: expected a token id, got a string"),
        (
            {"completion_ids": [5, 6], "logprobs": [-1.0]},
            "logprobs: expected 2 numbers, one for each of completion_ids",
        ),
        ([1], "the row: expected an object, got an integer"),
    ],
)
def test_an_unknown_shape_is_refused_with_the_first_path(row: Any, words: str, tmp_path: Path) -> None:
    done = audit(written(tmp_path, [row]))
    assert done.status == 2
    assert words in done.err
    assert "hint: fits: OpenAI" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "genctl audit reads one trace"),
        (("a.jsonl", "b.jsonl"), "there are: a.jsonl, b.jsonl"),
        (("a.jsonl@temperature=1",), "only dtype and quantize are declared"),
        (("a.jsonl", "--allow", "bos-double"), "did you mean bos-doubled?"),
        (("a.jsonl", "-i", "x.txt"), "--prompts gives those of a file"),
        (("a.jsonl", "--positions"), "--positions adds records"),
        (("a.jsonl", "--rows", "0"), "--rows 0: must be at least 1"),
    ],
)
def test_mistakes_are_said_before_anything_is_read(words: tuple[str, ...], message: str) -> None:
    done = genctl("audit", *words, "-m", STORIES)
    assert done.status == 2
    assert message in done.err


def test_a_row_that_cannot_be_read_costs_no_other_one(tmp_path: Path) -> None:
    good = rollouts(prompts=("Once upon a time",), most=4)[0]
    bad = [{**good, "completion_ids": [99999] * 4}, {**good, "logprobs": [None] * 4}, {**good, "prompt_ids": []}]
    done = audit(written(tmp_path, [good, *bad]))
    assert (done.status, done.records[0]["verdict"], len(done.records[0]["failed_rows"])) == (1, "same", 3)
    assert "row 2: a token has id 99999, but the model's ids are 0 to 1535" in done.err
    done = audit(written(tmp_path, bad))
    assert done.status == 2
    assert done.err.splitlines()[-1].endswith("trace.jsonl: no row can be audited")
    assert "needs the checkpoint that the engine should have run" in genctl("audit", written(tmp_path, [good])).err


def test_rows_are_spread_over_a_long_file(tmp_path: Path) -> None:
    row = {"prompt_ids": [1], "completion_ids": [5], "logprobs": [-1.0]}
    found = traces.read(written(tmp_path, [{**row, "id": str(place)} for place in range(100)]), 5)
    assert found.total == 100
    assert [type(one) for one in found.rows] == [TraceRow] * 5
    places = [int(one.id) for one in found.rows]
    assert places[0] == 0
    assert places[-1] >= 75


# -- what is shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_shows_bars_and_the_worst_row(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    path = written(tmp_path, rollouts(read=_doubled))
    done = genctl("audit", path, "-m", STORIES, "--report", str(tmp_path / "page.html"), terminal=True, color="never")
    assert done.status == 4
    lines = done.out.splitlines()
    assert all(len(line) <= width for line in lines)
    assert "explained: double BOS (" in done.out
    assert "██████████  100.0%  double BOS" in done.out
    assert {"before", "after"} <= {line.strip() for line in lines}
    page = (tmp_path / "page.html").read_text()
    assert "double BOS" in page
    assert "<script" not in page


def test_records_have_hypotheses_and_positions(tmp_path: Path) -> None:
    path = written(tmp_path, rollouts(number=_warm, most=10))
    done = audit(path, "--positions", "--allow", "temperature")
    assert done.status == 0
    kinds = [record["kind"] for record in done.records]
    assert kinds[0] == "audit"
    assert kinds.count("position") == 10 * len(PROMPTS)
    assert kinds.count("hypothesis") > 20
    table = genctl("audit", path, "-m", STORIES, "--format", "tsv", "-q")
    assert table.out.splitlines()[1].split("\t")[3:5] == ["explained", "temperature"]
