"""The benchmark's bookkeeping, on tiny checkpoints: what it compares, what it says, and that it is hard to please."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks import (
    checkpoints,
    commands,
    gguf_files,
    host,
    limit,
    main,
    measuring,
    page,
    rows,
    sides,
    table,
    texts,
)
from scripts.benchmarks.work import Ask, Ran, Setup, Side, Unavailable, Work, checked
from tests.versions import cache_of

PLAN = rows.Plan(
    rows.Lengths(new=6, new_large=4, long=24, short=6, source=9, text=60, prompts=5, mixed_in=(3, 9), mixed_out=(2, 6)),
    checkpoints.gpt2("tiny-gpt2", 300, 64, n_layer=2, n_head=2, n_embd=32),
    checkpoints.qwen2(
        "tiny-qwen2", 300, 64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
    by_position=checkpoints.gpt2("tiny-large", 300, 64, n_layer=2, n_head=2, n_embd=32),
    deep=checkpoints.deep("tiny-deep", 300, 64, hidden_size=32, intermediate_size=64, num_attention_heads=4),
    seq2seq=checkpoints.t5("tiny-t5", 300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
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


@pytest.mark.parametrize("key", ["greedy-Q8_0", "greedy-F16", "qwen-rows5-Q4_0", "qwen-greedy-BF16"])
def test_genctl_and_llama_cpp_read_the_same_gguf_file(key: str, stock: Path) -> None:
    pytest.importorskip("gguf")
    chosen = case(key)
    (form,) = sides.forms(sides.GENCTL, chosen.dtype)
    assert sides.forms(sides.LLAMA, chosen.dtype) == (form,)
    checkpoints.make(chosen.size, "transformers", stock)
    setup = Setup({form: checkpoints.make(chosen.size, form, stock)}, chosen.dtype)
    ran = sides.make(sides.GENCTL, setup).run(chosen.work)
    assert [len(tokens) for tokens in ran.tokens] == [ask.new for ask in chosen.work.asks]
    share = chosen.share(ran, 1e9)
    assert share is not None
    assert share > 0


def test_llama_bench_is_timed_by_its_own_clock_and_has_no_tokens_to_compare(tmp_path: Path) -> None:
    answer = '[{"n_prompt": 6, "n_gen": 0, "avg_ns": 500000000}, {"n_prompt": 0, "n_gen": 5, "avg_ns": 250000000}]'
    program = tmp_path / "llama-bench"
    program.write_text(
        f"#!/bin/sh\n[ \"$1\" = --version ] && echo 'version: 0.6.0-dev (build 11434)' && exit\n"
        f"echo \"$@\" >>{tmp_path}/words\necho '{answer}'\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    side = sides.make(sides.LLAMA, Setup({"gguf": tmp_path}, "float32", "cpu", 2, programs=tmp_path))
    chosen = case("greedy-float32")
    ran = side.run(chosen.work)
    assert (ran.tokens, ran.seconds, ran.first_s) == ((), 0.75, 0.5)
    words = (tmp_path / "words").read_text(encoding="utf-8").split()
    assert words[words.index("-p") + 1] == "6"
    assert words[words.index("-n") + 1] == "5"  # the first token comes with the prompt
    assert host.versions(tmp_path)["llama.cpp"].startswith("0.6.0-dev (build 11434)")
    with pytest.raises(Unavailable, match="one row at a time"):
        side.run(case("rows5-float32").work)
    pair = {sides.GENCTL: Scripted((1, 2, 3, 4, 5, 6), 0.5), sides.LLAMA: side}
    measured = measuring.measure(chosen, pair, rounds=1)
    assert measured.ratios(sides.LLAMA) == [pytest.approx(1.5)]
    assert measured.same(sides.LLAMA) is None
    assert "≠" not in table.markdown([measured])


def test_a_folder_without_llama_bench_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="llama-bench does not run"):
        sides.make(sides.LLAMA, Setup({"gguf": tmp_path}, programs=tmp_path))


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


def test_the_rows_of_a_file_are_asked_where_the_checkpoint_knows_them() -> None:
    text, places = texts.file_of_rows(400, 50_000, 3)
    assert len(places) > 3
    assert places[-1][-1] == len(text) <= 400
    assert [begin for begin, _, _ in places[1:]] == [end for _, _, end in places[:-1]]
    _, work = rows.Plan(lengths=rows.Lengths(text=400)).rows_of_a_file({}, checkpoints.gpt2())
    for ask, (begin, answer, end) in zip(work.asks, places, strict=True):
        assert ask.prompt[begin:] == text[begin:answer]
        assert not set(ask.prompt[:begin]) & set(text)  # nothing is drafted from what lies before
        assert ask.new == end - answer


def test_drafts_are_measured_beside_greedy_search_without_them(stock: Path) -> None:
    (measured,) = measuring.run([case("early-exit")], opener(stock), rounds=1)
    assert set(measured.speeds) == {sides.GENCTL, sides.GENERATE, sides.UNDRAFTED}
    assert measured.same(sides.GENCTL) is measured.same(sides.UNDRAFTED) is True
    assert "the same, genctl without drafts" in table.markdown([measured])


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


def test_decoding_is_timed_from_the_first_token_on() -> None:
    after = replace(case("greedy-float32"), figure="tokens/s after the first")
    ran = Ran(((1, 2, 3, 4, 5, 6),), seconds=3.0, first_s=1.0)
    assert after.value(ran) == pytest.approx(5 / 2)
    assert after.value(Ran(ran.tokens, 3.0)) is None


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


@pytest.mark.parametrize("size", [PLAN.causal, PLAN.large], ids=lambda size: size.name)
def test_what_a_step_reads_is_counted_as_the_model_counts_its_parameters(size: checkpoints.Size, stock: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints.make(size, "transformers", stock))
    named = dict(model.named_parameters())
    assert limit.parameters(size) == sum(weight.numel() for weight in named.values())
    read = [weight.numel() for name, weight in named.items() if weight.ndim == 2 and "wpe" not in name]
    assert sum(limit.matrices(size)) == sum(read)
    assert limit.matrices(size)[1] == model.get_output_embeddings().weight.numel()
    cache = cache_of(model(torch.tensor([PLAN.prompt(7)])))
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    one = Work((Ask(PLAN.prompt(7), 0),))
    assert limit.bytes_read(size, "float32", one) == 4 * (sum(read) + held)


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


def test_where_less_is_better_the_ratio_is_turned_round() -> None:
    whole = case("run")
    pair = {sides.GENCTL: Scripted((1, 2, 3, 4, 5, 6), 2.0), sides.GENERATE: Scripted((1, 2, 3, 4, 5, 6), 5.0)}
    measured = measuring.measure(whole, pair, rounds=2)
    assert measured.speeds == {sides.GENCTL: [2.0, 2.0], sides.GENERATE: [5.0, 5.0]}
    assert measured.ratios(sides.GENERATE) == [2.5, 2.5]


def test_memory_is_said_above_the_weights() -> None:
    class Heavy(Scripted):
        def run(self, work: Work) -> Ran:
            return replace(super().run(work), peak=round(1.25 * 4 * limit.parameters(PLAN.causal)))

    measured = measuring.measure(case("memory"), {sides.GENCTL: Heavy((1, 2, 3, 4, 5, 6), 1.0)}, rounds=1)
    assert cells(table.markdown([measured]).splitlines()[2])[2].endswith("(+25%)")


def test_commands_write_the_same_tokens_and_say_when_the_first_came(stock: Path) -> None:
    folder, work = checkpoints.make(PLAN.causal, "transformers", stock), case("run").work
    ours, plain = (commands.Command(name, folder).run(work) for name in (sides.GENCTL, sides.GENERATE))
    assert ours.tokens == plain.tokens
    assert len(ours.tokens[0]) == 6
    for ran in (ours, plain):
        assert ran.first_s is not None
        assert 0 < ran.first_s <= ran.seconds
    with pytest.raises(Unavailable):
        commands.Command(sides.LLAMA, folder)


def test_a_competing_process_runs_until_the_command_has_ended() -> None:
    assert case("busy").beside == 1
    with commands.competing(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.poll() for process in processes)


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with [1-9]"):
        commands.Command(sides.GENCTL, tmp_path / "nothing").run(case("run").work)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_a_side_is_pinned_to_its_cores_whatever_it_inherits() -> None:
    before, cores = os.sched_getaffinity(0), host.cores()
    assert len(cores) == len(set(cores)) >= 1
    try:
        os.sched_setaffinity(0, {max(before)})
        assert host.cores() == cores  # a mask that was inherited does not count
        with host.pinned(cores):
            assert os.sched_getaffinity(0) == set(cores)
        assert os.sched_getaffinity(0) == {max(before)}
        theirs, ours = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_pinned, args=(theirs, cores))
        process.start()
        assert ours.recv()[0] == "unavailable"
        assert ours.recv() == set(cores)
        process.join()
    finally:
        os.sched_setaffinity(0, before)


def _pinned(pipe: Any, cores: tuple[int, ...]) -> None:
    sides._serve(pipe, sides.LLAMA, Setup({}, "float32", "cpu", 1, True, cores))
    pipe.send(os.sched_getaffinity(0))


def test_a_side_that_cannot_be_opened_does_not_end_the_run() -> None:
    def broken(case: rows.Case, name: str) -> Side:
        if name == sides.CTRANSLATE2:
            raise KeyError("a name that moved")
        return Scripted((1, 2, 3, 4, 5, 6), 1.0)

    (measured,) = measuring.run([case("greedy-float32")], broken, rounds=1)
    assert measured.failed == {sides.CTRANSLATE2: "failed: 'a name that moved'"}
    assert cells(table.markdown([measured]).splitlines()[2])[4] == "failed"
    assert main.status([measured]) == 1


def test_tensors_have_the_names_that_llama_cpp_reads() -> None:
    gpt2, qwen2 = gguf_files.NAMES["gpt2"], gguf_files.NAMES["qwen2"]
    assert gguf_files.tensor_name("transformer.h.3.attn.c_attn.bias", gpt2) == "blk.3.attn_qkv.bias"
    assert gguf_files.tensor_name("transformer.ln_f.weight", gpt2) == "output_norm.weight"
    assert gguf_files.tensor_name("model.layers.11.mlp.gate_proj.weight", qwen2) == "blk.11.ffn_gate.weight"
    assert gguf_files.tensor_name("model.embed_tokens.weight", qwen2) == "token_embd.weight"
    assert gguf_files.tensor_name("model.norm.weight", qwen2) == "output_norm.weight"


WIDE = checkpoints.gpt2("wide-gpt2", 300, 64, n_layer=1, n_head=4, n_embd=256)  # rows of whole K blocks


@pytest.mark.parametrize(
    ("size", "form"),
    [
        pytest.param(size, form, id=f"{size.name}-{form}")
        for form in gguf_files.FORMS
        for size in ([WIDE] if form.endswith("k") else [PLAN.causal, PLAN.large])
    ],
)
def test_a_gguf_file_holds_every_tensor(size: checkpoints.Size, form: str, stock: Path) -> None:
    gguf = pytest.importorskip("gguf")
    checkpoints.make(size, "transformers", stock)
    reader = gguf.GGUFReader(checkpoints.make(size, form, stock) / "model.gguf")
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == limit.parameters(size)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == gguf_files.FORMS[form][0]
    assert kinds["token_embd.weight"] == ("Q8_0" if form[-1] in "4k" else gguf_files.FORMS[form][0])


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_K"), (5, "Q5_K")])
def test_k_blocks_are_near_the_numbers_that_they_hold(bits: int, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    rows = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    rows[1], rows[2, 256:] = 0, rows[2, 256:].abs() + 1  # nothing to divide by; no number below 0
    raw = gguf_files.k_blocks(rows.numpy(), bits)
    found = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    step = (rows.amax(1) - rows.amin(1).clamp(max=0)) / (2**bits - 1)
    assert ((found - rows).abs().amax(1) <= step).all()


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
    assert [case.key for case in rows.cases(PLAN, ["compare"])] == ["compare"]
    assert {case.size.name for case in rows.cases(PLAN, ["qwen"])} == {"tiny-qwen2"}
    assert rows.cases(PLAN, ["nothing"]) == []


def test_the_page_keeps_everything_around_the_table(tmp_path: Path) -> None:
    file = tmp_path / "performance.md"
    file.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n", encoding="utf-8")
    page.update(file, "new")
    assert file.read_text(encoding="utf-8") == f"before\n{page.BEGIN}\n\nnew\n\n{page.END}\nafter\n"
    file.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match=r"performance\.md does not have"):
        page.update(file, "new")


def test_a_table_of_some_rows_does_not_replace_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--update-docs", "--only", "greedy"])
    assert "--update-docs wants the whole table" in capsys.readouterr().err


def test_a_row_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--only", "gredy"])
    assert "there is no such row" in capsys.readouterr().err
