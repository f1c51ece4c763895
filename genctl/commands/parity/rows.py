"""Settings of single rows: a row has the length of its text, and nothing else; sides have the others."""

from __future__ import annotations

from genctl.commands.parity.sides import COMPARED, refused
from genctl.config.check import known
from genctl.config.layers import Resolved, overlay, row_layer
from genctl.engines.local.score_texts import TextReader
from genctl.errors import InputError
from genctl.io.rows import InputRow
from genctl.parity.sides import LocalSide
from genctl.parity.values import Text

# The texts of --texts, as token ids: the first token of a text has no score, and is its prompt.


class GivenTexts:
    """Encodes texts for the reference. Raises ModelError for a checkpoint without a tokenizer."""

    def __init__(self, reference: LocalSide) -> None:
        planner = reference.session.planner
        start = planner.decoder_start if planner.decoder_start is not None else planner.bos
        self._reader = TextReader(planner.loaded, eos=None, start=start, add_eos=False)
        self._context = planner.context

    def encode(self, row: InputRow) -> Text:
        """The text of a row, after its context, or its target. Raises InputError."""
        text, target, context = row.prompt or "", row.extra.get("target"), row.extra.get("context")
        if self._reader.is_encoder_decoder:
            if target is None:
                raise InputError(f"{row.where}: an encoder-decoder reads a target given its source: there is no target")
            encoded = self._reader.target(text, target)
            return Text(row.id, encoded.source or (), encoded.ids[1:], text, row.name)
        if target is not None:
            raise InputError(f"{row.where}: a target is for encoder-decoders; a causal model's text has a context")
        encoded = self._reader.plain(text) if context is None else self._reader.after_context(context, text)
        if self._context is not None and len(encoded.ids) > self._context:
            raise InputError(f"{row.where}: {len(encoded.ids)} tokens, and the model reads {self._context}")
        return Text(row.id, encoded.ids[: encoded.first], encoded.ids[encoded.first :], context or "", row.name)


LENGTH = "max_new_tokens"
FIELDS = {"reference", "context", "target"}  # of other commands, and of --texts


def refused_settings(row: InputRow) -> str:
    """Why a row cannot have its settings, or an empty string."""
    keys = sorted({*row.params, *row.extra} - FIELDS - {LENGTH})
    if not keys:
        return ""
    reasons = "; ".join(dict.fromkeys(map(_reason, keys)))
    return f"{row.where}: settings belong to a side, so a row has no {', '.join(keys)} ({reasons})"


def _reason(key: str) -> str:
    if key in COMPARED:
        return f"{key}: write MODEL@{key}=…"
    return refused(key) if key in known() else f"{key}: a prompt has none here"


def own_length(row: InputRow, base: Resolved) -> int | None:
    """The length that a row sets above the settings of all rows; None if it sets none. Raises PresetError."""
    if LENGTH not in row.params:
        return None
    return overlay(base, row_layer({LENGTH: row.params[LENGTH]}, row.where)).generation.max_new_tokens
