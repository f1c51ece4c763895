"""Contrastive decoding against a plain implementation of the formulas, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.runtime import Output
from genctl.strategies.contrast import Amateur
from genctl.transformers.runtime import TransformersRuntime
from tests import runtimes
from tests.decode.driver import PROMPTS, Case
from tests.strategies.assisted.assistants import Counting
from tests.tiny import tiny

NEW = 12


def plain(
    expert: Any,
    amateur: Any,
    prompt: Sequence[int],
    *,
    alpha: float = 0.1,
    beta: float | None = None,
    temperature: float = 1.0,
    rows: int = 1,
    seed: int | None = None,
) -> list[list[int]]:
    """Greedy, or drawn after `torch.manual_seed`; reads everything again for each token."""
    if seed is not None:
        torch.manual_seed(seed)
    text = torch.tensor([list(prompt)] * rows)
    for _ in range(NEW):
        with torch.no_grad():
            p = expert(text).logits[:, -1].softmax(-1)
            q = (amateur(text).logits[:, -1] / temperature).softmax(-1)
        score = (p / q).log() if beta is None else (p ** (1 + beta) / q**beta).log()
        score[p < alpha * p.max(-1, keepdim=True).values] = -torch.inf
        chosen = score.argmax(-1) if seed is None else torch.multinomial(score.softmax(-1), 1)[:, 0]
        text = torch.cat([text, chosen[:, None]], 1)
    return text[:, len(prompt) :].tolist()


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize(
    "knobs", [{}, {"alpha": 0.5}, {"beta": 0.5}, {"temperature": 0.5}], ids=["paper", "strict", "beta", "sure-amateur"]
)
def test_greedy_text_is_that_of_the_formula(arch: str, knobs: dict[str, Any]) -> None:
    case, amateur = Case(arch), tiny(arch, seed=9)
    strategy = Amateur(runtimes.forward(amateur), **knobs)
    for use_cache in (True, False):
        lane = case.lane(PROMPTS[1], strategy, eos=(), max_new_tokens=NEW, use_cache=use_cache)
        assert case.ours([lane])["0"] == plain(case.model, amateur, PROMPTS[1], **knobs)


def test_drawn_rows_are_those_of_the_formula() -> None:
    case, amateur = Case("llama"), tiny("gpt2", seed=9)
    strategy = Amateur(runtimes.forward(amateur), beta=0.5, do_sample=True, n=3)
    lane = case.lane(PROMPTS[0], strategy, eos=(), max_new_tokens=NEW, seed=4)
    assert case.ours([lane])["0"] == plain(case.model, amateur, PROMPTS[0], beta=0.5, rows=3, seed=4)


def test_the_amateur_reads_the_prompt_once() -> None:
    case, forward = Case("llama"), Counting(tiny("llama", seed=9))
    case.ours([case.lane(PROMPTS[1], Amateur(forward), eos=(), max_new_tokens=NEW)])
    assert forward.fed == [len(PROMPTS[1])] + [1] * (NEW - 1)


def test_lanes_with_amateurs_do_not_change_each_other() -> None:
    case = Case("llama")
    strategy = Amateur(runtimes.forward(tiny("llama", seed=9)), do_sample=True, n=2)
    lanes = [case.lane(prompt, strategy, name=str(i), seed=i) for i, prompt in enumerate(PROMPTS)]
    alone = {lane.name: case.ours([lane])[lane.name] for lane in lanes}
    assert case.ours(lanes, width=3) == alone


def test_processors_come_after_the_contrast() -> None:
    case, amateur = Case("llama"), tiny("llama", seed=9)
    seen: list[Tensor] = []

    def watch(history: Tensor, scores: Tensor) -> Tensor:
        seen.append(scores.clone())
        return scores

    case.ours([case.lane(PROMPTS[0], Amateur(runtimes.forward(amateur)), max_new_tokens=1, processors=(watch,))])
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        p, q = (model(ids).logits[:, -1].softmax(-1) for model in (case.model, amateur))
    plausible = p >= 0.1 * p.max()
    torch.testing.assert_close(seen[0][plausible], (p / q).log()[plausible], rtol=1e-3, atol=1e-3)
    assert float(seen[0][~plausible].max()) < float(seen[0][plausible].min()) - 900


def test_where_every_plausible_token_is_banned_the_next_best_is_written() -> None:
    case = Case("llama")
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        p = case.model(ids).logits[:, -1].softmax(-1)
    plausible = p >= 0.1 * p.max()

    def ban(history: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(plausible, -torch.inf)

    strategy = Amateur(runtimes.forward(tiny("llama", seed=9)))
    made = case.ours([case.lane(PROMPTS[0], strategy, max_new_tokens=1, processors=(ban,))])["0"][0]
    assert made == [int(p.masked_fill(plausible, 0.0).argmax())]


def test_tokens_that_the_amateur_lacks_are_not_chosen() -> None:
    case = Case("llama")

    class Narrow(TransformersRuntime):
        """Its vocabulary ends where the expert's best token would be."""

        size = 300

        def __call__(self, *arguments: Any, **options: Any) -> Output:
            output = super().__call__(*arguments, **options)
            output.logits = output.logits[..., : self.size]
            return output

    narrow = Narrow(tiny("llama", seed=9))
    free = case.ours([case.lane(PROMPTS[0], Amateur(narrow), eos=(), max_new_tokens=6)])["0"][0]
    narrow.size = max(free)
    made = case.ours([case.lane(PROMPTS[0], Amateur(narrow), eos=(), max_new_tokens=6)])["0"][0]
    assert max(made) < max(free)


def test_an_encoder_decoder_is_refused() -> None:
    case = Case("t5")
    lane = case.lane(PROMPTS[0], Amateur(runtimes.forward(tiny("t5", seed=9))))
    failed = [event for event in decode(case.forward, [lane]) if isinstance(event, events.Failed)]
    assert "two decoder-only models" in failed[0].message
