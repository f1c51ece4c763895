"""How fast genctl is, beside its peers, on this machine: one run, in which all of them take turns.

    python scripts/bench.py [--rounds 5] [--threads N] [--llama FOLDER] [--only ROW ...] [--quick]

Weights are random and made on the fly, in the sizes of GPT-2 small, Qwen2.5-0.5B and T5-small; nothing is fetched. Each
side runs in a process of its own, whose affinity is set to the same cores, a thread for each. CTranslate2 takes part
where it is installed (`pip install "genctl[bench]"`), llama.cpp where --llama names the folder of its `llama-bench`.
"""

from __future__ import annotations

import sys

from benchmarks.main import main

if __name__ == "__main__":
    sys.exit(main())
