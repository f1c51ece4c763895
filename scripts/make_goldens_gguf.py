"""Write `tests/goldens/gguf.json`: the tokens that llama.cpp generates with tiny GGUF files of Q4_K, Q5_K and Q6_K.

    pip install --no-deps --target /tmp/llama llama-cpp-python gguf diskcache
    PYTHONPATH=/tmp/llama:. python scripts/make_goldens_gguf.py

The files are made by `tests/models/gguf_blocks.py` from random bits. `clear` lists the places of new tokens with a
score clearly above the second best: llama.cpp rounds activations in other groups than genctl.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.models.gguf_blocks import KINDS, PROMPTS, VOCABULARY, written

CLEARLY = 0.3  # difference of logits, which have a standard deviation of about 3
NEW = 24


def main() -> None:
    import llama_cpp
    import numpy

    cases: list[dict[str, Any]] = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            path = written(Path(folder) / "tiny.gguf", kind)
            model = llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, verbose=False, n_threads=1)
            for prompt in PROMPTS:
                model.reset()
                model.eval(prompt)
                new: list[int] = []
                clear: list[int] = []
                for place in range(NEW):
                    scores = numpy.asarray(model.scores[model.n_tokens - 1][:VOCABULARY])
                    second, best = numpy.sort(scores)[-2:]
                    clear += [place] if best - second >= CLEARLY else []
                    new.append(int(scores.argmax()))
                    model.eval(new[-1:])
                cases.append({"kind": kind, "prompt": prompt, "new": new, "clear": clear})
    text = json.dumps({"llama_cpp": llama_cpp.__version__, "cases": cases})
    Path("tests/goldens/gguf.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
