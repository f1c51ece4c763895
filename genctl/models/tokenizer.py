"""A checkpoint's tokenizer.json with the tokenizers library alone, as transformers reads it.

transformers reads the same file with the same library, adds tokenizer_config.json and two older files, and some of its
classes rebuild parts of the tokenizer (`tokenizer_class`, `tokenizer_recipes`). The steps are those of
`PreTrainedTokenizerBase.from_pretrained` and `TokenizersBackend.__init__` of transformers 5. Folders with an unknown
field or class are left to `AutoTokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.models import tokenizer_limits
from genctl.models.tokenizer_files import BACKEND, UnsupportedTokenizer, class_of
from genctl.models.weights import LARGEST_JSON, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = frozenset({"extra_special_tokens", "additional_special_tokens"})
_TOKEN = frozenset({"content", "lstrip", "rstrip", "single_word", "normalized", "special", "__type"})
# Fields that transformers reads before it builds a class, or that affect neither ids nor texts.
_NO_EFFECT = frozenset(
    {"tokenizer_class", "model_max_length", "max_len", "backend", "name_or_path", "is_local", "local_files_only"}
    | {"max_length", "stride", "truncation_strategy", "pad_to_multiple_of", "pad_token_type_id", "verbose"}
    | {"model_input_names", "chat_template", "clean_up_tokenization_spaces", "processor_class", "padding_side"}
    | {"truncation_side", "add_bos_token", "add_eos_token", "errors", "sp_model_kwargs", "use_fast", "from_slow"}
    | {"spaces_between_special_tokens", "special_tokens_map_file", "tokenizer_file", "vocab_file"}
    | {"full_tokenizer_file"}
    | {"use_default_system_prompt", "return_token_type_ids", "device_map", "legacy_behaviour", "merges_file"}
)
_READ = frozenset({"added_tokens_decoder", "add_prefix_space", "trim_offsets", "legacy", "split_special_tokens"})
_SIDES = ("left", "right")


class PlainTokenizer:
    """The part of transformers' tokenizer interface that genctl uses."""

    def __init__(
        self,
        backend: Tokenizer,
        special: dict[str, str],
        extra: Iterable[str] = (),
        *,
        clean: bool = False,
        template: str | dict[str, str] | None = None,
        place: str = "",
        literal: dict[int, str] | None = None,
    ) -> None:
        """`literal` are tokens of a byte-level vocabulary that are text as they stand, not letters for bytes."""
        self.backend_tokenizer = backend
        self.literal = literal or {}
        self.name_or_path = place
        self.chat_template = template
        self.clean_up_tokenization_spaces = clean
        self.special_tokens_map = special
        self.all_special_tokens = list(dict.fromkeys([*special.values(), *extra]))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __getattr__(self, name: str) -> Any:
        """bos_token, eos_token_id and so on; None for tokens that do not exist."""
        special = self.__dict__.get("special_tokens_map", {})
        if name in NAMED or name in special:
            return special.get(name)
        if name.endswith("_id") and (name[:-3] in NAMED or name[:-3] in special):
            token = special.get(name[:-3])
            return None if token is None else self.backend_tokenizer.token_to_id(token)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        ids = (self.backend_tokenizer.token_to_id(token) for token in self.all_special_tokens)
        return [id for id in ids if id is not None]

    def get_vocab(self) -> dict[str, int]:
        """Each token and its id."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def __call__(
        self,
        text: str | None = None,
        *,
        text_target: str | None = None,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = True,
    ) -> dict[str, list[Any]]:
        """{"input_ids": ids} and, on request, "offset_mapping": the place of each token in the text."""
        encoding = self.backend_tokenizer.encode(
            text_target if text is None else text, add_special_tokens=add_special_tokens
        )
        output: dict[str, list[Any]] = {"input_ids": encoding.ids}
        if return_offsets_mapping:
            output["offset_mapping"] = encoding.offsets
        return output

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """The text of ids. Spaces are cleaned up on request, except after a BPE."""
        runs = [list(run) for _, run in groupby(ids, self.literal.get)] if self.literal else [list(ids)]
        text = "".join(
            (self.literal and self.literal.get(run[0], "") * len(run))
            or str(self.backend_tokenizer.decode(run, skip_special_tokens=skip_special_tokens))
            for run in runs
        )
        clean = (
            self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        bpe = type(self.backend_tokenizer.model).__name__ == "BPE"
        return self.clean_up_tokenization(text) if clean and not bpe else text

    def batch_decode(self, several: Iterable[Sequence[int]], **options: Any) -> list[str]:
        """`decode` of each sequence."""
        return [self.decode(ids, **options) for ids in several]

    def convert_ids_to_tokens(self, id: int) -> str | None:
        """The token of an id."""
        token: str | None = self.backend_tokenizer.id_to_token(id)
        return token

    def get_chat_template(self) -> str:
        """The chat template. Raises ValueError if there is none, or no default among several."""
        template = self.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if template is None:
            raise ValueError("this tokenizer has no chat template")
        return template

    @staticmethod
    def clean_up_tokenization(text: str) -> str:
        """Remove the spaces that a WordPiece vocabulary leaves before punctuation."""
        for mark in ".?!,":
            text = text.replace(f" {mark}", mark)
        text = text.replace(" ' ", "'")
        for end in ("n't", "'m", "'s", "'ve", "'re"):
            text = text.replace(f" {end}", end)
        return text


def plain(folder: Path, model: dict[str, Any]) -> PlainTokenizer:
    """The tokenizer of a checkpoint folder; `model` is its config.json. Raises UnsupportedTokenizer with a reason."""
    try:
        return _plain(folder, model)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # a file of an unknown form
        raise UnsupportedTokenizer(f"its files are read otherwise: {type(error).__name__}: {error}"[:200]) from error


def _plain(folder: Path, model: dict[str, Any]) -> PlainTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedTokenizer("there is no tokenizer.json")
    if (folder / "tekken.json").exists():
        raise UnsupportedTokenizer("tekken.json may take its place")
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = read_json(folder / "tokenizer_config.json", "tokenizer_config.json")
    name = class_of(str(folder), model, settings, byte_level=lambda: '"ByteLevel"' in path.read_text(encoding="utf-8"))
    _check_fields(settings)
    template = _template(folder, settings.get("chat_template"))
    clean = bool(settings.get("clean_up_tokenization_spaces", False))
    file = tokenizer_limits.parsed(path)
    tokenizer_limits.forget()
    settings, specific, added = _merged(folder, settings, file)

    from tokenizers import AddedToken, Tokenizer

    from genctl.models.tokenizer_recipes import RECIPES, Fields, alone, post_processor

    fields = Fields(settings, file)
    if name == BACKEND:
        backend = Tokenizer.from_file(str(path))
    else:
        recipe = RECIPES[name]
        if not isinstance(file.get("model"), dict) or file["model"].get("type") != "BPE":
            raise UnsupportedTokenizer(f"{name} takes no such vocabulary")
        fields.settings = settings = {**recipe.tokens, **settings}
        backend = recipe.parts(fields)
        if (last := post_processor(file)) is not None:
            backend.post_processor = last
    if isinstance(file.get("padding"), dict):
        settings.setdefault("pad_token", file["padding"].get("pad_token"))
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = fields.flag("split_special_tokens", False)
    named = {key: settings[key] for key in NAMED if settings.get(key) is not None} | specific
    special = {key: named[key] for key in dict.fromkeys((*NAMED, *named)) if key in named}
    extra = list(settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or ())
    if not all(
        str(token) and (isinstance(token, str) or type(token).__name__ == "AddedToken")
        for token in (*special.values(), *extra)
    ):
        raise UnsupportedTokenizer("a special token is no text")
    _add(backend, added, special, extra)
    if backend.post_processor is None or name == "GPTNeoXTokenizer":
        backend.post_processor = alone()
    if name == "Qwen2Tokenizer":  # which adds its special tokens again
        backend.add_tokens(
            [AddedToken(token, special=True) for token in dict.fromkeys(map(str, (*special.values(), *extra)))]
        )
    names = {key: str(token) for key, token in special.items()}
    return PlainTokenizer(backend, names, map(str, extra), clean=clean, template=template, place=str(folder))


def _check_fields(settings: dict[str, Any]) -> None:
    known = _NO_EFFECT | _READ | _EXTRA
    for name, value in settings.items():
        if name not in known and not name.endswith("_token"):
            raise UnsupportedTokenizer(f"tokenizer_config.json has the field {name!r:.60}")
        if name in ("padding_side", "truncation_side") and value not in _SIDES:
            raise UnsupportedTokenizer(f"{name} = {value!r:.40}")
        if name == "model_input_names" and not isinstance(value, list):
            raise UnsupportedTokenizer(f"{name} = {value!r:.40}")


def _merged(
    folder: Path, settings: dict[str, Any], file: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[int, Any]]:
    """The arguments of the class: its fields, special tokens under the checkpoint's own names, and added tokens by id.

    Without an added_tokens_decoder in it an older special_tokens_map.json overrides it. Lists in that file, and an
    added_tokens.json, are left to transformers.
    """
    from tokenizers import AddedToken

    settings = {key: value for key, value in settings.items() if key not in _NO_EFFECT}
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    own = {
        key: settings.pop(key)
        for key in list(settings)
        if key not in NAMED and key.endswith("_token") and isinstance(settings[key], str)
    }
    if isinstance(settings.get("extra_special_tokens"), dict):
        own |= settings.pop("extra_special_tokens")
    decoder = settings.pop("added_tokens_decoder", None)
    if decoder is None:
        path = folder / "special_tokens_map.json"
        for key, value in read_json(path, path.name).items() if path.is_file() else ():
            if not key.endswith("_token"):
                raise UnsupportedTokenizer(f"{path.name} has the field {key!r:.60}")
            settings[key] = AddedToken(**{**_parts(value), "special": True}) if isinstance(value, dict) else value
        if (folder / "added_tokens.json").is_file():
            raise UnsupportedTokenizer("added_tokens.json adds tokens")
        entries = [dict(entry) for entry in file.get("added_tokens") or ()]
        decoder = {entry.pop("id", None): entry for entry in entries}
    if not isinstance(decoder, dict) or not all(str(number).isdecimal() for number in decoder):
        raise UnsupportedTokenizer("added tokens without ids")
    added = {int(number): AddedToken(**_parts(token)) for number, token in decoder.items()}
    by_text = {str(token): token for token in added.values()}
    settings = {key: _converted(value) for key, value in settings.items()}
    for key in NAMED:
        if settings.get(key) is not None:
            settings[key] = by_text.get(str(settings[key]), settings[key])
    late = {key: value for key, value in settings.items() if key not in NAMED and key.endswith("_token")}
    settings = {key: value for key, value in settings.items() if key not in late}
    late = {key: value for key, value in late.items() if value is not None}
    return settings, late | {key: _converted(value) for key, value in own.items()}, added


def _add(backend: Tokenizer, added: dict[int, Any], special: dict[str, Any], extra: Sequence[Any]) -> None:
    """Add the tokens in the order of their ids, then the missing special ones."""
    from tokenizers import AddedToken

    tokens = [token for _, token in sorted(added.items())]
    there = {token.content for token in backend.get_added_tokens_decoder().values()} | {str(token) for token in tokens}
    listed = set(tokens)
    for token in (*special.values(), *extra):
        if str(token) not in there and token not in listed:
            tokens.append(token)
            listed.add(token)
    named = {str(token) for token in special.values()}
    for place, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[place] = AddedToken(token, special=True)
        elif not token.special and str(token) in named:
            token.special = True
    if tokens:
        backend.add_tokens(tokens)


def _template(folder: Path, template: Any) -> Any:
    """The chat template, or several by name: from files, else from tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
    more = folder / "additional_chat_templates"
    files |= {path.stem: path for path in sorted(more.glob("*.jinja")) if path.is_file()} if more.is_dir() else {}
    try:
        texts = {name: reader.text(path, LARGEST_JSON, regular=True) for name, path in files.items()}
    except Unreadable as error:
        raise UnsupportedTokenizer(f"a chat template cannot be read: {error}") from None
    if texts:
        return texts["default"] if list(texts) == ["default"] else texts
    if isinstance(template, list):
        try:
            template = {entry["name"]: entry["template"] for entry in template}
        except (TypeError, KeyError):
            template = False
    texts = template if isinstance(template, dict) else {"": template}
    if template is not None and not all(isinstance(text, str) for text in texts.values()):
        raise UnsupportedTokenizer("chat_template is no text")
    return template


def _parts(token: Any) -> dict[str, Any]:
    """The fields of an added token. Raises UnsupportedTokenizer if it is malformed."""
    if not isinstance(token, dict) or set(token) - _TOKEN or not isinstance(token.get("content"), str):
        raise UnsupportedTokenizer(f"an added token is {token!r:.80}")
    return {key: value for key, value in token.items() if key != "__type"}


def _converted(value: Any) -> Any:
    """JSON with AddedToken objects for the dictionaries that describe them."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        from tokenizers import AddedToken

        return AddedToken(**_parts(value))
    return [_converted(entry) for entry in value] if isinstance(value, list) else value
