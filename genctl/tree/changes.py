"""What can happen to a tree, as frozen values: a file of them, one JSON object per line, is the tree.

They have the schema of `genctl.events`: `"event"` names the kind, fields at their default are left out,
log-probabilities are in nats. A tree is the fold of its changes (`nodes.Tree.apply`): nothing else decides what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from genctl.documents.shapes import Natural
from genctl.events import Amount, Id, Logprob, Rank, Seed

SCHEMA = "genctl-tree/1"

# Where a token comes from: the decode loop, an alternative chosen by hand, a text that was typed, an expansion.
By: TypeAlias = Literal["generate", "take", "edit", "expand"]


class SavedLayer(TypedDict):
    """Settings from one place, as `config.layers.Layer` has them."""

    origin: str
    said: str
    typed: bool
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Opened:
    """The first line: the prompt, the checkpoint, and the settings that the tree began with."""

    schema: str
    model: str  # as the user named it
    checkpoint: str  # `LoadedModel.fingerprint`
    prompt: str
    prompt_ids: tuple[Id, ...]
    seed: Seed  # of the tree; each generation has one that is derived from it
    layers: tuple[Annotated[dict[str, Any], SavedLayer], ...] = ()  # settings, lowest first
    shown: str = ""  # the prompt as people read it, where it is a conversation


@dataclass(frozen=True, slots=True)
class Begun:
    """A command begins. What follows until `Settled` is its effect. A step can be undone."""

    line: str
    step: bool = False
    run: Natural = 0  # the number of the generation that it begins, from 1; 0: it begins none
    tool: str = ""  # "explore": a chat, whose commands have names of their own, does not take it for one of its steps


@dataclass(frozen=True, slots=True)
class Grown:
    """A new token. `node` counts from 1; 0 is the root, which holds the prompt."""

    node: Natural
    parent: Natural
    id: Id
    logprob: Logprob  # the model's own, in nats
    text: str = ""  # the whole characters that it completes after the tokens before it
    rank: Rank | None = None  # among the model's tokens, from 1
    entropy: Amount | None = None  # of the model's distribution from which it was chosen, in nats
    settings: Natural = 0  # index into the table of settings
    seed: Seed | None = None  # None where nothing was drawn
    start: Natural = 0  # the node where its generation began
    by: By = "generate"


@dataclass(frozen=True, slots=True)
class Reached:
    """A token that the tree has already is written again: it is shown, and is the end of the branch."""

    node: Natural


@dataclass(frozen=True, slots=True)
class Knobs:
    """A new entry of the table of settings: the knobs that differ from those that the tree began with."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settled:
    """A command is done. Fields that are None did not change."""

    cursor: Natural | None = None
    tip: Natural | None = None
    settings: Natural | None = None
    bookmarks: dict[str, Natural] | None = field(default=None)


@dataclass(frozen=True, slots=True)
class Undone:
    """The last step is undone."""


@dataclass(frozen=True, slots=True)
class Redone:
    """The last undone step is done again."""


Change: TypeAlias = Opened | Begun | Grown | Reached | Knobs | Settled | Undone | Redone

KINDS: dict[str, type] = {
    kind.__name__.lower(): kind for kind in (Opened, Begun, Grown, Reached, Knobs, Settled, Undone, Redone)
}
