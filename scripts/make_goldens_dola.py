"""Write goldens of DoLa's greedy texts, from a transformers version that still has it.

    pip install "transformers==4.49.0" torch numpy
    python scripts/make_goldens_dola.py

writes `tests/goldens/dola.json`. Run once; transformers 5 moved DoLa out of its core.
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

from tests.strategies.assisted.checkpoints import NAMES, PROMPTS, made  # noqa: E402

NEW = 20
SETTINGS: tuple[dict[str, Any], ...] = (
    {"dola_layers": "low"},
    {"dola_layers": "high"},
    {"dola_layers": [1, 3, 4]},
    {"dola_layers": [2]},
    {"dola_layers": "low", "repetition_penalty": 1.2},
    {"dola_layers": "high", "repetition_penalty": 1.4},
)


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    lines = [json.dumps(ask(*case)) for case in itertools.product(NAMES, PROMPTS, SETTINGS)]
    head = json.dumps({"transformers": transformers.__version__})[1:-1]
    path = ROOT / "tests" / "goldens" / "dola.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{{head}, "cases": [\n' + ",\n".join(lines) + "\n]}\n")
    print(len(lines))


def ask(name: str, prompt: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The new tokens; EOS is neither barred nor does it end the text."""
    ids = torch.tensor([prompt])
    made_ids = made(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=False,  # with Gemma 2's hybrid cache, the last token was wrong
        **options,
    )
    return {"model": name, "prompt": prompt, "options": options, "tokens": made_ids[0, len(prompt) :].tolist()}


if __name__ == "__main__":
    main()
