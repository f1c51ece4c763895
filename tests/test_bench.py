"""The benchmark's bookkeeping, on tiny checkpoints: what it compares, what it reports, and that it is strict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks import checkpoints, limit, main, measuring, page, rows, sides, table
from scripts.benchmarks.work import Ran, Setup, Side, Unavailable, Work

PLAN = rows.Plan(
    rows.Lengths(new=6, new_large=4, long=24, short=6, source=9, text=90, prompts=5, mixed_in=(3, 9), mixed_out=(2, 6)),
    checkpoints.gpt2("tiny-gpt2", 300, 160, n_layer=2, n_head=2, n_embd=32),
    checkpoints.qwen2(
        "tiny-qwen2", 300, 160, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
    by_position=checkpoints.gpt2("tiny-large", 300, 160, n_layer=2, n_head=2, n_embd=32),
    deep=checkpoints.deep("tiny-deep", 300, 160, hidden_size=32, intermediate_size=64, num_attention_heads=4),
    seq2seq=checkpoints.t5("tiny-t5", 300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for checkpoints. Restores the number of threads, which sides set, at the end."""
    threads = torch.get_num_threads()
    yield tmp_path_factory.mktemp("checkpoints")
    torch.set_num_threads(threads)


def opener(folder: Path, absent: tuple[str, ...] = ()) -> Any:
    """A function that opens sides for `measuring.run`: in this process, genctl and transformers only."""

    def open_side(case: rows.Case, name: str) -> Side:
        if name in (sides.CTRANSLATE2, sides.LLAMA, *absent):
            raise Unavailable("not installed")
        made = {"transformers": checkpoints.make(case.size, "transformers", folder)}
        return sides.make(name, Setup(made, case.dtype_of(name), "cpu", 1, case.size.encoder_decoder))

    return open_side


class Scripted:
    """A side that returns chosen tokens at once, and claims to have taken a chosen number of seconds."""

    def __init__(self, tokens: tuple[int, ...], seconds: float, works: int = 99) -> None:
        self.tokens, self.seconds, self.works = tokens, seconds, works

    def run(self, work: Work) -> Ran:
        self.works -= 1
        if self.works < 0:
            raise RuntimeError("Traceback …\nout of paper")
        return Ran(tuple(self.tokens[: ask.new] for ask in work.asks), self.seconds, self.seconds / 2)


def case(key: str) -> rows.Case:
    return next(case for case in rows.cases(PLAN) if case.key == key)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("key", ["greedy-float32", "qwen-rows5-float32", "mixed", "t5-beam4", "compare"])
def test_a_row_is_measured_for_genctl_and_generate_and_their_tokens_are_equal(key: str, stock: Path) -> None:
    (measured,) = measuring.run([case(key)], opener(stock, (sides.CONTINUOUS,)), rounds=2)
    assert set(measured.speeds) == {sides.GENCTL, sides.GENERATE}
    assert measured.same(sides.GENCTL) is True
    assert not measured.wrong
    assert not measured.failed
    assert [len(tokens) for tokens in measured.tokens[sides.GENCTL]] == [ask.new for ask in measured.case.work.asks]
    head, rule, row, *_ = table.markdown([measured]).splitlines()
    assert len(cells(head)) == len(cells(rule)) == len(cells(row)) == 11
    assert cells(row)[0] == measured.case.title
    assert cells(row)[-1] == "yes"
    assert cells(row)[4:6] == ["–", "–"]
    entry = table.record(measured)
    assert entry["tokens_equal"] is True
    assert len(entry["sides"][sides.GENERATE]["rounds"]) == 2
    assert {"median", "min", "max"} == set(entry["sides"][sides.GENERATE]["ratio"])


@pytest.mark.parametrize(
    "key", ["drafts-code-1-float32", "drafts-json-1-float32", "drafts-summary-1-int8", "large-drafts-rows-1-float32"]
)
def test_a_checkpoint_writes_the_text_that_it_knows_by_heart(key: str, stock: Path) -> None:
    (measured,) = measuring.run([case(key)], opener(stock), rounds=1)
    assert measured.tokens[sides.GENCTL] == measured.tokens[sides.UNDRAFTED]
    count = len(measured.case.work.asks)
    assert measured.kept() == (count, count)
    assert f"texts that are with drafts what they are without: {count} of {count}" in table.markdown([measured])
    text = measured.case.size.by_heart
    for ask, written in zip(measured.case.work.asks, measured.tokens[sides.GENCTL], strict=True):
        assert (*ask.prompt, *written) == text[: len(ask.prompt) + len(written)]


def test_a_wrong_token_is_reported() -> None:
    right, wrong = (5, 6, 7, 8, 9, 10), (5, 6, 7, 8, 9, 11)
    pair = {sides.GENCTL: Scripted(wrong, 1.0), sides.GENERATE: Scripted(right, 2.0)}
    measured = measuring.measure(case("greedy-float32"), pair, rounds=2)
    assert measured.wrong
    assert cells(table.markdown([measured]).splitlines()[2])[-1] == "no"
    assert table.record(measured)["tokens_equal"] is False
    assert main.status([measured]) == 1
    pair[sides.GENCTL] = Scripted(right, 1.0)
    measured = measuring.measure(case("greedy-float32"), pair, rounds=2)
    assert not measured.wrong
    assert main.status([measured]) == 0


@pytest.mark.parametrize("key", ["qwen-greedy-bfloat16", "qwen-rows5-int8", "greedy-int4"])
def test_short_types_give_as_many_tokens_and_are_not_compared(key: str, stock: Path) -> None:
    (measured,) = measuring.run([case(key)], opener(stock), rounds=1)
    assert set(measured.speeds) == {sides.GENCTL, sides.GENERATE}
    assert not measured.failed
    assert measured.same(sides.GENCTL) is None
    row = cells(table.markdown([measured], 1e9).splitlines()[2])
    assert row[-1] == ""
    assert row[-2].endswith("%")
    assert ("(float32)" in row[3]) == ("int" in key)
    assert table.record(measured, 1e9)["share_of_limit"] == measured.share(1e9)


def test_the_limit_of_known_checkpoints() -> None:
    plan = rows.Plan()
    assert limit.parameters(plan.causal) == 124_439_808  # GPT-2 small's own number
    assert limit.parameters(plan.large) == 494_032_768  # Qwen2.5-0.5B's
    work = plan.rows(1, 32, 64)
    gpt2, cache = 12 * 12 * 768 * 768, 64 * 12 * 2 * 768  # 32 + 64 / 2 tokens
    assert limit.bytes_read(plan.causal, "float32", work) == 4 * (gpt2 + 50257 * 768 + cache)
    assert limit.bytes_read(plan.causal, "bfloat16", work) == 2 * (gpt2 + 50257 * 768 + cache)
    assert limit.bytes_read(plan.causal, "int8", work) == gpt2 + 50257 * 768 + 4 * cache
    assert limit.bytes_read(plan.causal, "int4", work) == 0.625 * gpt2 + 50257 * 768 + 4 * cache
    several = plan.rows(16, 32, 64)
    assert limit.bytes_read(plan.causal, "float32", several) == 4 * (gpt2 + 50257 * 768 + 16 * cache)


def test_the_share_is_of_a_step_after_the_first_and_only_where_steps_dominate() -> None:
    chosen = case("greedy-float32")
    read = limit.bytes_read(chosen.size, "float32", chosen.work)
    ran = Ran(((1, 2, 3, 4, 5, 6),), seconds=3.0, first_s=0.5)  # 5 steps of 0.5 s
    assert chosen.share(ran, bandwidth=read) == pytest.approx(1 / 0.5)
    assert chosen.share(ran, bandwidth=4 * read) == pytest.approx(0.5)
    assert case("beam5-float32").share(ran, read) is None
    side = Scripted((1, 2, 3, 4, 5, 6), 2.0)  # half of it until the first token: steps of 0.2 s
    measured = measuring.measure(chosen, {sides.GENCTL: side}, rounds=1)
    assert cells(table.markdown([measured], 10 * read).splitlines()[2])[-2] == "50%"
    assert cells(table.markdown([measured]).splitlines()[2])[-2] == "–"


def test_the_page_keeps_everything_around_the_table(tmp_path: Path) -> None:
    file = tmp_path / "performance.md"
    file.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n", encoding="utf-8")
    page.update(file, "new")
    assert file.read_text(encoding="utf-8") == f"before\n{page.BEGIN}\n\nnew\n\n{page.END}\nafter\n"
    file.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match=r"performance\.md does not have"):
        page.update(file, "new")
