"""Measure decode steps on a GPU (`scripts/gpu bench`), compared with `generate()` and its dynamic cache.

Weights are random and made on the device, in the sizes of Qwen2.5-0.5B and of a Llama with 7 billion, in bfloat16. The
lines of int8 and int4 give the speed-up of their steps over bfloat16.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_parts import Parts, card, no_gpu

SECONDS = 240
NEW = 72
DEVICE = "cuda"
SIZES = {
    "0.5B": {
        "kind": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "7B": {
        "kind": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    },
}


class Model:
    """A model with random weights, for genctl and for transformers, which share the tensors."""

    ours: Any

    def __init__(self, size: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = dict(SIZES[size])
        config = AutoConfig.for_model(fields.pop("kind"), **fields)
        with torch.device(DEVICE):
            self.theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.theirs.generation_config.eos_token_id = None
        self.config, self.vocabulary = config, int(config.vocab_size)
        self.use(None)

    def use(self, quantize: str | None) -> dict[str, Any]:
        """Use these weights as `genctl run` does on this card. Returns their size, the form of the head, and notes."""
        import torch

        from genctl.models.architectures import read_native
        from genctl.native.kernel_decoder import unusable
        from genctl.native.linear import Products
        from genctl.native.load import build
        from genctl.native.plan import WeightPlan
        from genctl.native.runtime import NativeRuntime, SpecialTokens

        self.ours = None
        freed()
        tensors, config, device = self.theirs.state_dict(), self.config.to_dict(), torch.device(DEVICE)
        if self.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        plan = WeightPlan(*read_native(config), {name: tuple(each.shape) for name, each in tensors.items()})
        products = Products(quantize, kernels=not unusable(device, torch.bfloat16))
        given: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "products": products}
        made = build(plan, tensors.__getitem__, config, SpecialTokens({}), **given)
        self.ours = NativeRuntime(made)
        return {"gb": round(made.bytes() / 1e9, 2), "head": made.decoder.output.form, "notes": self.ours.findings}


def prompts(model: Model, rows: int, tokens: int) -> list[tuple[int, ...]]:
    import torch

    drawn = torch.randint(10, model.vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    return [tuple(row) for row in drawn.tolist()]


def steps(model: Model, rows: int, tokens: int, new: int, strategy: Any, **lane: Any) -> Iterator[float]:
    """The start time, then the time at which the result of each step reaches the host."""
    import torch

    from genctl import events
    from genctl.decode.loop import decode
    from genctl.decode.types import Lane

    given = [Lane(str(n), ids, strategy, new, seed=n, **lane) for n, ids in enumerate(prompts(model, rows, tokens))]
    torch.cuda.synchronize()
    yield time.perf_counter()
    step = -1
    for event in decode(model.ours, given, width=rows):
        if isinstance(event, events.Failed):
            raise RuntimeError(event.message)
        if isinstance(event, events.Stepped) and event.lane == str(rows - 1):
            step += 1
            yield time.perf_counter()


def measured(model: Model, rows: int, tokens: int, strategy: Any, new: int = NEW, **lane: Any) -> dict[str, Any]:
    """Milliseconds of a step (the median after the graph was captured) and of the first token."""
    list(steps(model, rows, tokens, 2, strategy, **lane))  # warm-up: libraries choose kernels for these shapes
    times = list(steps(model, rows, tokens, new, strategy, **lane))
    between = [1000 * (after - before) for before, after in pairwise(times[1:])]
    step = statistics.median(between[8:])
    return {
        "ms_step": round(step, 2),
        "tokens_s": round(1000 * rows / step, 1),
        "ms_first": round(1000 * (times[1] - times[0]), 1),
    }


def generated(model: Model, rows: int, tokens: int, **options: Any) -> dict[str, Any]:
    """The same figures for `generate()`."""
    import torch

    ids = torch.tensor(prompts(model, rows, tokens), device=DEVICE)
    found = {}
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **options}
    for new in (9, 1, 25):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.theirs.generate(ids, max_new_tokens=new, min_new_tokens=new, **given)
        torch.cuda.synchronize()
        found[new] = 1000 * (time.perf_counter() - began)
    step = (found[25] - found[1]) / 24
    return {"ms_step": round(step, 2), "tokens_s": round(1000 * rows / step, 1), "ms_first": round(found[1], 1)}


def profiled(model: Model, rows: int, strategy: Any) -> dict[str, Any]:
    """Kernels, copies and waits per step, the device time of a step, and the kernels that take most of it."""
    times = steps(model, rows, 32, 64, strategy)
    for _ in range(20):
        next(times)
    return seen(lambda: next(times), 12)


def seen(run: Callable[[], Any], count: int) -> dict[str, Any]:
    """The device's activity in `run`, averaged over `count` calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            run()
    names = {"kernels": 0, "copies": 0, "waits": 0, "launches": 0}
    busy: Counter[str] = Counter()  # microseconds
    for event in found.events():
        name = event.name
        if str(event.device_type).endswith("CUDA"):
            busy[name[:60]] += event.time_range.elapsed_us()
            names["copies" if name.startswith(("Memcpy", "Memset")) else "kernels"] += 1
        elif name.endswith("Synchronize"):
            names["waits"] += 1
        elif "Launch" in name:
            names["launches"] += 1
    most = {name: round(each / count, 1) for name, each in busy.most_common(12)}
    shares = {name: round(each / count, 1) for name, each in names.items()}
    return {**shares, "ms_busy": round(busy.total() / 1000 / count, 2), "us": most}


def shortage(model: Model) -> dict[str, Any]:
    """Decode 256 prompts of 600 tokens at once: the width is reduced to fit memory, and no row may fail."""
    from genctl import events
    from genctl.decode.loop import decode
    from genctl.decode.types import Lane
    from genctl.strategies.sample import Sample

    widths: list[int] = []
    given = [Lane(str(n), ids, Sample(), 8, seed=n) for n, ids in enumerate(prompts(model, 256, 600))]
    ended = {"done": 0, "failed": 0}
    for event in decode(model.ours, given, width=256, on_shortage=widths.append):
        if isinstance(event, events.Finished):
            ended["done"] += 1
        elif isinstance(event, events.Failed):
            ended["failed"] += 1
    bad = ended["failed"] or ended["done"] != 256
    return {**ended, "widths": widths, **({"failed": f"{ended}, widths {widths}"} if bad else {})}


def reading(model: Model) -> dict[str, Any]:
    """Milliseconds of the prefill: by our kernels, which give a row the same bits in any batch, and by torch."""
    import torch

    found: dict[str, Any] = {}
    graphs, kernels = model.ours.graphs, model.ours.graphs.kernels
    for rows, tokens in ((1, 64), (1, 512), (1, 2048), (128, 10)):
        texts = prompts(model, rows, tokens)
        for name in ("kernels", "torch"):
            graphs.kernels = kernels if name == "kernels" else None
            times = []
            for _ in range(4):
                torch.cuda.synchronize()
                began = time.perf_counter()
                model.ours.prefill_together(texts)
                torch.cuda.synchronize()
                times.append(1000 * (time.perf_counter() - began))
            found[f"{rows} x {tokens}, {name}"] = round(min(times), 1)
    graphs.kernels = kernels
    long = prompts(model, 1, 2048)
    return {**found, "2,048 tokens by the kernels": seen(lambda: model.ours.prefill_together(long), 2)}


def freed() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def table(found: dict[str, Any]) -> str:
    lines = [f"{'':44} {'ms/step':>8} {'tokens/s':>9} {'ms first':>9}"]
    for name, each in found.items():
        result = each["result"]
        if isinstance(result, dict) and "ms_step" in result:
            line = f"{name:44} {result['ms_step']:8.2f} {result['tokens_s']:9.1f} {result['ms_first']:9.1f}"
            times = result.get("times_bfloat16")
            lines.append(line if times is None else f"{line}   {times:.2f} x bfloat16")
        else:
            lines.append(f"{name:44} {result}")
    return "\n".join(lines) + "\n"


def rows_of(parts: Parts, name: str, model: Model, rows: Sequence[int]) -> None:
    from genctl.strategies.sample import Sample

    for count in rows:
        parts.run(f"{name}, {count} rows", lambda count=count: measured(model, count, 32, Sample()), least=8)


def rounded(parts: Parts, name: str, model: Model) -> None:
    """Measure steps with weights in 8 and 4 bits, and their speed-up over bfloat16."""
    from genctl.strategies.sample import Sample

    def beside(kind: str, count: int) -> dict[str, Any]:
        found = measured(model, count, 32, Sample())
        exact = parts.found[f"{name}, {count} rows"]["result"]
        return {**found, "times_bfloat16": round(exact["ms_step"] / found["ms_step"], 2)}

    for kind in ("int8", "int4"):
        parts.run(f"{name}, {kind}, weights", lambda kind=kind: model.use(kind), least=15)
        for count in (1, 8, 32):
            part = f"{name}, {kind}, {count} rows"
            parts.run(part, lambda kind=kind, count=count: beside(kind, count), least=8)
        parts.run(f"{name}, {kind}, profile of 1 row", lambda: profiled(model, 1, Sample()), least=10)
    parts.run(f"{name}, bfloat16 again, weights", lambda: model.use(None), least=5)


def main(folder: Path) -> int:
    if reason := no_gpu():
        print(f"error: {reason}, so nothing can be measured")
        return 2
    from genctl.strategies.beam import Beam
    from genctl.strategies.sample import Sample

    parts = Parts(folder, SECONDS)
    parts.run("card", card, least=0)
    made: dict[str, Model] = {}

    def make(size: str) -> dict[str, Any]:
        made[size] = Model(size)
        measured(made[size], 2, 16, Sample(), 16)  # initialise libraries
        return {"gb": round(made[size].ours.model.bytes() / 1e9, 2)}

    for size, counts in (("0.5B", (1, 8, 32, 128)), ("7B", (1, 8, 32))):
        parts.run(f"{size}, weights", lambda size=size: make(size), least=20)
        model = made.pop(size, None)
        if model is None:
            continue
        rows_of(parts, size, model, counts)
        parts.run(f"{size}, beams of 5", lambda m=model: measured(m, 1, 32, Beam(5)), least=8)
        parts.run(f"{size}, profile of 1 row", lambda m=model: profiled(m, 1, Sample()), least=10)
        rounded(parts, size, model)
        parts.run(f"{size}, generate(), 1 row", lambda m=model: generated(m, 1, 32), least=8)
        parts.run(f"{size}, a prompt of 2,048", lambda m=model: measured(m, 1, 2048, Sample(), 12), least=8)
        parts.run(f"{size}, reading by kernels and by torch", lambda m=model: reading(m), least=8)
        parts.run(f"{size}, top-p", lambda m=model: measured(m, 8, 32, Sample(True)), least=8)
        if size == "7B":
            parts.run("7B, 256 prompts of 600 tokens", lambda m=model: shortage(m), least=40)
        parts.run(f"{size}, generate(), 32 rows", lambda m=model: generated(m, 32, 32), least=8)
        if size == "0.5B":
            parts.run(f"{size}, generate(), 128 rows", lambda m=model: generated(m, 128, 32), least=8)
            parts.run(f"{size}, generate(), beams of 5", lambda m=model: generated(m, 1, 32, num_beams=5), least=8)
            parts.run(f"{size}, profile of 32 rows", lambda m=model: profiled(m, 32, Sample()), least=10)
        model = None
        freed()
    shown = table(parts.found)
    (folder / "table.txt").write_text(shown)
    print(shown)
    return int(parts.failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
