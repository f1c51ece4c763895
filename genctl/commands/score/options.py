"""`genctl score`: its options, and the mistakes that its flags alone can show."""

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
    context: str | None = SCORED.option("condition on this text, which is not scored", "TEXT")
    target: str | None = SCORED.option("for an encoder-decoder: the text to score, with TEXT as its source", "TEXT")
    rank: bool = SCORED.switch("sort the texts as candidates for one --context, best first")
    by: Literal["mean", "total", "bits-per-byte"] | None = SCORED.option(
        "sort --rank by the mean or total log-probability, or bits per byte (default: mean)"
    )
    add_eos: bool = SCORED.switch("also score an EOS at the end of each text")
    stride: int | None = SCORED.option(
        "score long texts in windows N tokens apart, so that tokens have at least window - N tokens of context",
        "N",
        least=1,
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
            f"{flag_of(name)} adds values to each token, which do not fit --format tsv; --format jsonl has them",
        )
        for name in ("scores", "top_logprobs")
    ),
    (given("rank", "stride"), "--stride slides over one text; candidates share a context and must fit with it"),
    (given("rank", "target"), "--rank and --target exclude each other: the candidates are the targets"),
    (given("by", without=["rank"]), "--by {by} needs --rank"),
    (given(context=[""]), "--context is empty"),
    (given(target=[""]), "--target is empty"),
    *refused(),
)


SCORE = Command(
    "score",
    ScoreOptions,
    "genctl.commands.score.job:score",
    """A terminal shows a heat map: the colour and a digit (tenths) show the probability of each token. A pipe gets a
    line per text: perplexity, negative log-likelihood in nats, scored tokens and the text (or the target; control
    characters escaped), separated by tabs. --format jsonl has everything. Rows of JSONL input have the keys text (or
    prompt), context, target and candidates.

    The scored tokens are those of the model's loss: all except the first, for which a causal model has no score (BOS,
    if the tokenizer adds it). Special tokens that the tokenizer adds at the end are scored. Bits per byte are per UTF-8
    byte of the scored text.

    The context is tokenised alone, and the text as its continuation, with nothing in between: begin the text with a
    space if there is one.""",
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
