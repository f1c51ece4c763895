"""The number of drafted tokens: what pays, when drafting stops and resumes, and that no clock has an influence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.step_costs import PRICES, PassPlan, PassPrice, never_pays, price_of
from genctl.decode.types import Context, Draft, Prefix
from genctl.params import MOST_DRAFTED, Generation
from genctl.strategies.assisted import LONGEST_PAUSE, PATIENCE, PAUSE, Assisted
from genctl.strategies.drafters import (
    MEMORY,
    SELDOM,
    Drafter,
    ModelDrafter,
    PromptLookup,
    Rate,
    learn,
    promise,
    rate_of,
    seldom,
)
from genctl.strategies.factory import auxiliary_strategy
from tests import runtimes
from tests.decode.driver import PROMPTS, Case
from tests.strategies.assisted.assistants import alike, drafts
from tests.tiny import tiny


class Flat(PassPrice):
    """Each further token of a pass costs `step` more; a draft has no overhead."""

    draft_overhead = 0.0

    def of(self, tokens: int) -> float:
        return 1.0 + self.step * (tokens - 1)


def promised(first: float, later: float, count: int = 20) -> list[float]:
    """How many tokens of a model's draft are expected to be accepted, for each length."""
    return promise([Rate.guess(first), *[Rate.guess(later)] * (count - 1)])


def best(price: float, draft: float, rate: float, most: int = 20, rows: int = 1) -> int:
    return PassPlan(Flat("flat", price), rows, cached=True).best(promised(rate, rate, most), draft)


# -- arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_with_one_rate_what_a_draft_promises_is_that_of_leviathan(rate: float, count: int) -> None:
    expected = (1 - rate ** (count + 1)) / (1 - rate)
    assert 1 + promised(rate, rate)[count - 1] == pytest.approx(expected)


def test_first_and_later_tokens_have_rates_of_their_own() -> None:
    first, later = Rate.guess(0.25), Rate.guess(0.5)
    draft = [first, later, later, later]
    assert promise(draft[:3])[-1] == pytest.approx(0.25 + 0.25 * 0.5 + 0.25 * 0.5 * 0.5)
    learn(draft, 3)  # one first token right; two later ones right, one wrong
    assert first.value == pytest.approx((0.25 * MEMORY + 1) / (MEMORY + 1))
    expected = Rate.guess(0.5)
    expected.observe(2, 1)
    learn(draft, 0)  # nothing is learnt about later ones
    assert later.value == pytest.approx(expected.value)


def test_longer_and_steadier_contexts_are_trusted_more_and_each_is_judged_apart() -> None:
    known: dict[int, Rate] = {}
    rate = lambda length, state: rate_of(known, length, state, own=True)  # noqa: E731
    steady, changed = 3 << 2, 1
    assert rate(1, 0).value < rate(2, 0).value < rate(8, 0).value
    assert rate(2, changed).value < rate(2, 0).value < rate(2, steady).value
    for _ in range(200):
        learn([rate(2, 0)], 0)
        learn([rate(8, 0)], 1)
    assert rate(2, 0).value < 0.1 < 0.9 < rate(8, 0).value
    assert rate_of(known, 2, 0, own=False).value == rate_of({}, 2, 0, own=False).value


def test_newer_trials_weigh_more() -> None:
    ended, began = Rate.guess(0.5), Rate.guess(0.5)
    began.observe(5, 5)
    ended.observe(0, 5)
    ended.observe(5, 0)
    assert began.value < 0.5 < ended.value
    ended.observe(200, 0)
    assert ended.value > 0.999


def test_cheap_passes_and_good_drafts_make_drafts_longer() -> None:
    assert best(0.05, 0.0, 0.9) > best(0.2, 0.0, 0.9) > best(0.2, 0.3, 0.9) > 0
    assert best(0.05, 0.1, 0.9) > best(0.05, 0.1, 0.6) > best(0.05, 0.1, 0.1) == 0
    assert best(0.0, 0.0, 0.9) == 20
    assert best(0.0, 1.0, 0.99) == 0  # a drafter as slow as the model never pays


def test_a_number_that_fits_the_products_is_preferred() -> None:
    """In float32, six tokens in a pass cost little more than one, seven cost much more."""
    plan = PassPlan(PassPrice("float32", 500e6), 1, cached=True)
    assert plan.best(promised(0.75, 0.75)) == 5


def test_beside_many_rows_a_token_more_costs_as_much_as_a_row() -> None:
    price = PassPrice("float32", 500e6)
    assert [never_pays(price, rows) for rows in (1, 8, 12, 21, 64, 128)] == [False] * 3 + [True] * 3
    sure = promised(1.0, 1.0)
    plan = PassPlan(price, 8, cached=True)
    drafted = 0
    while count := plan.best(sure):  # lane after lane adds a draft, until none pays
        plan.take(sure[:count])
        drafted += count
    assert 4 < drafted < 24


# -- stopping and resuming ---------------------------------------------------------------------------------------------


class Told:
    """A drafter that is right or wrong as the test sets it, with or without a cost."""

    kind = "told"

    def __init__(self, cost: float = 0.0) -> None:
        self.right, self.asked = False, 0
        self.rate = Rate.guess(0.5)
        if cost:
            self.forward = SimpleNamespace(pass_price=Flat("flat", cost))

    def begin(self, *arguments: Any) -> Any:
        return self.propose

    def propose(self, text: Sequence[int], count: int) -> Draft:
        self.asked += 1
        return Draft([7 if self.right else 8] * count, rates=[self.rate] * count)


class Rounds:
    """Passes of a lane that writes only sevens."""

    def __init__(self, drafter: Told, price: float) -> None:
        model = SimpleNamespace(pass_price=Flat("flat", price), draft_room=lambda length: 1e9)
        prefix = Prefix(torch.zeros(1, 1, dtype=torch.long), None, torch.zeros(1, 300))
        context = Context(prefix, torch.Generator(), (), 10**6, model)
        self.drafter, self.price = drafter, model.pass_price
        self.drafts = Assisted(cast(Any, drafter)).begin(context)
        self.written = [7]

    def run(self, outcomes: Sequence[bool]) -> list[int]:
        """The number of drafted tokens in each of several passes, whose drafts are right or wrong as a whole."""
        counts = []
        for right in outcomes:
            self.drafter.right = right
            draft = None
            if not self.drafts.rests():
                draft = self.drafts.next(self.written, PassPlan(self.price, 1, cached=True))
                self.written = []
            counts.append(0 if draft is None else len(draft.tokens))
            self.written += [7] * (1 + (counts[-1] if right else 0))
        return counts


def test_drafts_that_are_never_right_stop_and_are_tried_again_ever_more_rarely() -> None:
    passes = Rounds(Told(0.005), 0.05)
    counts = passes.run([False] * 2000)
    tried = [step for step, count in enumerate(counts) if count]
    assert sum(counts[:12]) < 20
    probes = tried[-6:]
    assert {counts[step] for step in probes} == {1}
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(probes)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE
    assert PAUSE in [later - earlier - 1 for earlier, later in itertools.pairwise(tried)]
    extra = sum(0.05 * count + 0.1 * count for count in counts)
    assert extra < 0.005 * len(counts)  # time lost compared with greedy search


def test_drafts_that_are_right_again_are_taken_up_again() -> None:
    passes = Rounds(Told(0.005), 0.05)
    passes.run([False] * 100)
    counts = passes.run([True] * 200)
    assert counts[:LONGEST_PAUSE].count(0) > 0
    assert set(counts[-20:]) == {20}
    assert passes.drafts.pause == PAUSE


def test_a_free_drafter_is_never_tried_in_vain() -> None:
    passes = Rounds(Told(), 0.05)
    passes.drafts.seldom = 8
    assert sum(passes.run([False] * 200)[20:]) == 0  # its drafts are compared, not used,
    assert passes.drafter.asked < PATIENCE + 30  # and not at every step
    assert passes.run([True] * 400)[-1] == 20


def test_it_is_asked_more_seldom_the_shorter_a_step_is() -> None:
    asked = [seldom(PassPrice("float32", step)) for step in (10e6, 100e6, 500e6)]
    assert asked == sorted(asked, reverse=True)
    assert (asked[0], asked[-1]) == (30, 1)
    assert seldom(PassPrice("cached", 1e6)) == SELDOM
    passes = Rounds(Told(), 0.05)
    passes.run([False] * 200)
    assert passes.drafter.asked == 200


# -- prices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", PRICES)
def test_prices_rise_from_one_step_and_stay_below_a_step_for_each_token(form: str) -> None:
    price = PassPrice(form, 100e6)
    prices = [price.of(tokens) for tokens in range(1, 65)]
    assert prices[0] == 1.0
    assert prices == sorted(prices)
    assert all(cost < tokens for tokens, cost in enumerate(prices[1:], 2))


def test_between_the_points_of_the_table_prices_are_linear() -> None:
    (one, low), (six, high), *_ = PRICES["float32"]
    assert (one, six) == (1, 6)
    assert PassPrice("float32", 1e6).of(3) == pytest.approx(low + (high - low) * 2 / 5)
    most, price = PRICES["float32"][-1]
    assert PassPrice("float32", 1e6).of(2 * most) == pytest.approx(2 * price)


def config(**sizes: int) -> Any:
    text = SimpleNamespace(**sizes)
    return SimpleNamespace(get_text_config=lambda decoder: text)


def test_steps_of_models_compare_by_their_sizes() -> None:
    large = price_of(config(hidden_size=768, num_hidden_layers=12, vocab_size=50257), "float32")
    small = price_of(config(hidden_size=768, num_hidden_layers=2, vocab_size=50257), "float32")
    assert 0.3 < small.step / large.step < 0.5  # the head is as large in both
    assert price_of(config(hidden_size=768, num_hidden_layers=12, vocab_size=50257), "int8").step < large.step / 3
    assert price_of(config(), "of another kind") == PassPrice("torch", price_of(config(), "torch").step)


def test_tokens_of_a_pass_read_experts_of_their_own() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    mixture = price_of(config(**sizes, num_local_experts=8, num_experts_per_tok=2), "float32")
    assert mixture.of(1) == 1.0
    assert mixture.of(2) == pytest.approx(1.75)  # a quarter of the second token's experts have been read already
    assert mixture.of(200) >= 4.0
    assert price_of(config(**sizes, num_local_experts=8, num_experts_per_tok=8), "float32").of(2) < 1.2


def test_without_a_cache_a_longer_pass_costs_nothing_more() -> None:
    sure = promised(0.9, 0.9)
    plans = {cached: PassPlan(PassPrice("float32", 1e9), 1, cached=cached) for cached in (False, True)}
    assert plans[False].best(sure) == 20 > plans[True].best(sure) > 0


def test_the_price_is_that_of_how_the_weights_are_held() -> None:
    from genctl.config.layers import Layer, resolve
    from genctl.engines.session import Session
    from genctl.kernels.ops import library

    def form(**settings: Any) -> str:
        settings = {"model": "builtin:stories", "device": "cpu", **settings}
        return Session.load(resolve([Layer("load", settings, {}, "user")]).runtime).forward.pass_price.form

    assert form() == ("cached" if library() is not None else "torch")
    assert form(pack=False) == "torch"
    large = config(hidden_size=768, num_hidden_layers=12, vocab_size=50257)
    assert [price_of(large, held).form for held in ("float32", "int8", "gpu")] == ["float32", "int8", "gpu"]


def test_weights_that_stay_in_the_caches_save_nothing_when_several_tokens_read_them() -> None:
    small = price_of(config(hidden_size=128, num_hidden_layers=4, vocab_size=1000), "float32")
    assert small.of(6) > 1.2 * PassPrice("float32", small.step).of(6)
    # the overhead of a draft matters beside a short step
    assert small.draft_overhead > 0.2 > 0.01 > PassPrice("float32", 500e6).draft_overhead


# -- in the loop -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cheap:
    """A drafter with a price close to zero: no real one is ten times as fast as a tiny model."""

    drafter: Drafter
    forward: ClassVar[Any] = SimpleNamespace(pass_price=PassPrice("float32", 1.0))

    @property
    def kind(self) -> str:
        return self.drafter.kind

    def begin(self, *arguments: Any) -> Any:
        return self.drafter.begin(*arguments)


def case_of(arch: str) -> Case:
    """A case with the pass prices of compiled products, even if nothing is compiled here."""
    case = Case(arch)
    case.forward.pass_price = PassPrice("float32", 30e6)  # type: ignore[misc]
    return case


def priced(drafter: Drafter, count: int = 8, **knobs: Any) -> Assisted:
    return Assisted(drafter, False, count, True, assistant_confidence_threshold=0.0, **knobs)


def passes(case: Case, strategy: Assisted, clock: Any, **fields: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    """Drafted, accepted and written tokens of each step."""
    lane = case.lane(PROMPTS[0], strategy, eos=(), **fields)
    steps = [event for event in decode(case.forward, [lane], clock=clock) if isinstance(event, events.Stepped)]
    rows = [(*step.rows, *step.ended)[0] for step in steps]
    return [
        (step.drafted, step.accepted, tuple(token.id for token in row.written))
        for step, row in zip(steps, rows, strict=True)
    ]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("lookup", [False, True])
def test_no_clock_decides(lookup: bool, sample: bool) -> None:
    """Equal runs draft the same and yield the same events, whatever the clock."""
    case = case_of("llama")
    drafter: Drafter = PromptLookup(1) if lookup else Cheap(ModelDrafter(runtimes.forward(alike("llama"))))
    strategy = Assisted(drafter, sample, 8, True)
    found = []
    for speed in (0.0, 1e-3, 10.0):
        ticks = itertools.count()
        clock = lambda ticks=ticks, speed=speed: speed * next(ticks) ** 2  # noqa: E731
        found.append(passes(case, strategy, clock, max_new_tokens=60))
    assert found[0] == found[1] == found[2]
    assert any(drafted for drafted, _, _ in found[0])


def counting_after(length: int) -> Any:
    """Writes 10, 11, … 16, 10, … from `length` tokens on, whatever the model predicts; before, no token twice."""

    def process(history: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if history.shape[1] < length:
            following = 95 + history.shape[1] + torch.zeros_like(history[:, -1])
        else:
            following = 10 + (history[:, -1] - 9) % 7
        scores[torch.arange(len(scores)), following] += 1000.0
        return scores

    return process


def test_lookup_drafts_nothing_where_nothing_repeats_and_recovers_where_it_does() -> None:
    case = case_of("llama")
    fields = {"max_new_tokens": 160, "processors": (counting_after(80),)}
    found = passes(case, priced(PromptLookup(2), 10), lambda: 0.0, **fields)
    written = list(itertools.accumulate(len(tokens) for _, _, tokens in found))
    early = [drafted for (drafted, _, _), at in zip(found, written, strict=True) if at < 70]
    late = [accepted for (_, accepted, _), at in zip(found, written, strict=True) if at > 120]
    assert sum(early) == 0
    assert max(late) == 10
    plain = case.ours([case.lane(PROMPTS[0], eos=(), **fields)])["0"]
    assert [[token for _, _, tokens in found for token in tokens]] == plain


def test_a_poor_assistant_is_soon_left_alone() -> None:
    case = case_of("llama")
    strange = Cheap(ModelDrafter(runtimes.forward(tiny("llama", seed=5))))
    found = case.stream([case.lane(PROMPTS[0], priced(strange, 20), eos=(), max_new_tokens=120)])
    drafted, accepted = drafts(found)
    assert accepted < 6
    assert drafted < 40
    constant = Assisted(strange, False, 20, False, assistant_confidence_threshold=0.0)
    assert drafts(case.stream([case.lane(PROMPTS[0], constant, eos=(), max_new_tokens=120)]))[0] > 1000


def test_a_good_assistant_goes_on_and_each_prompt_begins_anew() -> None:
    case = case_of("llama")
    lane = case.lane(PROMPTS[0], priced(Cheap(ModelDrafter(case.forward))), eos=(), max_new_tokens=60)
    sizes = [event.drafted for event in case.stream([lane, lane]) if isinstance(event, events.Stepped)]
    half = len(sizes) // 2
    assert sizes[:half] == sizes[half:]
    assert sizes[3:6] == [8] * 3


# -- settings ----------------------------------------------------------------------------------------------------------


def chosen(**knobs: Any) -> Assisted:
    strategy = auxiliary_strategy(Generation(**knobs), runtimes.forward(tiny("llama")), None, lambda name: None)  # type: ignore[arg-type,return-value]
    assert isinstance(strategy, Assisted)
    return strategy


@pytest.mark.parametrize(
    ("knobs", "price", "most"),
    [
        ({"prompt_lookup_num_tokens": 9}, True, 9),
        ({"prompt_lookup_num_tokens": 9, "do_sample": True}, True, 9),
        ({"assistant_early_exit": 1}, True, MOST_DRAFTED),
        ({"assistant_early_exit": 1, "do_sample": True}, True, MOST_DRAFTED),
        ({"assistant_early_exit": 1, "num_assistant_tokens": 5}, False, 5),
        ({"assistant_early_exit": 1, "num_assistant_tokens": 20}, False, 20),
    ],
)
def test_what_is_set_is_obeyed_and_else_what_pays_is_drafted(knobs: dict[str, Any], price: bool, most: int) -> None:
    strategy = chosen(**knobs)
    assert strategy.drafts_what_pays is price
    assert (strategy.num_assistant_tokens or MOST_DRAFTED) == most
