"""Compare the speed of genctl and its peers on this machine, in one run in which they take turns.

    python scripts/bench.py [--rounds 5] [--threads N] [--llama FOLDER] [--only ROW ...] [--quick]

Weights are random, in the sizes of GPT-2 small, Qwen2.5-0.5B and T5-small; nothing is downloaded. Each side runs in its
own process, pinned to the same cores, with one thread per core. CTranslate2 takes part if it is installed
(`pip install "genctl[bench]"`), llama.cpp if --llama names the folder of its `llama-bench`.
"""

from __future__ import annotations

import sys

from benchmarks.main import main

if __name__ == "__main__":
    sys.exit(main())
