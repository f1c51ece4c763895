"""OpenAI's batch files: rows as requests, one JSON object on each line."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from genctl.config.layers import Resolved
from genctl.engines.server import fields as known_fields
from genctl.engines.server.body import messages_of, sampling_fields, seed_field, unused_default
from genctl.engines.server.failure import RowFailure
from genctl.engines.server.server import logprob_fields
from genctl.errors import InputError
from genctl.io.rows import InputRow

Kind: TypeAlias = Literal["openai", "vllm", "sglang"]
MOST = 50_000  # requests that OpenAI takes in one file


def checked(resolved: Resolved, kind: Kind) -> tuple[list[str], str]:
    """Why settings cannot be said in a request, and a note on a default that is not said; "" if there is none."""
    chat = is_chat(None, resolved)
    fields = known_fields.known(kind, chat=chat)
    return sampling_fields(resolved, fields, chat=chat, kind=kind)[1], unused_default(resolved, fields)


def is_chat(row: InputRow | None, resolved: Resolved) -> bool:
    """Whether a row is sent as a chat."""
    return resolved.runtime.is_chat or (row is not None and row.messages is not None)


def request_line(row: InputRow, resolved: Resolved, seed: int, kind: Kind, top: int | None) -> dict[str, Any]:
    """One line of a batch file. `top`: alternatives of each token; None asks for no log-probabilities.

    Raises RowFailure for settings that no request can say, and InputError for token ids in a chat.
    """
    chat = is_chat(row, resolved)
    fields = known_fields.known(kind, chat=chat)
    chosen, problems = sampling_fields(resolved, fields, chat=chat, kind=kind)
    if problems:
        raise RowFailure("; ".join(problems))
    body: dict[str, Any] = {"model": resolved.runtime.model}
    if not chat:
        body["prompt"] = row.prompt if row.prompt_ids is None else list(row.prompt_ids)
    elif row.prompt_ids is not None:
        raise InputError("token ids cannot be sent as a chat: the server makes the ids of its own template")
    else:
        body["messages"] = messages_of(row.prompt, row.messages, resolved.runtime.system)
    body |= {**chosen, **seed_field(seed, fields, resolved.generation)}
    if resolved.generation.num_return_sequences > 1:
        body["n"] = resolved.generation.num_return_sequences
    if top is not None:
        body |= logprob_fields(top, chat=chat)
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return {"custom_id": row.id, "method": "POST", "url": url, "body": body}
