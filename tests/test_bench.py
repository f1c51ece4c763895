"""The benchmark's bookkeeping, on tiny checkpoints: what it compares, what it says, and that it is hard to please."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks import checkpoints, curves, main, measuring, readme, rows, sides, table
from scripts.benchmarks.work import Ask, Ran, Setup, Side, Unavailable, Work, checked

PLAN = rows.Plan(
    rows.Lengths(new=6, long=24, short=6, source=9, prompts=5, mixed_in=(3, 9), mixed_out=(2, 6)),
    checkpoints.gpt2("tiny-gpt2", 300, 64, n_layer=2, n_head=2, n_embd=32),
    checkpoints.t5("tiny-t5", 300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for checkpoints; the number of threads, which sides set, is as before afterwards."""
    threads = torch.get_num_threads()
    yield tmp_path_factory.mktemp("checkpoints")
    torch.set_num_threads(threads)


def opener(folder: Path, absent: tuple[str, ...] = ()) -> Any:
    """How `measuring.run` gets its sides: in this process, genctl and transformers only."""

    def open_side(case: rows.Case, name: str) -> Side:
        if name in (sides.CTRANSLATE2, sides.LLAMA, *absent):
            raise Unavailable("not installed")
        made = {"transformers": checkpoints.make(case.size, "transformers", folder)}
        return sides.make(name, Setup(made, case.dtype_of(name), "cpu", 1, case.size.encoder_decoder))

    return open_side


class Scripted:
    """A side that answers at once with tokens of our choice, in seconds of our choice."""

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


@pytest.mark.parametrize("key", ["greedy-float32", "mixed", "t5-beam4", "compare-beam"])
def test_a_row_is_measured_for_genctl_and_generate_and_their_tokens_are_equal(key: str, stock: Path) -> None:
    (measured,) = measuring.run([case(key)], opener(stock, (sides.CONTINUOUS,)), rounds=2)
    assert set(measured.speeds) == {sides.GENCTL, sides.GENERATE}
    assert measured.same(sides.GENCTL) is True
    assert not measured.wrong
    assert not measured.failed
    assert [len(tokens) for tokens in measured.tokens[sides.GENCTL]] == [ask.new for ask in measured.case.work.asks]
    head, rule, row, *_ = table.markdown([measured]).splitlines()
    assert len(cells(head)) == len(cells(rule)) == len(cells(row)) == 10
    assert cells(row)[0] == measured.case.title
    assert cells(row)[-1] == "yes"
    assert cells(row)[4:6] == ["–", "–"]
    entry = table.record(measured)
    assert entry["tokens_equal"] is True
    assert len(entry["sides"][sides.GENERATE]["rounds"]) == 2
    assert {"median", "min", "max"} == set(entry["sides"][sides.GENERATE]["ratio"])


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


def test_tokens_that_change_from_round_to_round_are_not_equal() -> None:
    class Moody(Scripted):
        def run(self, work: Work) -> Ran:
            self.tokens = (*self.tokens[1:], self.tokens[0])
            return super().run(work)

    moody = Moody((1, 2, 3, 4, 5, 6), 1.0)
    always = Scripted((4, 5, 6, 1, 2, 3), 1.0)  # what the other writes in its first round, after two for warming up
    measured = measuring.measure(case("greedy-float32"), {sides.GENCTL: moody, sides.GENERATE: always}, rounds=1)
    assert measured.same(sides.GENCTL) is True
    moody.tokens = (1, 2, 3, 4, 5, 6)
    measured = measuring.measure(case("greedy-float32"), {sides.GENCTL: moody, sides.GENERATE: always}, rounds=2)
    assert measured.same(sides.GENCTL) is False


def test_ratios_compare_within_a_round_and_targets_are_held_against_their_median() -> None:
    right = (1, 2, 3, 4, 5, 6)
    fast, slow = Scripted(right, 1.0), Scripted(right, 2.0)
    measured = measuring.measure(case("greedy-float32"), {sides.GENCTL: fast, sides.GENERATE: slow}, rounds=3)
    assert measured.ratios(sides.GENERATE) == [2.0, 2.0, 2.0]
    assert measured.missed() == {sides.GENERATE: 2.3}
    assert "2.00 (2.00–2.00)" in table.markdown([measured])


def test_a_side_that_fails_is_left_out_and_said() -> None:
    right = (1, 2, 3, 4, 5, 6)
    pair = {sides.GENCTL: Scripted(right, 1.0), sides.GENERATE: Scripted(right, 1.0, works=2)}
    measured = measuring.measure(case("greedy-float32"), pair, rounds=3)
    assert measured.failed == {sides.GENERATE: "failed: out of paper"}
    assert sides.GENERATE not in measured.speeds
    assert "- generate(): failed: out of paper" in table.markdown([measured])
    assert main.status([measured]) == 1


def test_a_side_that_takes_minutes_is_ended_and_said() -> None:
    context = multiprocessing.get_context("spawn")
    side = sides.Process.__new__(sides.Process)
    side.pipe, _theirs = context.Pipe()
    side.process = context.Process(target=time.sleep, args=(60,), daemon=True)
    side.process.start()
    with pytest.raises(Unavailable, match=r"took more than 0\.1 s to warm up"):
        side.run(case("greedy-float32").work, 0.1)
    assert not side.process.is_alive()


def test_fewer_tokens_than_asked_for_are_no_comparison() -> None:
    with pytest.raises(ValueError, match=r"\[3\] tokens were asked for, \[2\] came"):
        checked(Work((Ask((4, 5), 3),)), Ran(((6, 7),), 1.0))


def test_what_sampling_costs_is_taken_from_greedy_search_beside_it() -> None:
    class Two(Scripted):
        def run(self, work: Work) -> Ran:
            self.seconds = 3.0 if work.samples else 2.0
            return super().run(work)

    sampled = case("topp-1")
    measured = measuring.measure(sampled, {sides.GENCTL: Two((1, 2, 3, 4, 5, 6), 0.0)}, rounds=2)
    assert measured.over_s[sides.GENCTL] == pytest.approx([1 / 6, 1 / 6])
    assert "166.67 ms (+50 %)" in table.markdown([measured])


def test_decoding_is_timed_from_the_first_token_on() -> None:
    after = case("decode-float32")
    ran = Ran(((1, 2, 3, 4, 5, 6),), seconds=3.0, first_s=1.0)
    assert after.speed(ran) == pytest.approx(5 / 2)
    assert after.speed(Ran(ran.tokens, 3.0)) is None


def test_padded_batches_hold_neighbours_with_equal_knobs() -> None:
    asks = (Ask((1,), 1), Ask((2,), 1), Ask((3,), 1), Ask((4,), 1, {"num_beams": 2}))
    assert [len(group) for group in Work(asks, 2).groups()] == [2, 1, 1]


def test_no_special_token_is_ever_the_best(stock: Path) -> None:
    from transformers import AutoModelForCausalLM

    place = checkpoints.make(PLAN.causal, "transformers", stock)
    model = AutoModelForCausalLM.from_pretrained(place)
    head = model.get_output_embeddings().weight
    assert not head[: len(checkpoints.SPECIAL)].any()
    with torch.no_grad():
        logits = model(torch.tensor([PLAN.prompt(24)])).logits[0]
    assert logits.argmax(-1).min() >= len(checkpoints.SPECIAL)
    assert 2.0 < float(logits.std()) < 8.0


def test_every_case_has_a_key_of_its_own_and_can_be_chosen() -> None:
    keys = [case.key for case in rows.cases(PLAN)]
    assert len(keys) == len(set(keys))
    assert [case.key for case in rows.cases(PLAN, ["compare"])] == ["compare", "compare-beam"]
    assert rows.cases(PLAN, ["nothing"]) == []


def test_a_curve_has_a_value_for_each_side_that_is_there(stock: Path) -> None:
    bench = curves.Bench(opener(stock), lambda size: stock, PLAN, 1, "cpu", True, lambda line: None)
    (curve,) = curves.rows(bench)
    assert set(curve.lines) == {sides.GENCTL, sides.GENERATE}
    assert all(len(values) == len(curve.points) for values in curve.lines.values())
    assert len({len(cells(line)) for line in curve.markdown().splitlines()}) == 1


def test_the_readme_keeps_everything_around_the_table(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n", encoding="utf-8")
    readme.update(page, "new")
    assert page.read_text(encoding="utf-8") == f"before\n{readme.BEGIN}\n\nnew\n\n{readme.END}\nafter\n"
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match=r"README\.md does not have"):
        readme.update(page, "new")


def test_a_table_of_some_rows_does_not_replace_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--update-readme", "--only", "greedy"])
    assert "--update-readme wants the whole table" in capsys.readouterr().err


def test_a_row_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--only", "gredy"])
    assert "there is no such row or curve" in capsys.readouterr().err
