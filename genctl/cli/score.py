"""`genctl score`: how probable texts are under a checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer

from genctl import params
from genctl.cli import options
from genctl.cli.options import knob_layers, with_knobs

Texts = Annotated[
    list[str] | None, typer.Argument(help="Texts; else --input; else standard input.", show_default=False)
]


@with_knobs(exclude=frozenset({"seed", "chat", "system", "prompt_cache", "compile"}), kinds=(params.Runtime,))
def score(
    context: typer.Context,
    texts: Texts = None,
    *,
    input: options.Input = None,
    input_format: options.InputFormat = None,
    output: options.Output = None,
    force: options.Force = False,
    format: options.Format = "text",
    before: Annotated[
        str | None,
        typer.Option(
            "--context", metavar="TEXT", help="What the text continues: read, but not scored.", show_default=False
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="TEXT",
            help="For an encoder-decoder: what is scored, with the text as its source.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[
        bool, typer.Option("--rank", help="The texts are candidates for the one --context: sort them, best first.")
    ] = False,
    by: Annotated[
        Literal["mean", "total", "bits-per-byte"] | None,
        typer.Option(
            "--by",
            help="What --rank sorts by: the mean or total log-probability, or bits per byte (default: mean).",
            show_default=False,
        ),
    ] = None,
    add_eos: Annotated[bool, typer.Option("--add-eos", help="Score an EOS at the end of each text, too.")] = False,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="N",
            help="Read long texts in windows N tokens apart; a token has at least window - N tokens before it.",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            help="With --stride: tokens in a window (default: the context).",
            show_default=False,
        ),
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Show each token's probability, rank and entropy.")] = False,
    top_logprobs: Annotated[
        int | None,
        typer.Option("--top-logprobs", metavar="K", help="Alternatives reported for each token.", show_default=False),
    ] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    color: options.Color = "auto",
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    knobs: dict[str, Any],
) -> int:
    """Score texts: log-likelihood, perplexity and bits per byte, in total and for each token.

    On a terminal a heat map: each token in the colour of its probability, its tenths as a digit beneath. In a pipe one
    line for each text: perplexity, negative log-likelihood in nats, scored tokens and the text (the target, where there
    is one; tabs, newlines and other controls as escapes), between tabs. --format jsonl has everything; its rows, as
    those of a JSONL input, have the keys text (or prompt), context, target and candidates.

    Counted is what the model's own loss counts: every token but the first, which a causal model has no score for.
    Where the tokenizer puts BOS in front, that is the first. Special tokens that the tokenizer adds at the end are
    scored. Bits per byte divides by the UTF-8 bytes of the text, without those of a first token that has no score.

    A context is tokenised as it is alone, and the text as it goes on from there; nothing is put between them, so begin
    the text with a space where there is one.
    """
    from genctl.cli.score_job import ScoreOptions, perform

    asked = ScoreOptions(
        arguments=tuple(texts or ()),
        input=input,
        input_format=input_format,
        output=output,
        force=force,
        format=format,
        context=before,
        target=target,
        rank=rank,
        by=by,
        add_eos=add_eos,
        stride=stride,
        window=window,
        scores=scores,
        top_logprobs=top_logprobs,
        flags=knob_layers(knobs, None),
        quiet=quiet,
        verbose=verbose,
        color=color,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    status = perform(asked)
    if status is None:
        print(context.get_usage(), file=sys.stderr)
        print("No text: give one as an argument, with --input FILE, or on standard input.", file=sys.stderr)
        print(f"Try {context.command_path} --help.", file=sys.stderr)
        return 2
    return status
