"""A tree with its checkpoint and its file: what the model says of each node, and tokens that are written after one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from genctl.config.layers import Layer, Resolved, overlay
from genctl.config.listed_knobs import LISTS
from genctl.config.saved_files import check_trust
from genctl.decode.score import damaged, is_finite
from genctl.engines.protocol import Report, Request
from genctl.engines.session import Session
from genctl.errors import InputError, ModelError
from genctl.events import Token
from genctl.identity import checkpoint_change
from genctl.io.rows import row_seed
from genctl.params import GRAMMARS, Generation, knobs
from genctl.tree.branches import Branches
from genctl.tree.changes import SCHEMA, Begun, By, Opened, Settled
from genctl.tree.distribution import Distribution
from genctl.tree.file_settings import FileSettings, saved_layers, to_save
from genctl.tree.journal import Differs, SavedTree, TreeFile
from genctl.tree.language import MEMORY
from genctl.tree.nodes import ROOT, Tree
from genctl.tree.results import At, TokenWritten

if TYPE_CHECKING:
    from torch import Tensor

    from genctl.models.text import Words

_DISTRIBUTIONS = 8  # kept
_WORDS = 64  # detokenizers kept, each after a node


def opened_of(
    session: Session, prompt: str, prompt_ids: Sequence[int], seed: int, layers: Sequence[Layer], *, shown: str = ""
) -> Opened:
    """The beginning of a tree. Of `layers` the knobs of generation are kept. Raises ModelError."""
    settings = to_save(layers, {*knobs(Generation), *LISTS})
    checkpoint = session.about.name, session.loaded.fingerprint()
    return Opened(SCHEMA, *checkpoint, prompt, tuple(prompt_ids), seed, settings, shown)


class Workspace(SavedTree):
    """A tree, the checkpoint that continues it, and its file, if there is one.

    Raises InputError if the tree was made with another checkpoint, or has tokens that the checkpoint lacks; UsageError
    or PresetError for its settings.
    """

    def __init__(
        self,
        session: Session,
        tree: Tree,
        journal: TreeFile | None = None,
        memory: int = MEMORY,
        file: FileSettings | None = None,
    ) -> None:
        """`file`: which settings of the tree's file hold, where one was opened."""
        opened = tree.opened
        name, here = "the tree" if journal is None else str(journal.path), session.loaded.fingerprint()
        if opened.checkpoint != here:
            differs = checkpoint_change(session.about.name, opened.checkpoint, here, before=opened.model)
            raise InputError(
                f"{name} cannot be continued: {differs}",
                hint=f"--model {opened.model}, if its files have not changed since",
            )
        check_ids(tree, session.forward.vocab_size, name)
        super().__init__(tree, journal)
        self.session = session
        session.planner.drafts = False  # each token is looked at
        self.branches = Branches(session, tree, memory)
        self.file = file or FileSettings()
        layers = saved_layers(opened.layers, "tree")
        self.base = self._checked(session.resolve([part for layer in layers for part in self.file.layers(layer)]))
        self.speed: float | None = None  # tokens a second of the newest generation, after its first step
        self._resolved: dict[int, Resolved] = {}
        self._distributions: OrderedDict[tuple[int, int], Distribution] = OrderedDict()
        self._words: OrderedDict[int, Words] = OrderedDict()

    # -- writing -------------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, line: str, run: int = 0) -> Iterator[None]:
        """A command that changes the tree and can be undone. However it ends, what was written stays."""
        self.change(Begun(line, True, run, "explore"))
        try:
            yield
        except Differs:
            raise
        except BaseException:
            self._end_step()
            raise
        self._end_step()

    def _end_step(self) -> None:
        if self.tree.command is not None:
            self.change(Settled())

    def settle(self, **changed: Any) -> At:
        """End a command, or move: the fields of `Settled` that differ from now. Returns where the cursor is."""
        view = self.tree.view
        differ = {name: value for name, value in changed.items() if value != getattr(view, name)}
        if differ or self.tree.command is not None:
            self.change(Settled(**differ))
        return At(self.tree.cursor, self.tree.tip)

    def write(self, parent: int, token: Token, by: By, settings: int, seed: int | None, start: int) -> TokenWritten:
        """Write a token after a node."""
        known = self.tree.find(parent, token.id) is not None
        if not known:
            text = self.words(parent).fork().push(token.id) if self.session.about.has_texts else ""
            token = replace(token, text=text)
        return TokenWritten(self.tree.nodes[self.put(parent, token, by, settings, seed, start)], known)

    def write_given(self, parent: int, ids: Sequence[int], by: By) -> Iterator[TokenWritten]:
        """Write tokens that are given, with what the model says of each."""
        start, settings = parent, self.tree.view.settings
        known = 0
        while known < len(ids) and (node := self.tree.find(parent, ids[known])) is not None:
            parent = self.write(parent, Token(ids[known], 0.0), by, settings, None, start).token.node
            yield TokenWritten(self.tree.nodes[node], True)
            known += 1
        if known == len(ids):
            return
        given = self.branches.read_given(parent, ids[known:])
        nodes = []
        for id, (logprob, rank, entropy) in zip(ids[known:], given.figures, strict=True):
            if math.isnan(logprob) and not self.resolved().generation.remove_invalid_values:
                raise self._damaged(parent)
            token = Token(id, logprob, rank=rank, entropy=entropy)
            written = self.write(parent, token, by, settings, None, start)
            parent = written.token.node
            nodes.append(parent)
            yield written
        given.keep(nodes)

    def seed(self, run: int) -> int:
        """The seed of a generation: the tree's own for the first."""
        return row_seed(self.tree.opened.seed, str(run), run - 1)

    # -- settings ------------------------------------------------------------------------------------------------------

    def resolved(self, settings: int | None = None) -> Resolved:
        """The settings of an entry of the table; of the current one. Raises PresetError."""
        place = self.tree.view.settings if settings is None else settings
        if place not in self._resolved:
            self._resolved[place] = self.overlaid(self.tree.settings[place])
        return self._resolved[place]

    def overlaid(self, values: Mapping[str, Any], base: Resolved | None = None) -> Resolved:
        """Settings with others above them. Raises PresetError."""
        where = {key: f"set {key}" for key in values}
        resolved = base or self.base
        for part in self.file.layers(Layer("set", dict(values), where, said="row", typed=True)):
            resolved = overlay(resolved, part)
        return self._checked(resolved)

    def _checked(self, resolved: Resolved) -> Resolved:
        """Raises UsageError if a flag would run code that the file names."""
        check_trust(resolved.settings, self.session.planner.trust)
        return resolved

    def aside(self, values: Mapping[str, Any]) -> int:
        """A number for settings that the tree does not have, for `distribution`. Raises PresetError."""
        place = min(self._resolved, default=0)
        place = min(place, 0) - 1
        self._resolved[place] = self.overlaid(values)
        return place

    # -- what the model says -------------------------------------------------------------------------------------------

    def distribution(self, node: int, settings: int | None = None) -> Distribution:
        """The distribution of the token after a node: the model's, and after the processors of the settings.

        It is the one from which a generation that begins at the node takes its first token, if the processors leave
        one. Only the first look at a node runs the model. Raises GenctlError, for instance where logits are no numbers.
        """
        place = self.tree.view.settings if settings is None else settings
        found = self._distributions.get((node, place))
        if found is None:
            found = self._processed(node, place)
            self._distributions[node, place] = found
            while len(self._distributions) > _DISTRIBUTIONS:
                self._distributions.popitem(last=False)
        else:
            self._distributions.move_to_end((node, place))
        return found

    def scores(self, node: int, resolved: Resolved) -> Tensor:
        """The model's logits after a node, f32 [V], on the CPU. Raises ModelError if they are no numbers."""
        logits = self.branches.scores(node)
        self.check_finite(logits, node, (), resolved)
        return logits

    def check_finite(self, logits: Tensor, node: int, more: Sequence[int], resolved: Resolved) -> None:
        """Raises ModelError for logits after a node and `more` tokens that are no numbers, as generation does."""
        if not resolved.generation.remove_invalid_values and not is_finite(logits):
            raise self._damaged(node, more)

    def _damaged(self, node: int, more: Sequence[int] = ()) -> ModelError:
        ids = [*self.tree.ids(node)[len(self.tree.opened.prompt_ids) :], *more]
        after = f"after the token {self.piece(ids[-1])!r}" if ids else "after the prompt"
        return damaged(f"at step {len(ids)}, {after}")

    def _processed(self, node: int, settings: int) -> Distribution:
        import torch

        from genctl.decode.processors import trace

        ids = self.tree.ids(node)
        resolved = self.overlaid({"token_healing": False}, self.resolved(settings))
        logits = self.scores(node, resolved)
        request = self.request("", node, resolved, self.seed(self.tree.runs + 1))
        lane = self.session.planner.plan(request, Report()).lane
        device = self.session.forward.device
        history = torch.tensor([list(ids)], dtype=torch.long, device=device)
        scores = logits[None].to(device)
        if lane.strategy.traits.space == "logprobs":
            scores = scores.log_softmax(-1)
        scores, stages = trace.run_on_one(lane.processors, history, scores)
        return Distribution(node, logits, scores, stages, self.piece, resolved.generation)

    def request(self, name: str, node: int, resolved: Resolved, seed: int = 0, given: tuple[int, ...] = ()) -> Request:
        """A generation that begins after a node and tokens that are given. A text of a grammar goes on there."""
        ids = (*self.tree.ids(node), *given)
        request = Request(name, resolved, seed, prompt_ids=ids)
        lengths = [len(ids) - self.tree.length(start) for start in self._starts(node, resolved.generation)]
        if given and any(getattr(resolved.generation, knob) is not None for knob in GRAMMARS):
            lengths.append(len(given))
        if not lengths:
            return request
        from genctl.decode.processors.grammar import grammar_of

        planned = self.session.planner.plan(replace(request, written=lengths[0]), Report())
        grammar = grammar_of(planned.lane.processors)
        found = (length for length in lengths if grammar is not None and grammar.begins_with(ids[-length:]))
        return replace(request, written=next(found, 0))

    def _starts(self, node: int, generation: Generation) -> list[int]:
        """Where the commands began that wrote the tokens down to a node under one grammar, the first one first."""
        knobs = [getattr(generation, knob) for knob in GRAMMARS]
        starts: list[int] = []
        while any(knob is not None for knob in knobs) and node != ROOT:
            one = self.tree.nodes[node]
            if [getattr(self.resolved(one.settings).generation, knob) for knob in GRAMMARS] != knobs:
                break
            if one.start not in starts:
                starts.append(one.start)
            node = one.parent
        return starts[::-1]

    # -- text ----------------------------------------------------------------------------------------------------------

    def words(self, node: int) -> Words:
        """The detokenizer after a node. Not to be written to: `fork` it."""
        from genctl.models.text import detokenizer

        way = []
        here = node
        while here not in self._words and here != ROOT:
            way.append(here)
            here = self.tree.nodes[here].parent
        words = self._words.get(here)
        if words is None:
            words = detokenizer(self.session.loaded.tokenizer).after(self.tree.opened.prompt_ids)
        words = words.fork()
        for each in reversed(way):
            words.push(self.tree.nodes[each].id)
        self._words[node] = words
        self._words.move_to_end(node)
        while len(self._words) > _WORDS:
            self._words.popitem(last=False)
        return words

    def text(self, node: int, above: int = ROOT) -> str:
        """The text from `above` down to `node`, whole characters: without the prompt's."""
        pieces = [self.tree.nodes[each].text for each in self.tree.path(node, above)]
        return "".join(pieces) + self.words(node).fork().flush()

    def piece(self, id: int) -> str:
        """The text of one token alone."""
        from genctl.models.text import detokenizer

        return detokenizer(self.session.loaded.tokenizer).piece(id)


def check_ids(tree: Tree, size: int, name: str) -> None:
    """Raises InputError for a token beyond the vocabulary."""
    places = [(f"prompt_ids.{place}", id) for place, id in enumerate(tree.opened.prompt_ids)]
    places += [(f"node {each.node}: id", each.id) for each in tree.nodes[1:]]
    for place, id in places:
        if not 0 <= id < size:
            raise InputError(f"{name} is damaged: {place}: {id} is none of the {size} ids of the checkpoint")


def has_texts(tree: Tree, size: int, piece: Callable[[int], str]) -> bool:
    """Whether tokens have the texts that the tree has of them; compared where one token is whole ASCII text."""
    for node in tree.nodes[1:]:
        if node.id >= size:
            return False
        text, here = node.text.strip(), piece(node.id).strip()
        if text and text.isascii() and here.isascii() and text != here:
            return False
    return True
