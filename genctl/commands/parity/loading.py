"""Sides, loaded (a checkpoint that two share once), and whether they read and write the same tokens."""

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

# what may help where tokens differ
BY_TEXT = "genctl score -m MODEL has the bits per byte of each: they are comparable"

# -- whether two sides read and write the same tokens ------------------------------------------------------------------


def check_same(reference: LoadedModel, other: LoadedModel, texts: Iterable[tuple[str, str]]) -> None:
    """Raises ModelError, which names the first difference, for tokenizers that are not the same on `texts`.

    A text comes with its name.
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


WIDTH = 16  # texts read at once where no batch size is set, as `run` does in a pipe


@dataclass
class LoadedSides:
    """Loads sides. `setup` makes what an engine is loaded with."""

    setup: Callable[[Resolved, Sequence[Layer]], EngineSetup]
    engines: dict[tuple[str, ...], Engine] = field(default_factory=dict)

    def load(self, side: Side) -> LocalSide:
        """A side, ready to read. Raises what loading raises."""
        key = loaded_with(side.early.runtime, "prompt_cache")
        if key not in self.engines:
            self.engines[key] = LOCAL.load(self.setup(side.early, side.layers))
        engine = self.engines[key]
        resolved = greedy(engine.resolve(side.layers), (*FLAGS, "max_length"))
        engine.plan(resolved)
        assert isinstance(engine, Session)
        return LocalSide(side.name, engine, resolved, width=engine.width(resolved, WIDTH))

    def retain(self, *sides: Side) -> None:
        """Free all checkpoints but those of these sides."""
        kept = {loaded_with(side.early.runtime, "prompt_cache") for side in sides}
        for key in [key for key in self.engines if key not in kept]:
            self.engines.pop(key).close()

    def close(self) -> None:
        """Free all checkpoints."""
        self.retain()


def check_models(sides: Sequence[Side]) -> None:
    """Look for every checkpoint before the first is loaded. Raises ModelError for one that is not there."""
    from genctl.models.resolve import resolve

    runtimes = [side.early.runtime for side in sides]
    for model, revision, offline in dict.fromkeys((each.model, each.revision, each.offline) for each in runtimes):
        resolve(model, revision=revision, offline=offline, configs_only=True)


# -- the texts of --texts, as token ids: the first token of a text has no score, and is its prompt ---------------------


def given_text(reader: TextReader, most: int | None, row: InputRow) -> Text:
    """The text of a row, after its context, or its target. `most`: tokens that the model reads. Raises InputError."""
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
