"""Write goldens of contrastive, diverse and constrained beam search, from a transformers version that still has them.

    pip install "transformers==4.49.0" torch numpy
    python scripts/make_goldens.py

writes `tests/goldens/{contrastive,diverse,constrained}.json`. Run once; transformers 5 moved these searches elsewhere.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.strategies.checkpoints import ARCHITECTURES, PROMPTS, made  # noqa: E402

NEW = 14
LONG = 24  # forced words need room


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    folder = ROOT / "tests" / "goldens"
    folder.mkdir(exist_ok=True)
    for name, cases in (("contrastive", contrastive()), ("diverse", diverse()), ("constrained", constrained())):
        lines = ",\n".join(json.dumps(case) for case in cases)
        head = json.dumps({"transformers": transformers.__version__})[1:-1]
        (folder / f"{name}.json").write_text(f'{{{head}, "cases": [\n{lines}\n]}}\n')
        print(name, len(cases))


def contrastive() -> list[dict[str, Any]]:
    found = []
    for arch, prompt in itertools.product(ARCHITECTURES, PROMPTS):
        for top_k, alpha in ((4, 0.6), (2, 0.3), (6, 0.9), (4, 0.1)):
            found.append(ask(arch, prompt, 1, endings(arch), top_k=top_k, penalty_alpha=alpha))
        found.append(ask(arch, prompt, 1, endings(arch), top_k=4, penalty_alpha=0.6, repetition_penalty=1.3))
    return found


def diverse() -> list[dict[str, Any]]:
    settings = [
        {"num_beams": beams, "num_beam_groups": groups, "diversity_penalty": penalty, **more}
        for (beams, groups), penalty, more in (
            ((4, 2), 0.5, {}),
            ((4, 4), 2.0, {}),
            ((6, 3), 1.0, {"early_stopping": True}),
            ((6, 2), 0.5, {"early_stopping": "never"}),
            ((4, 2), 3.0, {"length_penalty": -1.0}),
            ((4, 2), 1.0, {"length_penalty": 2.0, "early_stopping": "never"}),
            ((4, 2), 1.0, {"length_penalty": 0.0, "early_stopping": True}),
            ((4, 2), 1.0, {"repetition_penalty": 1.4}),
            ((6, 3), 0.7, {"no_repeat_ngram_size": 2, "min_new_tokens": 6}),
        )
    ]
    return [
        ask(arch, prompt, options["num_beams"], endings(arch), **options)
        for arch, prompt in itertools.product(ARCHITECTURES, PROMPTS)
        for options in settings
    ]


def constrained() -> list[dict[str, Any]]:
    wishes: list[list[Any]] = [
        [[17]],
        [[40, 41]],
        [[30, 31, 32], [50]],
        [[[60, 61], [70]]],
        [[[20, 21], [25, 26, 27]], [33, 34]],
    ]
    shapes: list[dict[str, Any]] = [
        {"num_beams": 4},
        {"num_beams": 3, "early_stopping": True},
        {"num_beams": 5, "length_penalty": -1.0, "early_stopping": "never"},
        {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
        {"num_beams": 4, "length_penalty": 0.0, "repetition_penalty": 1.3},
    ]
    found = []
    for arch, prompt in itertools.product(ARCHITECTURES, PROMPTS):
        for place, words in enumerate(wishes):
            options = shapes[(place + len(prompt)) % len(shapes)]
            for count, more in ((1, options), (2, {"num_beams": 4})):
                found.append(ask(arch, prompt, count, endings(arch), LONG, force_words_ids=words, **more))
    return found


def endings(arch: str) -> list[int]:
    """EOS ids that texts of this checkpoint reach: its own, and tokens in the middle of its greedy texts."""
    made_texts = [ask(arch, prompt, 1, [2], num_beams=1)["sequences"][0] + [3] * NEW for prompt in PROMPTS[:2]]
    return sorted({2, made_texts[0][5], made_texts[1][8]})


def ask(
    arch: str, prompt: tuple[int, ...], count: int, eos: list[int], new: int = NEW, **options: Any
) -> dict[str, Any]:
    """The new tokens of `count` sequences, up to and with the first EOS, and their scores if there are any."""
    model = made(arch)
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        num_return_sequences=count,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    skipped = 1 if model.config.is_encoder_decoder else len(prompt)
    rows = [cut(row, eos) for row in answer.sequences[:, skipped:].tolist()]
    scores = getattr(answer, "sequences_scores", None)
    case: dict[str, Any] = {"arch": arch, "prompt": list(prompt), "eos": eos, "new": new, "options": options}
    case["sequences"] = rows
    if scores is not None:
        case["scores"] = [round(score, 5) for score in scores.tolist()]
    return case


def cut(tokens: list[int], eos: list[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in eos:
            return tokens[: place + 1]
    return tokens


if __name__ == "__main__":
    main()
