"""Three tasks of lm_eval on local files: choices, rolling perplexity, and answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

NAMES = ("own_choices", "own_texts", "own_answers")
_WORDS = (
    *("Once", "upon", "a", "time", "there", "was", "a", "little", "girl", "named", "Lily", "who", "liked", "to"),
    *("play", "with", "the", "red", "ball", "in", "the", "park"),
)


def write(folder: Path, until: tuple[str, ...] = (".", "the"), **generation: Any) -> Path:
    """The tasks as YAML and JSON files. `generation` are further settings of the task that generates."""
    draw = random.Random(3)

    def words(count: int) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(count))

    choices = [
        {
            # a space at the end of a context belongs to the choice
            "q": words(draw.randint(3, 12)) + " " * (number % 3 == 0),
            "choices": [f" {words(count)}" for count in (1, 2, 1, 3)],
            "gold": draw.randrange(4),
        }
        for number in range(6)
    ]
    choices.append({"q": words(150), "choices": [" a", " the dog", " b", f" {words(4)}"], "gold": 1})
    choices.append({"q": "", "choices": ["Once", " upon a time", "The", "Lily was"], "gold": 0})
    rows = {
        "own_choices": choices,
        "own_texts": [{"text": words(count)} for count in (1, 5, 17, 300, 3)],
        "own_answers": [{"q": words(draw.randint(2, 9)), "a": " hands"} for _ in range(6)],
    }
    generation = {"until": list(until), "do_sample": False, "max_gen_toks": 20, **generation}
    settings: dict[str, dict[str, Any]] = {
        "own_choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        "own_texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "own_answers": {
            "output_type": "generate_until",
            "doc_to_text": "{{q}}",
            "doc_to_target": "{{a}}",
            "generation_kwargs": generation,
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name in NAMES:
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder / "datasets")},
            "test_split": "test",
            **settings[name],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder
