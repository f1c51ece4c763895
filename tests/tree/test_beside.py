"""Two distributions on one tree."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from genctl.errors import UsageError
from genctl.tree.beside import Second
from genctl.tree.results import Beside, Continuation
from tests.cli.tool import genctl
from tests.tiny import checkpoint, tiny, tokenizer
from tests.tree.trees import PROMPT, explorer, stories


def test_settings_beside_the_tree_s_own_are_those_of_a_tree_with_them() -> None:
    made, other = explorer(), explorer(do_sample=True, temperature=0.5, top_k=5)
    made.second = Second(made.space, knobs={"do_sample": True, "temperature": 0.5, "top_k": 5})
    for each in (made, other):
        each.all("generate 5")
    rows = [result for result in made.all("beside") if isinstance(result, Beside)]
    assert [row.node for row in rows] == [0, *made.tree.branch()]
    assert rows[-1].written is None
    for row in rows[:1]:
        one, two = made.space.distribution(row.node), other.space.distribution(row.node)
        assert row.best[1] == two.at(1)
        assert row.moved == pytest.approx(0.5 * np.abs(np.exp(one.processed) - np.exp(two.processed)).sum(), abs=1e-6)
        assert not row.parts  # a temperature changes no order


def test_a_model_beside_itself_never_parts() -> None:
    made = explorer()
    made.second = Second(made.space, session=stories())
    found = [result for result in made.all("expand mass=0.5,depth=3") if isinstance(result, Continuation)]
    assert len(found) > 2
    for one in found:
        assert one.beside == pytest.approx(one.total, abs=1e-6)
        assert one.parts is None


def test_where_two_part_is_marked() -> None:
    made = explorer()
    best = made.space.distribution(0).at(1).id
    made.second = Second(made.space, knobs={"suppress_tokens": [best]})
    made.all("generate 3")
    first, *_ = made.all("beside")
    assert isinstance(first, Beside)
    assert first.parts
    assert first.written is not None
    assert first.written[1].removed_by == "suppress_tokens"
    made.all("start")
    found = [result for result in made.all("expand mass=0.3,depth=2") if isinstance(result, Continuation)]
    assert {one.parts for one in found} == {0}
    assert {one.beside for one in found} == {-math.inf}


def test_without_a_second_there_is_nothing_beside() -> None:
    with pytest.raises(UsageError, match="there is one distribution"):
        explorer().all("beside")


def test_nothing_of_a_second_distribution_is_in_the_file(tmp_path: Path) -> None:
    plain, beside = tmp_path / "plain", tmp_path / "beside"
    for path, more in ((plain, []), (beside, ["--beside", "creative"])):
        lines = "generate 3\n" + ("beside\n" if more else "")
        done = genctl("explore", PROMPT, "--seed", "1", "--save", str(path), "--script", "-", *more, stdin=lines)
        assert done.status == 0, done.err
    assert beside.read_bytes() == plain.read_bytes()


def test_rows_have_both(tmp_path: Path) -> None:
    one, two = (str(checkpoint("llama", tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 1)))
    line = ["explore", PROMPT, "--expand", "mass=0.3,depth=2", "--format", "jsonl"]
    both = genctl(*line, "--models", f"{one},{two}")
    assert both.status == 0, both.err
    alone = genctl(*line, "-m", one).records
    assert [{key: row[key] for key in alone[0]} for row in both.records] == alone  # the tree is the first one's
    begun = tokenizer()(PROMPT)["input_ids"]
    for row in both.records:
        ids = torch.tensor([*begun, *row["token_ids"]])
        logprobs = tiny("llama", seed=1)(ids[None]).logits[0, len(begun) - 1 : -1].log_softmax(-1)
        theirs = float(logprobs.gather(1, ids[len(begun) :, None]).sum().detach())
        assert row["beside"] == pytest.approx(theirs, abs=1e-4)
    assert any(row["parts"] is not None for row in both.records)
    other = genctl(*line, "--models", f"{one},builtin:numbers")
    assert other.status == 2
    assert "do not have the same tokens" in other.err


def test_a_side_beside_may_be_a_checkpoint_settings_or_both(tmp_path: Path) -> None:
    one, two = (str(checkpoint("llama", tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 1)))
    line = ["explore", PROMPT, "--expand", "mass=0.3,depth=2", "--format", "jsonl"]
    model = genctl(*line, "-m", one, "--beside", two)
    assert model.records == genctl(*line, "--models", f"{one},{two}").records
    both = genctl(*line, "-m", one, "--beside", f"{two}@do_sample=true,temperature=0.5,top_k=0").records
    cold = genctl(*line, "-m", one, "--beside", "@do_sample=true,temperature=0.5,top_k=0").records
    found = [[row["beside"] for row in rows] for rows in (model.records, both, cold)]
    assert found[0] != found[1] != found[2] != found[0]
    same = genctl(*line, "-m", one, "--beside", f"@model={one}").records
    assert [row["beside"] for row in same] == pytest.approx([row["total"] for row in same], abs=1e-5)
    assert genctl(*line, "-m", one, "--beside", "sample@temperature=0.5,top_k=0").records == cold


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("beem", "--beside beem: there is no such strategy; did you mean beam?"),
        ("@top_q=1", "--beside @top_q=1: unknown key top_q; did you mean top_p?"),
        ("openai:http://h", "a tree needs the distribution over all token ids, and a server gives a few"),
        (
            "@temperature=0.5",
            "temperature = 0.5 (--beside @temperature=0.5) has no effect while do_sample is false (flag",
        ),
        ("x=@batch_size=5", "--beside x: batch_size holds for the whole tree"),
        ("@backend=openai:http://h", "backend holds for the whole tree"),
        ("old.jsonl", "and a file of results gives a few"),
    ],
)
def test_what_cannot_be_beside_a_tree_is_refused(side: str, message: str) -> None:
    done = genctl("explore", PROMPT, "--expand", "depth=1", "--no-do-sample", "--beside", side)
    assert done.status == 2
    assert message in " ".join(done.err.split())


def test_a_pipe_has_four_columns() -> None:
    text = genctl("explore", PROMPT, "--expand", "mass=0.4,depth=2", "--beside", "creative")
    assert {len(line.split("\t")) for line in text.out.splitlines()} == {4}
