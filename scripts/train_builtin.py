"""Train the checkpoints that ship inside the package.

    python scripts/train_builtin.py stories|numbers [--out DIR] [--seed N] [--steps N]

Both models learn from text that this script generates, so nothing is downloaded. Progress goes to
stderr, the final metrics go to stdout. The same seed on the same software gives the same weights.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from builtin_data import cards, numbers, stories
from builtin_data.checkpoints import numbers_model, numbers_tokenizer, stories_model, stories_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
BUILTIN = ROOT / "genctl" / "models" / "builtin"
HELD_OUT = ROOT / "tests" / "data"
# The order of summation, and so the weights, must not depend on the number of cores. To use two
# cores, train both models at the same time.
THREADS = 1
MAX_BYTES = 4_000_000
# The held-out files do not depend on --seed: every model is measured on the same text.
HELD_OUT_SEED = 20_240_229
STEPS = {"stories": 4200, "numbers": 4000}
BATCH = {"stories": 8, "numbers": 128}
FILE_NUMBERS = 500
IGNORED = -100

Batch = dict[str, torch.Tensor]


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def pad_rows(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def plain_loss(model: PreTrainedModel, batch: Batch, progress: float) -> torch.Tensor:
    """The loss the model itself computes; it does not depend on the progress."""
    return model(**batch, use_cache=False).loss


def train(
    model: PreTrainedModel,
    batches: Iterator[Batch],
    steps: int,
    peak: float,
    loss_of: Callable[[PreTrainedModel, Batch, float], torch.Tensor] = plain_loss,
) -> float:
    """Train with AdamW, linear warm-up and cosine decay to zero; returns the CPU seconds it took."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), foreach=True)
    warm_up = max(1, min(100, steps // 10))

    def scale(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    model.train()
    start, start_cpu = time.monotonic(), time.process_time()
    recent: list[float] = []
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        loss = loss_of(model, batch, step / steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        recent.append(loss.item())
        if step % 50 == 0 or step == steps:
            log(f"step {step}/{steps} loss {sum(recent) / len(recent):.4f} seconds {time.monotonic() - start:.0f}")
            recent.clear()
    model.eval()
    return time.process_time() - start_cpu


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """Replace the checkpoint folder and return the size of the weights in bytes."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Transformers 5 writes the new name of the class; every version understands the old one.
    settings = folder / "tokenizer_config.json"
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'), encoding="utf-8")
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    size = weights.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"the weights take {size} bytes, more than {MAX_BYTES}")
    return size


# --- stories -------------------------------------------------------------------------------------


def story_batches(rows: list[list[int]], pad: int, seed: int) -> Iterator[Batch]:
    """Batches of stories of similar length, to keep padding small, in random order."""
    generator, size = random.Random(seed), BATCH["stories"]
    while True:
        generator.shuffle(rows)
        batches = []
        for start in range(0, len(rows), 1024):
            chunk = sorted(rows[start : start + 1024], key=len)
            batches += [chunk[first : first + size] for first in range(0, len(chunk), size)]
        generator.shuffle(batches)
        for batch in batches:
            ids = pad_rows(batch, pad)
            # Padding is on the right, so the causal mask is enough to hide it from the stories.
            yield {"input_ids": ids, "labels": ids.masked_fill(ids == pad, IGNORED)}


def story_loss(agreeing: torch.Tensor) -> Callable[[PreTrainedModel, Batch, float], torch.Tensor]:
    """Cross-entropy with a higher weight for names and pronouns, which decays to that of other tokens.

    A model this small learns sentences early, but only very late that a name recurs. The extra weight makes it
    learn the name first; it decays so that the final probabilities are those of the text.
    """

    def loss_of(model: PreTrainedModel, batch: Batch, progress: float) -> torch.Tensor:
        scores = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
        wanted = batch["labels"][:, 1:].flatten()
        extra = 5 * max(0.0, 1 - progress / 0.7)
        weights = torch.where(torch.isin(wanted, agreeing), 1 + extra, 1.0).masked_fill(wanted == IGNORED, 0)
        losses = torch.nn.functional.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="none")
        return (losses * weights).sum() / weights.sum()

    return loss_of


@torch.no_grad()
def story_perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> tuple[float, int]:
    """exp of the mean negative log-likelihood of every token after <bos>, the final <eos> included.

    Also returns the number of tokens scored.
    """
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        scores = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        total -= scores.gather(1, ids[0, 1:, None]).sum().item()
        count += ids.shape[1] - 1
    return math.exp(total / count), count


@torch.no_grad()
def story_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: int = 200) -> tuple[float, list[str]]:
    """The share of sampled stories that end within 250 tokens, and the texts."""
    start = torch.full((rows, 1), tokenizer.bos_token_id)
    ids = model.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=250
    )
    ended = (ids == tokenizer.eos_token_id).any(dim=1).double().mean().item()
    return ended, tokenizer.batch_decode(ids, skip_special_tokens=True)


def train_stories(out: Path, seed: int, steps: int, default_out: bool) -> dict[str, Any]:
    held_out = stories.held_out_stories(60, HELD_OUT_SEED)
    started = time.monotonic()
    texts = stories.training_stories(STEPS["stories"] * BATCH["stories"], seed, exclude=set(held_out))
    tokenizer = stories_tokenizer(texts[:12000])
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    lengths = sorted(map(len, rows))
    log(
        f"{len(rows)} stories, {sum(lengths)} tokens, lengths {lengths[0]} to {lengths[-1]}, "
        f"vocabulary {len(tokenizer)}, prepared in {time.monotonic() - started:.0f} s"
    )
    torch.manual_seed(seed)
    model = stories_model(tokenizer)
    words = [f" {word}" for word in stories.agreeing_words()]
    agreeing = tokenizer(words, add_special_tokens=False)["input_ids"]
    agreeing_ids = torch.tensor([ids[0] for ids in agreeing if len(ids) == 1])
    batches = story_batches(rows, tokenizer.pad_token_id, seed)
    seconds = train(model, batches, steps, peak=3e-3, loss_of=story_loss(agreeing_ids))
    size = save(model, tokenizer, out)
    torch.manual_seed(seed)
    ended, samples = story_ends(model, tokenizer)
    for text in samples[:12]:
        log(f"sample: {text}")
    perplexity, scored = story_perplexity(model, tokenizer, held_out)
    metrics = {
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "bytes": size,
        "cpu_seconds": round(seconds),
        "batch": BATCH["stories"],
        "plots": len(stories.PLOTS),
        "training_stories": len(rows),
        "training_tokens": sum(lengths),
        "shortest": lengths[0],
        "longest": lengths[-1],
        "median": lengths[len(lengths) // 2],
        "held_out_perplexity": f"{perplexity:.4f}",
        "held_out_tokens": scored,
        "ended_within_250": ended,
        "distinct_samples": len(set(samples)),
        "samples": len(samples),
    }
    (out / "README.md").write_text(cards.stories_card(metrics, seed, steps), encoding="utf-8")
    if default_out:
        HELD_OUT.mkdir(parents=True, exist_ok=True)
        (HELD_OUT / "stories_heldout.txt").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    return metrics


# --- numbers -------------------------------------------------------------------------------------


def number_batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    stream, size, order = numbers.training_numbers(seed), BATCH["numbers"], random.Random(seed)
    while True:
        # Sorted by the length of the words, to keep padding small.
        pairs = [(str(number), numbers.to_words(number)) for number in itertools.islice(stream, 1024)]
        block = sorted(pairs, key=lambda pair: len(pair[1]))
        batches = [block[first : first + size] for first in range(0, len(block), size)]
        order.shuffle(batches)
        for batch in batches:
            ids = pad_rows(tokenizer([digits for digits, _ in batch])["input_ids"], tokenizer.pad_token_id)
            yield {
                "input_ids": ids,
                "attention_mask": (ids != tokenizer.pad_token_id).long(),
                "labels": pad_rows(tokenizer([words for _, words in batch])["input_ids"], IGNORED),
            }


@torch.no_grad()
def number_errors(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, wanted: list[int]
) -> list[tuple[int, str]]:
    """The numbers that greedy decoding gets wrong, each with its text."""
    wrong = []
    for first in range(0, len(wanted), 500):
        chunk = wanted[first : first + 500]
        inputs = tokenizer([str(number) for number in chunk], return_tensors="pt", padding=True)
        ids = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False, max_new_tokens=60
        )
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        pairs = zip(chunk, texts, strict=True)
        wrong += [(number, text) for number, text in pairs if text != numbers.to_words(number)]
    return wrong


def train_numbers(out: Path, seed: int, steps: int, default_out: bool) -> dict[str, Any]:
    held_out = numbers.held_out_numbers(5000, HELD_OUT_SEED)
    tokenizer = numbers_tokenizer()
    torch.manual_seed(seed)
    model = numbers_model(tokenizer)
    log(f"vocabulary {len(tokenizer)}, parameters {model.num_parameters()}")
    seconds = train(model, number_batches(tokenizer, seed), steps, peak=2e-3)
    size = save(model, tokenizer, out)
    wrong_held_out = number_errors(model, tokenizer, held_out)
    # Every number below 10000, every multiple of 1000 and its neighbours.
    near = [1000 * k + d for k in range(10, 1000) for d in (-1, 0, 1)]
    wrong_small = number_errors(model, tokenizer, list(range(10_000)))
    wrong_round = number_errors(model, tokenizer, [*near, numbers.LIMIT - 1])
    for number, text in [*wrong_held_out, *wrong_small, *wrong_round][:20]:
        log(f"wrong: {number} -> {text}")
    metrics = {
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "bytes": size,
        "cpu_seconds": round(seconds),
        "batch": BATCH["numbers"],
        "held_out": len(held_out),
        "held_out_exact": 1 - len(wrong_held_out) / len(held_out),
        "file_wrong": sum(number in held_out[:FILE_NUMBERS] for number, _ in wrong_held_out),
        "below_10000_wrong": len(wrong_small),
        "round": len(near) + 1,
        "round_wrong": len(wrong_round),
    }
    (out / "README.md").write_text(cards.numbers_card(metrics, seed, steps), encoding="utf-8")
    if default_out:
        HELD_OUT.mkdir(parents=True, exist_ok=True)
        lines = [f"{number}\t{numbers.to_words(number)}\n" for number in held_out[:FILE_NUMBERS]]
        (HELD_OUT / "numbers_heldout.tsv").write_text("".join(lines), encoding="utf-8")
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a built-in checkpoint on generated text.")
    parser.add_argument("name", choices=sorted(STEPS))
    parser.add_argument("--out", type=Path, help="checkpoint folder (default: the one in the package)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="optimizer steps (default: as shipped)")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    run = {"stories": train_stories, "numbers": train_numbers}[arguments.name]
    out = arguments.out or BUILTIN / arguments.name
    metrics = run(out, arguments.seed, arguments.steps or STEPS[arguments.name], arguments.out is None)
    for name, value in metrics.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
