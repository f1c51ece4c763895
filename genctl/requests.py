"""Requests to a session: prompts with their settings, and what to report of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from genctl.config.layers import Resolved


@dataclass(frozen=True)
class Request:
    """One prompt with its own settings. Exactly one of `prompt`, `prompt_ids` and `messages` is set."""

    id: str
    resolved: Resolved
    seed: int
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None
    place: int = 0  # in the input, from 1; 0 if the id is a name


@dataclass(frozen=True)
class Report:
    """What events report of each token besides its id and log-probability."""

    top: int = 0  # alternatives
    scores: bool = False  # rank and entropy
    trace: bool = False  # what each processor did
    watch: tuple[int, ...] = ()  # ids whose log-probability and rank are reported at each token
