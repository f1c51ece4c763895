"""A golden file against the side that is compared with it: the same tokens, and what does not allow --update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from genctl.commands.parity.view import worst_first
from genctl.engines.protocol import Request, never
from genctl.errors import InputError, ModelError
from genctl.parity.golden import record
from genctl.parity.recorded import Golden
from genctl.parity.sides import LocalSide
from genctl.parity.values import Parity, Text

HINT = "genctl parity MODEL --save FILE --force records it as it is now"


def check_same(golden: Golden, side: LocalSide) -> None:
    """Raises ModelError, which names the first difference, for a side that reads and writes other tokens.

    Raises InputError for a file that contradicts itself.
    """
    if golden.vocabulary != side.vocabulary:
        raise ModelError(
            f"{side.name} has {side.vocabulary} entries in a distribution, and the golden file {golden.vocabulary}",
            hint=HINT,
        )
    recorded_adapter, own = golden.knobs.get("adapter"), side.session.planner.runtime.adapter
    if (recorded_adapter is None) != (own is None) and golden.fingerprint == side.session.loaded.fingerprint():
        raise InputError(
            f"the golden file says adapter {recorded_adapter or 'none'}, and its fingerprint is that of a checkpoint "
            f"with adapter {own or 'none'}",
            hint=HINT,
        )
    largest = max(max((*text.prompt_ids, *text.token_ids), default=0) for text in golden.texts)
    if largest >= side.vocabulary:
        raise ModelError(f"the golden file has the token {largest}, which {side.name} lacks", hint=HINT)
    if not golden.written or side.session.loaded.tokenizer is None:
        return
    for text in golden.texts:
        if not text.prompt:
            continue
        ids = side.session.planner.read(Request(text.id, side.resolved, 0, prompt=text.prompt)).ids
        if tuple(ids) != text.prompt_ids:
            pairs = enumerate(zip(ids, text.prompt_ids, strict=False), 1)
            at = next((at for at, (now, then) in pairs if now != then), min(len(ids), len(text.prompt_ids)) + 1)
            raise ModelError(
                f"{side.name} reads the prompt of text {text.name} in other tokens than the golden file: "
                f"token {at} differs",
                hint="--chat and --system, as they were then, make the same prompts",
            )


def again(golden: Golden, side: LocalSide) -> tuple[Sequence[Request], Sequence[Text]]:
    """What the side writes, or reads, for a new golden file."""
    if not golden.written:
        return (), golden.texts
    requests = []
    for text in golden.texts:
        generation = replace(side.resolved.generation, max_new_tokens=golden.length(text.id))
        resolved = replace(side.resolved, generation=generation)
        requests.append(Request(text.id, resolved, 0, prompt_ids=text.prompt_ids))
    return requests, ()


def recorded(
    side: LocalSide,
    requests: Sequence[Request],
    texts: Sequence[Text],
    prompts: Mapping[str, str],
    interrupted: Callable[[], str] = never,
) -> tuple[Golden, dict[str, str]]:
    """What the side writes for requests, or reads of texts, as a golden file; and why texts are missing, by id.

    `prompts` are as people wrote them, by id.
    """
    failed: dict[str, str] = {}
    if requests:
        texts, failed = side.write(requests, interrupted=interrupted)
    texts = [replace(text, prompt=text.prompt or prompts.get(text.id, "")) for text in texts]
    golden, more = record(side, texts, written=bool(requests), interrupted=interrupted)
    own = {request.id: request.resolved.generation.max_new_tokens for request in requests}
    lengths = {id: most for id, most in own.items() if most is not None and most != golden.new_tokens}
    return replace(golden, own_lengths=lengths), {**failed, **more}


def not_tied(one: Parity) -> str:
    """What is no tie: a text that could not be read, the worst parting, or the reason of the verdict. "" for a tie."""
    texts = {text.id: text for text in one.texts}
    for id, reason in one.failed.items():
        return f"text {texts[id].name} could not be read: {reason}"
    for parting in worst_first(one.partings):
        if parting.verdict != "tie":
            return f"{texts[parting.text].token(parting.index)}: {parting.verdict}: {parting.reason}"
    return "" if one.verdict == "tie" else one.sentence
