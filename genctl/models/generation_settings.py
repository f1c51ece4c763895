"""The generation settings of a checkpoint, as transformers takes them from its files: from generation_config.json, or
from config.json if that file is not there (`GenerationConfig.from_pretrained` and `.from_model_config`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from genctl.config.generation_fields import FIELDS
from genctl.errors import ModelError
from genctl.models.weights import read_json

FILE = "generation_config.json"
_PARTS = ("decoder", "generator", "text_config")  # where a nested config has the text decoder's fields


class GenerationSettings(NamedTuple):
    """Raw keys and values without those that are None, and the name of the file they come from."""

    values: dict[str, Any]
    file: str = FILE


def read(folder: Path, config: dict[str, Any]) -> GenerationSettings:
    """The settings of a checkpoint folder with this config. Raises ModelError for a file that cannot be read."""
    if not (folder / FILE).is_file():
        return GenerationSettings(of_config(config), "config.json")
    values = read_json(folder / FILE, FILE)
    settings = {key: value for key, value in values.items() if value is not None and not key.startswith("_")}
    settings.pop("transformers_version", None)
    return GenerationSettings(settings)


def of_config(config: dict[str, Any]) -> dict[str, Any]:
    """The settings in a config.json: its own fields, and for those that it lacks the ones of its text decoder."""
    settings = {name: config[name] for name in FIELDS if config.get(name) is not None}
    if config.get("force_bos_token_to_be_generated"):  # an old name in BART's configs
        settings["forced_bos_token_id"] = config.get("bos_token_id")
    nested = next((config[part] for part in _PARTS if config.get(part)), None)
    if isinstance(nested, dict):
        settings = {name: nested[name] for name in FIELDS if name in nested} | settings
    return {name: value for name, value in settings.items() if value is not None}


def known_ids(settings: GenerationSettings, vocabulary: int) -> tuple[GenerationSettings, list[str]]:
    """The settings without the special ids of a config.json that the model does not have, and a note on each.

    Such an id is often left over from another checkpoint, and never occurs in a text. Raises ModelError for one in
    generation_config.json, or for the decoder start token.
    """
    values, notes = dict(settings.values), []
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id"):
        if name != "eos_token_id" and isinstance(values.get(name), list):
            raise ModelError(f"{settings.file}: {name} = {values[name]!r:.40} is a list, and has to be one id")
        known, ids = [], _ids(values.get(name))
        for id_ in ids:
            if (type(id_) is int and 0 <= id_ < vocabulary) or (name, id_) == ("pad_token_id", -1):  # -1: none
                known.append(id_)
                continue
            if settings.file == FILE or name == "decoder_start_token_id":
                raise ModelError(f"{name} is {id_!r:.40}, but the model's ids are 0 to {vocabulary - 1:,}")
            notes.append(
                f"{settings.file}: {name} = {id_!r:.40} is not used: the model has ids 0 to {vocabulary - 1:,}"
            )
        if len(known) < len(ids):
            values[name] = known or None
    return settings._replace(values={name: value for name, value in values.items() if value is not None}), notes


def _ids(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def begins_with_bos(settings: GenerationSettings) -> list[str]:
    """A note if a decoder begins with BOS because the settings name no start token."""
    values, file = settings
    if values.get("decoder_start_token_id") is not None or values.get("bos_token_id") is None:
        return []
    return [
        f"the decoder begins with bos_token_id = {values['bos_token_id']!r:.40}: {file} has no decoder_start_token_id"
    ]
