"""A checkpoint's tokenizer.json through the tokenizers library alone, where that is all that transformers would do.

transformers reads the same file with the same library, and adds to it what tokenizer_config.json says. Where that adds
nothing (`plain`), this is the same tokenizer without importing transformers; all others stay with `AutoTokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.models.weights import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that take tokenizer.json as it is
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FURTHER = ("extra_special_tokens", "additional_special_tokens")
_NO_EFFECT = frozenset(
    {"tokenizer_class", "model_max_length", "padding_side", "truncation_side", "backend", "name_or_path", "is_local"}
    | {"max_length", "stride", "truncation_strategy", "pad_to_multiple_of", "pad_token_type_id"}
    | {"local_files_only", "model_input_names", "chat_template", "clean_up_tokenization_spaces", "processor_class"}
)
# Model types for which transformers puts another class in the place of the one that is named.
_REPLACED = frozenset({"qwen2"})
_CHECKED_ABOVE = 100_000  # tokens: beyond, transformers looks whether it is one of Mistral's with a wrong pattern


class PlainTokenizer:
    """The part of transformers' tokenizers that genctl uses."""

    def __init__(self, backend: Tokenizer, config: dict[str, Any], template: str | None, place: str) -> None:
        self.backend_tokenizer = backend
        self.name_or_path = place
        self.chat_template = template
        self.clean_up_tokenization_spaces = bool(config.get("clean_up_tokenization_spaces", False))
        self.special_tokens_map = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
        extra = [_content(token) for token in _extra(config)]
        self.all_special_tokens = list(dict.fromkeys([*self.special_tokens_map.values(), *extra]))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __getattr__(self, name: str) -> Any:
        """bos_token, eos_token_id and so on; None for those that there are not."""
        if name in _NAMED:
            return self.special_tokens_map.get(name)
        if name.endswith("_id") and name[:-3] in _NAMED:
            token = self.special_tokens_map.get(name[:-3])
            return None if token is None else self.backend_tokenizer.token_to_id(token)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        found = (self.backend_tokenizer.token_to_id(token) for token in self.all_special_tokens)
        return [id for id in found if id is not None]

    def get_vocab(self) -> dict[str, int]:
        """Each token and its id."""
        found: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

    def __call__(
        self,
        text: str | None = None,
        *,
        text_target: str | None = None,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = True,
    ) -> dict[str, list[Any]]:
        """{"input_ids": ids} and, if asked for, "offset_mapping": where each token lies in the text."""
        encoding = self.backend_tokenizer.encode(
            text_target if text is None else text, add_special_tokens=add_special_tokens
        )
        found: dict[str, list[Any]] = {"input_ids": encoding.ids}
        if return_offsets_mapping:
            found["offset_mapping"] = encoding.offsets
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """The text of ids. Spaces are cleaned up as asked, though never behind a BPE."""
        text = str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        clean = (
            self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        bpe = type(self.backend_tokenizer.model).__name__ == "BPE"
        return self.clean_up_tokenization(text) if clean and not bpe else text

    def batch_decode(self, several: Iterable[Sequence[int]], **options: Any) -> list[str]:
        """`decode` of each."""
        return [self.decode(ids, **options) for ids in several]

    def convert_ids_to_tokens(self, id: int) -> str | None:
        """The token with an id."""
        token: str | None = self.backend_tokenizer.id_to_token(id)
        return token

    def get_chat_template(self) -> str:
        """The chat template. Raises ValueError if there is none."""
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        return self.chat_template

    @staticmethod
    def clean_up_tokenization(text: str) -> str:
        """Without the spaces that a WordPiece vocabulary leaves before punctuation."""
        for mark in ".?!,":
            text = text.replace(f" {mark}", mark)
        text = text.replace(" ' ", "'")
        for end in ("n't", "'m", "'s", "'ve", "'re"):
            text = text.replace(f" {end}", end)
        return text


def plain(folder: Path, model_type: str) -> PlainTokenizer | None:
    """The tokenizer of a checkpoint folder; None where transformers would make something else of the files."""
    if not (folder / "tokenizer.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        return None
    if any((folder / name).exists() for name in ("added_tokens.json", "tekken.json", "additional_chat_templates")):
        return None
    config = read_json(folder / "tokenizer_config.json", "tokenizer_config.json")
    found = read_json(folder / "tokenizer.json", "tokenizer.json")
    if not _adds_nothing(folder, config, found) or model_type in _REPLACED:
        return None
    template = config.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    if template is not None and not isinstance(template, str):
        return None
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if model_type == "mistral" and backend.get_vocab_size() > _CHECKED_ABOVE:
        return None
    backend.no_padding()
    backend.no_truncation()
    return PlainTokenizer(backend, config, template, str(folder))


def _adds_nothing(folder: Path, config: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether tokenizer_config.json names only what tokenizer.json has."""
    added = found.get("added_tokens")
    if config.get("tokenizer_class") not in _GENERIC or not isinstance(added, list):
        return False
    known = {token.get("content"): token for token in added if isinstance(token, dict)}
    if (
        set(config)
        - _NO_EFFECT
        - set(_NAMED)
        - {"added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"}
    ):
        return False
    named = [config[name] for name in _NAMED if config.get(name) is not None]
    for token in (*named, *_extra(config)):
        entry = known.get(_content(token))
        if entry is None or entry.get("special") is not True or not _agrees(token, entry):
            return False
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        return False
    for number, token in decoder.items():
        entry = known.get(_content(token))
        if entry is None or str(entry.get("id")) != number or not _agrees(token, entry):
            return False
    return _same_map(folder / "special_tokens_map.json", config)


def _agrees(token: Any, entry: dict[str, Any]) -> bool:
    if not isinstance(token, dict):
        return isinstance(token, str)
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return all(token[flag] == entry.get(flag) for flag in flags if flag in token)


def _same_map(path: Path, config: dict[str, Any]) -> bool:
    if not path.is_file():
        return True
    told = read_json(path, path.name)
    names = {
        name: token for name, token in told.items() if name not in ("additional_special_tokens", "extra_special_tokens")
    }
    same = all(_content(token) == _content(config.get(name)) for name, token in names.items())
    return same and {_content(token) for token in _extra(told)} <= {_content(token) for token in _extra(config)}


def _extra(config: dict[str, Any]) -> list[Any]:
    return [token for name in _FURTHER if isinstance(config.get(name), list) for token in config[name]]


def _content(token: Any) -> str:
    """The text of a token, which may be an object with more fields; "" for what is none."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
