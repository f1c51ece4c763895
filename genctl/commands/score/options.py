"""`genctl score`: its table, and what its flags alone can get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genctl import params
from genctl.commands.engine_choice import ADDRESS, WORKERS, refused
from genctl.commands.options import FORMAT, IN_OUT, PAGE, SHOWN, ModelOptions
from genctl.commands.table import Command, Conflict, OptionGroup, argument, flag_of, given, needless_force
from genctl.io.writers import Format

SCORED = OptionGroup("What is scored")


@dataclass(frozen=True)
class ScoreOptions(ModelOptions):
    """The command line of `genctl score`."""

    arguments: tuple[str, ...] = argument("texts; without them --input, else standard input", "TEXT")
    format: Format = FORMAT
    context: str | None = SCORED.option("what the text continues: read, but not scored", "TEXT")
    target: str | None = SCORED.option("for an encoder-decoder: what is scored, with the text as its source", "TEXT")
    rank: bool = SCORED.switch("the texts are candidates for the one --context: sort them, best first")
    by: Literal["mean", "total", "bits-per-byte"] | None = SCORED.option(
        "what --rank sorts by: the mean or total log-probability, or bits per byte (default: mean)"
    )
    add_eos: bool = SCORED.switch("score an EOS at the end of each text, too")
    stride: int | None = SCORED.option(
        "read long texts in windows N tokens apart; a token has at least window - N tokens before it", "N", least=1
    )
    window: int | None = SCORED.option("with --stride: tokens in a window (default: the context)", "N", least=1)
    workers: str | None = WORKERS
    address: str | None = ADDRESS
    scores: bool = SHOWN.switch("show each token's probability, rank and entropy")
    top_logprobs: int | None = SHOWN.option("number of alternatives for each token", "K", least=0)


CONFLICTS: tuple[Conflict, ...] = (
    needless_force("output", also=("report",)),
    *PAGE,
    (
        given("window", without=["stride"]),
        "--window {window} is for long texts read with --stride, but there is no --stride",
    ),
    *(
        (
            given(name, format=["tsv"]),
            f"{flag_of(name)} tells of each token, which --format tsv has no place for; --format jsonl has",
        )
        for name in ("scores", "top_logprobs")
    ),
    (given("rank", "stride"), "--stride slides over one text; candidates share a context and must fit with it"),
    (given("rank", "target"), "--rank and --target exclude each other: the candidates are the targets"),
    (given("by", without=["rank"]), "--by {by} says how --rank sorts, but there is no --rank"),
    (given(context=[""]), "--context is empty"),
    (given(target=[""]), "--target is empty"),
    *refused(),
)


SCORE = Command(
    "score",
    ScoreOptions,
    "genctl.commands.score.job:score",
    """On a terminal a heat map: each token in the colour of its probability, its tenths as a digit beneath. In a pipe
    one line for each text: perplexity, negative log-likelihood in nats, scored tokens and the text (the target, where
    there is one; tabs, newlines and other controls as escapes), between tabs. --format jsonl has everything; its
    rows, as those of a JSONL input, have the keys text (or prompt), context, target and candidates.

    Every token counts that the model's own loss counts: all but the first, for which a causal model has no score.
    Where the tokenizer puts BOS in front, that is the first. Special tokens that the tokenizer adds at the end are
    scored. Bits per byte divides by the UTF-8 bytes of the text, without those of a first token that has no score.

    A context is tokenised as it is alone, and the text as it continues from there; nothing is put between them, so
    begin the text with a space where there is one.""",
    (
        'genctl score "The cat sat on the mat."',
        'genctl score --rank --context "I drink" " tea" " glue"',
        "genctl score -i texts.txt --format jsonl --scores",
    ),
    {
        "Model": ("model", "device", "batch_size"),
        SCORED: ("context", "target", "rank", "stride"),
        IN_OUT: ("input", "input_format", "output", "format"),
        SHOWN: ("scores", "top_logprobs"),
    },
    CONFLICTS,
    knobs=(params.Runtime,),
    without=frozenset(
        {"seed", "chat", "system", "prompt_cache", "compile", "truncate", "processed_logprobs", "chat_template"}
        | {"chat_template_kwargs", "enable_thinking", "tools", "src_lang", "tgt_lang"}
    ),
    input="text",
)
