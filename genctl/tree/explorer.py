"""A tree with its checkpoint and its file: computes the distribution after a node, and writes tokens after it.

`Explorer.do` runs a command (`commands`) and yields its results as they come.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genctl import events
from genctl.config.layers import Layer, Resolved, overlay
from genctl.config.settings import saved_layers
from genctl.decode.processors import trace
from genctl.decode.score import damaged, is_finite
from genctl.engines.protocol import Report, Request, never
from genctl.engines.session import Session
from genctl.errors import InputError, ModelError, UsageError, checkpoint_change
from genctl.events import Token
from genctl.io.rows import row_seed
from genctl.io.sessions import begin_session, close_session, encoded
from genctl.io.sink import Sink
from genctl.kernels.ops import entropy, log_softmax
from genctl.params import GRAMMARS
from genctl.tree import saved
from genctl.tree.commands import COMMANDS, Call, Result, TokenWritten, parse
from genctl.tree.scores import BranchScores, Distribution, remember
from genctl.tree.token_tree import ROOT, SCHEMA, At, By, Change, StepUndone, TokenNode, TokenTree, TreeOpened, TreeStep

if TYPE_CHECKING:
    from genctl.models.text import Words


class Explorer:
    """Runs commands on a tree, one at a time. Another thread may read `tree` while it holds `lock`, and call `pause`.

    Raises InputError if the tree was made with another checkpoint, or has tokens that the checkpoint lacks; UsageError
    or PresetError for invalid settings; ModelError for an encoder-decoder.
    """

    def __init__(self, session: Session, tree: TokenTree, file: Sink | None = None) -> None:
        opened, name = tree.opened, "the tree" if file is None else str(file.path)
        here = session.loaded.fingerprint()
        if opened.checkpoint != here:
            differs = checkpoint_change(session.about.name, opened.checkpoint, here, before=opened.model)
            raise InputError(
                f"{name} cannot be continued: {differs}",
                hint=f"--model {opened.model}, if its files have not changed since",
            )
        size = session.forward.vocab_size
        places = [(f"prompt_ids.{place}", id) for place, id in enumerate(opened.prompt_ids)]
        places += [(f"node {node.node}: id", node.id) for node in tree.nodes[1:]]
        if wrong := next((f"{place}: {id}" for place, id in places if not 0 <= id < size), ""):
            raise InputError(f"{name} is damaged: {wrong} is none of the {size} ids of the checkpoint")
        session.planner.drafts = False  # every token is inspected
        self.session, self.tree, self.file = session, tree, file
        self.lock = threading.RLock()  # held while the tree changes
        self.branches = BranchScores(session, tree)
        self.base = session.resolve(saved.layers_of(opened))
        self.interrupted: Callable[[], str] = never  # a further reason to stop writing, besides `pause`
        self.line = ""  # of the current command
        self._reason = ""
        self._resolved: dict[str, Resolved] = {}  # by the settings as JSON
        self._distributions: dict[tuple[int, str], Distribution] = {}  # by the node, and the settings as JSON
        self._words: dict[int, Words] = {}

    @classmethod
    def begin(
        cls,
        session: Session,
        prompt: str,
        prompt_ids: Sequence[int],
        layers: Sequence[Layer] = (),
        *,
        seed: int = 0,
        shown: str = "",
    ) -> Explorer:
        """Begin a new tree, without a file. Raises GenctlError."""
        if not prompt_ids:
            raise InputError("the prompt tokenises to nothing, and there is nothing to continue")
        checkpoint = session.about.name, session.loaded.fingerprint()
        opened = TreeOpened(
            SCHEMA, *checkpoint, prompt, tuple(prompt_ids), seed, saved_layers(layers, saved.ALLOWED), shown
        )
        return cls(session, TokenTree(opened))

    def save(self, file: Sink) -> None:
        """Write the tree to a new file (`open_beside`), without undone steps; later changes are appended there.

        Raises OutputError, and then leaves no new file behind.
        """
        begin_session(file, map(events.to_json, (self.tree.opened, *saved.changes_of(self.tree))))
        self.close()
        self.file = file

    def close(self, *, sync: bool = True) -> None:
        """Close the file. With `sync`, raises OutputError if another program has removed it."""
        close_session(self.file, sync=sync)

    # -- commands ------------------------------------------------------------------------------------------------------

    def do(self, call: Call | str) -> Iterator[Result]:
        """Run a command, and yield its results as they come. Raises GenctlError."""
        call = parse(call) if isinstance(call, str) else call
        command = COMMANDS[call.name]
        self._reason, self.line = "", call.line or call.name
        if command.kind == "move":
            at = command.function(self.tree, self.tree.at, **call.arguments)
            self.move(at.cursor, at.tip)
            yield at
            return
        writes = command.kind in ("write", "fork")
        if writes and call.name not in ("take", "edit") and self.tree.cursor == self.ending(self.tree.cursor):
            yield replace(self.tree.at, note="the text ends here (EOS); take or edit continues after it")
            return
        yield from command.function(self, **call.arguments)
        if writes:
            ending = self.ending(self.tree.tip)
            goes_on = ending not in (None, self.tree.tip)
            yield replace(self.tree.at, note=f"after EOS: the text ends at node {ending}" if goes_on else "")

    def pause(self, reason: str = "interrupted") -> None:
        """Stop writing at the next token."""
        self._reason = reason

    def stop_reason(self) -> str:
        """Why the command has to stop writing; "" if it may continue."""
        return self._reason or self.interrupted()

    # -- changes -------------------------------------------------------------------------------------------------------

    def change(self, change: Change) -> None:
        """Apply a change, and append it to the file. Raises OutputError."""
        with self.lock:
            self.tree.apply(change)
            if self.file is not None:
                self.file.write(encoded(events.to_json(change)))

    def begin_step(self, runs: int = 0, settings: dict[str, Any] | None = None) -> None:
        """Begin a step that undo takes back. `runs` is the number of generations that it starts."""
        self.change(TreeStep(self.line, self.tree.runs + runs, settings))

    def move(self, cursor: int, tip: int) -> None:
        """Move the cursor, if it is not there already."""
        if (self.tree.cursor, self.tree.tip) != (cursor, tip):
            self.change(At(cursor, tip))

    def undo(self) -> None:
        """Undo the last step, and clear the caches that are keyed by node numbers: these are used again."""
        self.change(StepUndone())
        self._distributions.clear()
        self._words.clear()

    def write(self, parent: int, token: Token, by: By, seed: int | None, start: int) -> TokenWritten:
        """Write a token after a node. If the tree has it there already, only move the cursor to it."""
        node = self.tree.child(parent, token.id)
        if node is not None:
            self.move(node, node)
            return TokenWritten(self.tree.nodes[node], True)
        text = self.words(parent).fork().push(token.id) if self.session.about.has_texts else ""
        figures = token.logprob, text, token.rank, token.entropy
        written = TokenNode(len(self.tree.nodes), parent, token.id, *figures, seed, start, by)
        self.change(written)
        return TokenWritten(written)

    def write_given(self, parent: int, ids: Sequence[int], by: By) -> Iterator[TokenWritten]:
        """Write given tokens, each with the model's log-probability, rank and entropy."""
        start = parent
        for id in ids:
            token = Token(id, 0.0)
            if self.tree.child(parent, id) is None:
                logprobs = log_softmax(self.branches.scores(parent)[None])[0]
                own = logprobs[id]
                if math.isnan(float(own)) and not self.resolved().generation.remove_invalid_values:
                    raise self._damaged(parent)
                token = Token(id, float(own), rank=1 + int((logprobs > own).sum()), entropy=float(entropy(logprobs)))
            written = self.write(parent, token, by, None, start)
            parent = written.token.node
            yield written

    def seed(self, run: int) -> int:
        """The seed of generation `run`, counted from 1; the first one has the tree's own seed."""
        return row_seed(self.tree.opened.seed, str(run), run - 1)

    # -- settings ------------------------------------------------------------------------------------------------------

    def resolved(self, settings: Mapping[str, Any] | None = None) -> Resolved:
        """The settings that the tree began with, overlaid with `settings` (default: the current ones).

        Raises PresetError, and UsageError for `token_healing`, which would remove tokens of the tree.
        """
        values = self.tree.settings if settings is None else settings
        key = json.dumps(values, sort_keys=True)
        if key not in self._resolved:
            where = {key: f"set {key}" for key in values}
            layer = Layer("set", dict(values), where, declared="row", typed=True)
            resolved = overlay(self.base, layer) if values else self.base
            if resolved.generation.token_healing:
                place = resolved.origins.get("token_healing", "set")
                raise UsageError(f"token_healing ({place}): a tree keeps the tokens before the cursor")
            self._resolved[key] = resolved
        return self._resolved[key]

    def request(self, name: str, node: int, resolved: Resolved, seed: int = 0, given: tuple[int, ...] = ()) -> Request:
        """A request to generate after a node and `given` tokens. Raises UsageError if they violate the grammar.

        The text of a grammar begins after the tree's prompt, and the generated tokens continue it.
        """
        from genctl.decode.processors import function_of
        from genctl.decode.processors.grammar import Grammar

        ids = (*self.tree.ids(node), *given)
        request = Request(name, resolved, seed, prompt_ids=ids)
        written = len(ids) - len(self.tree.opened.prompt_ids)
        knob = next((knob for knob in GRAMMARS if getattr(resolved.generation, knob) is not None), "")
        if not knob or not written:
            return request
        request = replace(request, written=written)
        grammar = function_of(self.session.planner.plan(request, Report()).lane.processors, Grammar)
        if grammar is not None and not grammar.begins_with(ids[-written:]):
            raise UsageError(
                f"{knob}: no text of it begins with the tokens after the prompt",
                hint="start goes to the end of the prompt; genctl run begins a text anywhere",
            )
        return request

    # -- distributions -----------------------------------------------------------------------------------------

    def distribution(self, node: int) -> Distribution:
        """The distribution of the token after a node: the model's own, and after the processors of the settings.

        A generation that begins at the node takes its first token from it, if the processors leave one. Only the first
        call for a node runs the model. Raises GenctlError, for instance if a logit is NaN.
        """
        key = node, json.dumps(self.tree.settings, sort_keys=True)
        if key not in self._distributions:
            resolved, logits = self.resolved(), self.branches.scores(node)
            self.check_finite(logits, node, (), resolved)
            request = self.request("", node, resolved, self.seed(self.tree.runs + 1))
            lane = self.session.planner.plan(request, Report()).lane
            device = self.session.forward.device
            scores = logits[None].to(device)
            if lane.strategy.traits.space == "logprobs":
                scores = scores.log_softmax(-1)
            history = torch.tensor([list(self.tree.ids(node))], dtype=torch.long, device=device)
            scores, stages = trace.run_traced(lane.processors, history, scores, may_end=True)
            after_eos = self.ending(node) is not None
            found = Distribution(node, logits, scores, stages, self.piece, after_eos=after_eos)
            remember(self._distributions, key, found)
        return self._distributions[key]

    def check_finite(self, logits: Tensor, node: int, more: Sequence[int], resolved: Resolved) -> None:
        """Raise ModelError if logits after a node and `more` tokens are no distribution, as generation does."""
        if not resolved.generation.remove_invalid_values and not is_finite(logits):
            raise self._damaged(node, more)

    def _damaged(self, node: int, more: Sequence[int] = ()) -> ModelError:
        ids = [*self.tree.ids(node)[len(self.tree.opened.prompt_ids) :], *more]
        after = f"after the token {self.piece(ids[-1])!r}" if ids else "after the prompt"
        return damaged(f"at step {len(ids)}, {after}")

    def ending(self, node: int) -> int | None:
        """The node of the first EOS on the path down to `node`, where its text ends; None if there is none."""
        own = self.resolved().generation.eos_token_id
        eos = self.session.planner.eos if own is None else (own,) if isinstance(own, int) else own
        return next((each for each in self.tree.path(node) if self.tree.nodes[each].id in eos), None)

    # -- text ----------------------------------------------------------------------------------------------------------

    def words(self, node: int) -> Words:
        """The detokenizer after a node. Do not push to it: `fork` it."""
        from genctl.models.text import detokenizer

        if node not in self._words:
            known = None if node == ROOT else self._words.get(self.tree.nodes[node].parent)
            tokenizer, prompt_ids = self.session.loaded.tokenizer, self.tree.opened.prompt_ids
            words = known.fork() if known else detokenizer(tokenizer).after(prompt_ids)
            for each in [node] if known else self.tree.path(node):
                words.push(self.tree.nodes[each].id)
            remember(self._words, node, words)
        return self._words[node]

    def text(self, node: int, above: int = ROOT) -> str:
        """The text after `above` down to `node`, without the prompt, in whole characters."""
        pieces = [self.tree.nodes[each].text for each in self.tree.path(node, above)]
        return "".join(pieces) + self.words(node).fork().flush()

    def piece(self, id: int) -> str:
        """The text of one token alone."""
        from genctl.models.text import detokenizer

        return detokenizer(self.session.loaded.tokenizer).piece(id)
