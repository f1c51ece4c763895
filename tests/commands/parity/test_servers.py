"""`genctl parity` with servers as sides: a stand-in that answers with what a checkpoint computes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genctl.commands.parity.gate import check_golden, compare
from genctl.decode.runtime import Pass
from genctl.engines.server import failure
from genctl.errors import UsageError
from genctl.models.text import detokenizer
from genctl.parity.sides import LocalSide
from tests.cli.tool import Done, genctl
from tests.commands.parity.test_parity_command import counted
from tests.engines.server.stand_in import Body, Failure, running
from tests.parity.sides import side
from tests.tiny import checkpoint

pytestmark = pytest.mark.usefixtures("clean_environment")

STORIES = "builtin:stories"
Change = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "FIRST_S", 0.001)


@cache
def served(dtype: str = "float32") -> LocalSide:
    return side(STORIES, dtype=dtype)


class Model:
    """Answers as a server with this checkpoint does; `change` is done to the logits f32 [N, V] of every answer."""

    def __init__(self, change: Change = lambda logits: logits, dtype: str = "float32", most: int = 20) -> None:
        session = served(dtype).session
        self.forward, self.tokenizer = session.forward, session.loaded.tokenizer
        self.change, self.most, self.lock = change, most, threading.Lock()
        self.piece = detokenizer(self.tokenizer).piece

    def logprobs(self, ids: list[int]) -> Tensor:
        logits = self.forward(Pass(torch.tensor([ids]), None, first=True, keep=len(ids))).logits[0]
        return self.change(logits.float().clone()).double().log_softmax(-1)

    def __call__(self, body: Body) -> Body:
        with self.lock, torch.inference_mode():
            return self.answer(body)

    def answer(self, body: Body) -> Body:
        prompt = body["prompt"]
        ids = list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
        echo, begin = body.get("echo", False), len(ids)
        for _ in range(body["max_tokens"]):
            ids.append(int(self.logprobs(ids)[-1].argmax()))
        rows = [None, *self.logprobs(ids)[:-1]]
        first = 0 if echo else begin
        told = [(self.piece(id), row, id) for id, row in zip(ids, rows, strict=True)][first:]
        top = min(body.get("logprobs") or 0, self.most)
        best = [None if row is None else row.topk(max(top, 1)) for _, row, _ in told]
        logprobs = {
            "tokens": [text for text, _, _ in told],
            "token_logprobs": [None if row is None else float(row[id]) for _, row, id in told],
            "top_logprobs": [
                None if one is None else {self.piece(int(id)): float(v) for v, id in zip(*one, strict=True)}
                for one in best
            ],
        }
        text = "".join(logprobs["tokens"])
        return {"choices": [{"index": 0, "text": text, "finish_reason": "length", "logprobs": logprobs}]}


def parity(url: str, *words: str, n: int = 4) -> Done:
    return genctl("parity", f"{STORIES}@dtype=float32", url, "Once upon a time", "The dog", "-n", str(n), *words)


def pair_of(done: Done) -> dict[str, Any]:
    return next(record for record in done.records if record["kind"] == "pair")


def scaled(by: float) -> Change:
    return lambda logits: logits * by


def test_an_equal_server_is_no_defect_and_kl_is_said_to_be_bounded() -> None:
    with running(answers=Model()) as server:
        done = parity(server.url, "--format", "jsonl", "--positions")
    assert done.status == 0, done.err
    pair = pair_of(done)
    assert (pair["verdict"], pair["parted"], pair["positions"]) == ("tie", 0, 8)
    assert pair["kl"]["max"] < 1e-5
    assert pair["kl_high"]["max"] is None
    assert pair["perplexity_other"]["value"] == pytest.approx(pair["perplexity_reference"]["value"], rel=1e-5)
    assert pair["noise"]["changed"] == 0
    assert any("bounded from below" in note for note in pair["notes"])
    assert any("that of the reference is assumed" in note for note in pair["notes"])
    positions = [record for record in done.records if record["kind"] == "position"]
    assert all(one["kl_bounds"]["high"] is None and one["rank_in_other"] == 1 for one in positions)


@pytest.mark.parametrize(("by", "verdict"), [(1.0, "tie"), (1.05, "defect")])
def test_a_server_without_echo_is_compared_by_what_it_writes(by: float, verdict: str, tmp_path: Path) -> None:
    def mute(server: Any, body: Body) -> Failure | None:
        return Failure(400, b'{"error": {"message": "no echo"}}') if body.get("echo") else None

    texts = tmp_path / "texts.txt"  # which nobody writes greedily
    texts.write_text("Once upon a time there was a dog.\nA girl ran to the big tree.\n")
    with running(answers=Model(scaled(by)), fault=mute) as server:
        words = ("parity", f"{STORIES}@dtype=float32", server.url, "--texts", str(texts), "--format", "jsonl")
        done = genctl(*words, "--positions", "--allow-defect")
    assert done.status == 0, done.err
    pair = pair_of(done)
    assert pair["verdict"] == verdict
    assert any("the server echoes no prompt" in note for note in pair["notes"])
    positions = [record for record in done.records if record["kind"] == "position"]
    assert len(positions) == pair["positions"] > 10
    known = [one for one in positions if one["logprob_other"] is not None]
    assert 5 < len(known) < len(positions)
    near = all(abs(one["logprob_other"] - one["logprob_reference"]) < 1e-4 for one in known)
    assert near is (verdict == "tie")


def test_a_server_that_takes_no_ids_is_sent_texts() -> None:
    with running(answers=Model(), ids=False) as server:
        done = parity(server.url, "--format", "jsonl")
        assert pair_of(done)["verdict"] == "tie", done.err
        assert all(isinstance(body["prompt"], str) for body in server.asked if body.get("max_tokens", 1) > 2)


def test_a_fault_is_a_defect_and_its_bound_holds() -> None:
    with running(answers=Model(scaled(1.05))) as server:
        done = parity(server.url, "--format", "jsonl", "--positions", "--max-kl", "1e-9")
    assert done.status == 4
    pair = pair_of(done)
    assert pair["verdict"] == "defect"
    assert any("the mean KL of" in check and "at least" in check for check in pair["failed_checks"])
    exact = {
        (one["id"], one["index"]): one["kl"] for one in done.records if one["kind"] == "position"
    }  # the lower bounds
    mine, faulty = Model(), Model(scaled(1.05))
    ids = list(mine.tokenizer("Once upon a time")["input_ids"])
    for index in range(4):
        p, q = mine.logprobs(ids)[-1], faulty.logprobs(ids)[-1]
        kl = float((p.exp() * (p - q)).sum())
        assert 0.5 * kl - 1e-5 <= exact["0", index] <= kl + 1e-5
        ids.append(int(p.argmax()))


def test_a_fault_in_tokens_that_are_not_listed_is_seen() -> None:
    def swollen(logits: Tensor) -> Tensor:
        low = logits < logits.topk(40).values[:, -1:]
        return torch.where(low, logits + 1.0, logits)

    with running(answers=Model(swollen)) as server:
        assert parity(server.url, "--format", "jsonl").status == 4


def test_changing_answers_are_found_out_and_are_no_tie() -> None:
    turn = [0]

    def restless(logits: Tensor) -> Tensor:
        turn[0] += 1
        return logits * (1 + 0.02 * (turn[0] % 3 - 1))

    with running(answers=Model(restless)) as server:
        done = parity(server.url, "--format", "jsonl")
        shown = parity(server.url, "--allow-defect")
    pair = pair_of(done)
    assert pair["noise"]["changed"] > 0.001
    assert any(note.startswith("the server changes its answers: asked twice") for note in pair["notes"])
    assert pair["verdict"] != "tie"
    assert "the server changes its answers" in " ".join(shown.out.split())


def test_a_server_that_writes_another_text_parts() -> None:
    def other(logits: Tensor) -> Tensor:
        logits[-1, int(logits[-1].argmax())] -= 30.0  # what is written, and not what is read
        return logits

    with running(answers=Model(other)) as server:
        done = parity(server.url, "--format", "jsonl", n=3)
    parted = [record for record in done.records if record["kind"] == "parting"]
    assert done.status == 4
    assert len(parted) == 2
    assert {one["index"] for one in parted} == {0}
    assert all(one["verdict"] == "defect" and one["token_reference"] != one["token_other"] for one in parted)


def test_a_declared_dtype_explains_drift() -> None:
    with running(answers=Model(dtype="bfloat16")) as server:
        assert parity(server.url, n=2).status == 4
        done = parity(f"{server.url}@dtype=bfloat16", "--format", "jsonl", n=2)
    assert done.status == 0, done.err
    pair = pair_of(done)
    assert pair["verdict"] == "drift"
    assert not any("is assumed" in note for note in pair["notes"])


def test_a_server_that_gives_five_tokens_is_asked_for_five() -> None:
    def fault(server: Any, body: Body) -> Failure | None:
        return Failure(400, b'{"error": {"message": "at most 5"}}') if (body.get("logprobs") or 0) > 5 else None

    with running(answers=Model(most=5), fault=fault) as server:
        assert pair_of(parity(server.url, "--format", "jsonl"))["verdict"] == "tie"


def test_another_tokenizer_is_refused_with_the_first_difference() -> None:
    model = Model()
    ids, piece = model.tokenizer("Once upon a time")["input_ids"], model.piece
    model.piece = lambda id: "hour" if id == ids[-1] else piece(id)
    with running(answers=model) as server:
        done = parity(server.url)
    assert done.status == 3
    said = f"token {len(ids)} of text 1 is “hour”, and that of builtin:stories@dtype=float32 “{piece(ids[-1]).strip()}”"
    assert said in " ".join(done.err.split())


def test_a_table_and_tsv_say_that_kl_is_a_bound() -> None:
    with running(answers=Model()) as server:
        table = parity(server.url, f"{STORIES}@pack=false", n=2).out
        tsv = parity(server.url, "--format", "tsv", n=2).out.splitlines()
    assert next(line for line in table.splitlines() if line.startswith("openai:")).count("≥ ") == 2
    assert dict(zip(tsv[0].split("\t"), tsv[1].split("\t"), strict=True))["kl_bounded"] == "true"


def test_a_page_has_the_distributions_of_the_server(tmp_path: Path) -> None:
    with running(answers=Model(scaled(1.05))) as server:
        done = parity(server.url, "--allow-defect", "--report", str(tmp_path / "page.html"))
    assert done.status == 0, done.err
    page = (tmp_path / "page.html").read_text()
    assert "at least" in page
    assert "nan" not in page.lower().split("<body", 1)[-1].split("</style>")[-1]


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"logprobs": False}, "parity needs log-probabilities, but the server gives no log-probabilities"),
    ],
)
def test_a_server_that_cannot_tell_is_refused(about: Body, words: str) -> None:
    with running(**about) as server:
        done = parity(server.url)
    assert done.status == 3
    assert words in done.err
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("openai:http://127.0.0.1:1", STORIES, "x y"), "the reference's whole distribution is needed"),
        ((STORIES, "openai:http://127.0.0.1:1", "--layers", "x y"), "no server tells of its layers"),
        (("openai:http://127.0.0.1:1", "--expect", "f"), "both tell the best tokens alone"),
        ((STORIES, "openai:http://127.0.0.1:1@tokenizer=x", "x y"), "so tokenizer has no effect"),
        ((STORIES, "openai:http://127.0.0.1:1@dtype=bfloat16", "--by-text", "x y"), "--by-text compares none"),
    ],
)
def test_what_a_server_cannot_be_asked_is_refused(words: tuple[str, ...], message: str) -> None:
    done = genctl("parity", *words)
    assert done.status == 2
    assert message in " ".join(done.err.split())
    assert done.err.startswith("error: ")


def test_a_server_without_a_password_is_named_in_full() -> None:
    """The port was taken for a password: openai:http://(secret)@tokenizer=x."""
    done = genctl("parity", STORIES, "openai:http://127.0.0.1:1@tokenizer=x", "x y")
    assert "side openai:http://127.0.0.1:1@tokenizer=x: " in " ".join(done.err.split())
    hidden = genctl("parity", STORIES, "openai:http://me:sesame@127.0.0.1:1@tokenizer=x", "x y")
    assert "sesame" not in hidden.err
    assert "openai:http://(secret)@127.0.0.1:1@tokenizer=x: " in " ".join(hidden.err.split())


@pytest.mark.parametrize("by_text", [True, False])
def test_the_model_of_a_side_is_that_which_a_server_is_asked_for(by_text: bool) -> None:
    """It was ignored: the server was asked for its first model."""
    words = ["--by-text"] if by_text else []
    with running(answers=Model(), models=("first", "second")) as server:
        done = parity(f"{server.url}@model=second", *words, n=2)
        assert done.status == 0, done.err
        named = {one["model"] for one in server.asked if "prompt" in one}
        unknown = parity(f"{server.url}@model=third", *words, n=2)
    assert named == {"second"}
    assert unknown.status == 3
    assert "third" in unknown.err


def test_a_table_shows_infinite_bounds() -> None:
    """They were – , as if they were not known."""
    with running(answers=Model()) as server:
        shown = parity(server.url, n=2).out
    row = next(line for line in shown.splitlines() if line.startswith("KL, at most"))
    assert row.split()[3:] == ["∞"] * 5


def test_three_sides_read_the_reference_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done = counted(monkeypatch, f"{STORIES}@dtype=float32")
    with running(answers=Model()) as server:
        found = parity(f"{STORIES}@dtype=float32,batch_size=1", server.url, "--format", "jsonl")
    assert found.status == 0, found.err
    assert (done[:2], done.count("write")) == (["write", "read"], 1)
    assert len(done) < 10  # the others read a few positions, for the noise


def test_a_server_is_a_side_of_a_gate() -> None:
    """Gates took checkpoints alone."""
    with running(answers=Model()) as server:
        found = compare(f"{STORIES}@dtype=float32", server.url, ["Once upon a time", "The dog"], 4)
    assert (found.verdict, found.other, found.summary.positions) == ("tie", server.url, 8)
    assert found.summary.kl_high is not None
    with running(answers=Model(scaled(1.05))) as server:
        assert compare(f"{STORIES}@dtype=float32", server.url, ["Once upon a time"], 4).verdict == "defect"


def test_gates_that_a_server_cannot_be_say_why(tmp_path: Path) -> None:
    url = "openai:http://127.0.0.1:1"
    with pytest.raises(UsageError, match="and the reference's whole distribution is needed"):
        compare(url, STORIES, ["x y"])
    with pytest.raises(UsageError, match=r"golden mine and openai:http://127\.0\.0\.1:1: both tell the best tokens"):
        check_golden(tmp_path / "mine.jsonl", url, ["x y"], update=True)
    assert not [*tmp_path.iterdir()]


def test_an_encoder_decoder_is_no_reference_of_a_server() -> None:
    with running(answers=Model()) as server:
        done = genctl("parity", "builtin:numbers", server.url, "forty two")
    assert (done.status, done.out) == (3, "")
    sentence = f"error: {server.url}: a server continues texts, and builtin:numbers is an encoder-decoder"
    assert done.err.splitlines() == [sentence]


def test_a_checkpoint_without_a_tokenizer_is_no_reference_of_a_server(tmp_path: Path) -> None:
    folder, rows = checkpoint("llama", tmp_path / "llama"), tmp_path / "rows.jsonl"
    for path in folder.glob("*token*"):
        path.unlink()
    rows.write_text('{"prompt_ids": [5, 6, 7]}\n')
    with running(answers=Model()) as server:
        done = genctl("parity", str(folder), server.url, "-i", str(rows), "-n", "2")
    assert (done.status, done.out) == (3, "")
    sentence = f"error: {server.url}: a server writes tokens as texts, and {folder} has no tokenizer"
    assert done.err.splitlines() == [sentence]


def test_an_unreachable_server_is_status_3() -> None:
    done = parity("openai:http://127.0.0.1:1")
    assert done.status == 3
    assert done.err.startswith("error: ")


def test_the_lower_bound_is_that_of_the_listed_tokens_with_the_rest_as_one() -> None:
    from genctl.engines.server.told import ToldTop
    from genctl.parity.partial import position_of_server

    p = torch.tensor([0.5, 0.3, 0.1, 0.1])
    told = ToldTop(0, math.log(0.4), ((0, math.log(0.4)), (1, math.log(0.4))))
    one = position_of_server(("t", 0, 0), p.log(), told)
    assert one.kl == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4), abs=1e-5)
    assert one.kl_bounds is not None
    assert one.kl_bounds.high == math.inf
    assert (one.same, one.rank_in_other) == (True, 1)
