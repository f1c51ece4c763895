"""Loaded sides (a checkpoint that two share is loaded once), and whether they tokenise alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from genctl.commands.engine_choice import LOCAL
from genctl.commands.parity.options import FLAGS
from genctl.config.layers import Layer, Resolved
from genctl.config.sides import Side, loaded_with
from genctl.engines.protocol import Engine, EngineSetup
from genctl.engines.scorer import TextReader
from genctl.engines.session import Session
from genctl.errors import GenctlError, InputError, ModelError, quote
from genctl.io.rows import InputRow
from genctl.models.hub import LoadedModel
from genctl.models.text import encode
from genctl.parity.sides import LocalSide, greedy
from genctl.parity.values import Text

# a hint if tokens differ
BY_TEXT = "genctl score -m MODEL has the bits per byte of each: they are comparable"

# -- whether two sides tokenise alike ----------------------------------------------------------------------------------


def check_same(reference: LoadedModel, other: LoadedModel, texts: Iterable[tuple[str, str]]) -> None:
    """Raises ModelError, which names the first difference, if the tokenizers of two sides differ on `texts`.

    Each text comes with its name, before it.
    """
    both = reference, other
    names = f"{reference.name} and {other.name}"
    if reference.is_encoder_decoder != other.is_encoder_decoder:
        kinds = [
            f"{one.name} is {'an encoder-decoder' if one.is_encoder_decoder else 'a causal model'}" for one in both
        ]
        raise ModelError(f"{', and '.join(kinds)}: they have no tokens in common")
    vocabularies = [one.tokenizer.get_vocab() for one in both if one.tokenizer is not None]
    if len(vocabularies) < 2:
        return  # token ids are compared; the sizes of both vocabularies are checked with the first logits

    def shown(*tokens: str | None) -> str:
        return " and ".join("missing" if token is None else quote(token) for token in tokens)

    mine, theirs = ({id: token for token, id in entries.items()} for entries in vocabularies)
    for id in sorted(mine.keys() | theirs.keys()):
        if mine.get(id) != theirs.get(id):
            words = f"{names} have different vocabularies: id {id} is {shown(mine.get(id), theirs.get(id))}"
            raise ModelError(words, hint=BY_TEXT)
    for name, text in texts:
        try:
            own, others = (encode(one.tokenizer, text, add_special_tokens=True) for one in both)
        except GenctlError:
            continue  # reported when this text is read
        for at, (a, b) in enumerate(zip_longest(own, others), 1):
            if a != b:
                words = f"token {at} of text {name} is {shown(mine.get(a), theirs.get(b))}"
                raise ModelError(f"{names} have different tokenizers: {words}", hint=BY_TEXT)


WIDTH = 16  # texts read at once if no batch size is set, as in a piped `run`


@dataclass
class LoadedSides:
    """Loads sides. `setup` returns the arguments for loading an engine."""

    setup: Callable[[Resolved, Sequence[Layer]], EngineSetup]
    engines: dict[tuple[str, ...], Engine] = field(default_factory=dict)

    def load(self, side: Side) -> LocalSide:
        """Load a side. Raises the errors of loading."""
        key = loaded_with(side.early.runtime, "prompt_cache")
        if key not in self.engines:
            self.engines[key] = LOCAL.load(self.setup(side.early, side.layers))
        engine = self.engines[key]
        resolved = greedy(engine.resolve(side.layers), (*FLAGS, "max_length"))
        engine.plan(resolved)
        assert isinstance(engine, Session)
        return LocalSide(side.name, engine, resolved, width=engine.width(resolved, WIDTH))

    def retain(self, *sides: Side) -> None:
        """Free all checkpoints except those of these sides."""
        kept = {loaded_with(side.early.runtime, "prompt_cache") for side in sides}
        for key in [key for key in self.engines if key not in kept]:
            self.engines.pop(key).close()

    def close(self) -> None:
        """Free all checkpoints."""
        self.retain()


def check_models(sides: Sequence[Side]) -> None:
    """Look for every checkpoint before the first is loaded. Raises ModelError for a missing one."""
    from genctl.models.resolve import resolve

    runtimes = [side.early.runtime for side in sides]
    for model, revision, offline in dict.fromkeys((each.model, each.revision, each.offline) for each in runtimes):
        resolve(model, revision=revision, offline=offline, configs_only=True)


# -- --texts as token ids: the first token of a text has no score, and serves as its prompt ----------------------------


def given_text(reader: TextReader, most: int | None, row: InputRow) -> Text:
    """The text of a row, with its context or target. `most`: the tokens that the model can read. Raises InputError."""
    text, target, context = row.prompt or "", row.extra.get("target"), row.extra.get("context")
    if reader.is_encoder_decoder:
        if target is None:
            raise InputError(f"{row.where}: an encoder-decoder reads a target given its source: there is no target")
        encoded = reader.target(text, target)
        return Text(row.id, encoded.source or (), encoded.ids[1:], text, row.name)
    if target is not None:
        raise InputError(f"{row.where}: a target is for encoder-decoders; a causal model's text has a context")
    encoded = reader.plain(text) if context is None else reader.after_context(context, text)
    if most is not None and len(encoded.ids) > most:
        raise InputError(f"{row.where}: {len(encoded.ids)} tokens, and the model reads {most}")
    return Text(row.id, encoded.ids[: encoded.first], encoded.ids[encoded.first :], context or "", row.name)
