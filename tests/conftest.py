"""What holds for every test: one thread (tiny models gain nothing from more), and hypothesis without the clock."""

from __future__ import annotations

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("genctl", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("genctl")
