"""A checkpoint's tokenizer.json with the tokenizers library alone, as transformers reads it.

transformers reads the same file with the same library, adds tokenizer_config.json and an older file, and some of its
classes take the vocabulary alone from tokenizer.json and set all other parts (`RECIPES`; transformers 5,
`models/*/tokenization_*.py`). The steps are those of `PreTrainedTokenizerBase.from_pretrained` and
`TokenizersBackend.__init__` of transformers 5. Folders with an unknown field or class are left to `AutoTokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.models import tokenizer_limits
from genctl.models.architectures import BACKEND, LEFT_TO_TRANSFORMERS, NO_CLASS, facts_of
from genctl.models.weights import LARGEST_JSON, read_json

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Fields that transformers reads before it builds a class, or that affect neither ids nor texts.
_NO_EFFECT = frozenset(
    {"tokenizer_class", "model_max_length", "max_len", "backend", "name_or_path", "is_local", "local_files_only"}
    | {"max_length", "stride", "truncation_strategy", "pad_to_multiple_of", "pad_token_type_id", "verbose"}
    | {"model_input_names", "chat_template", "clean_up_tokenization_spaces", "processor_class", "padding_side"}
    | {"truncation_side", "add_bos_token", "add_eos_token", "errors", "sp_model_kwargs", "use_fast", "from_slow"}
    | {"spaces_between_special_tokens", "special_tokens_map_file", "tokenizer_file", "vocab_file"}
    | {"full_tokenizer_file", "use_default_system_prompt", "return_token_type_ids", "device_map", "legacy_behaviour"}
    | {"merges_file"}
)
_READ = frozenset(
    {"added_tokens_decoder", "add_prefix_space", "trim_offsets", "legacy", "split_special_tokens"}
    | {"extra_special_tokens", "additional_special_tokens"}
)
Settings: TypeAlias = dict[str, Any]  # of tokenizer_config.json; tokens are str or AddedToken


class UnsupportedTokenizer(Exception):
    """Why a tokenizer is left to transformers."""


class PlainTokenizer:
    """The part of transformers' tokenizer interface that genctl uses."""

    def __init__(
        self,
        backend: Tokenizer,
        special: dict[str, str],
        extra: Iterable[str] = (),
        *,
        template: str | dict[str, str] | None = None,
        place: str = "",
        literal: dict[int, str] | None = None,
    ) -> None:
        """`literal`: tokens of a byte-level vocabulary that are plain text, not letters for bytes."""
        self.backend_tokenizer = backend
        self.literal = literal or {}
        self.name_or_path = place
        self.chat_template = template
        self.special_tokens_map = special
        self.all_special_tokens = list(dict.fromkeys([*special.values(), *extra]))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __getattr__(self, name: str) -> Any:
        """bos_token, eos_token_id and so on; None for tokens that do not exist."""
        special = self.__dict__.get("special_tokens_map", {})
        key = name.removesuffix("_id")
        if key not in NAMED and key not in special:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        token = special.get(key)
        return token if key == name or token is None else self.backend_tokenizer.token_to_id(token)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        ids = map(self.backend_tokenizer.token_to_id, self.all_special_tokens)
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
        return {"input_ids": encoding.ids} | ({"offset_mapping": encoding.offsets} if return_offsets_mapping else {})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """The text of ids. Nothing is cleaned up: tokenizers that do so are left to transformers."""
        runs = ((text, list(run)) for text, run in groupby(ids, self.literal.get))
        return "".join(
            text * len(run) if text else self.backend_tokenizer.decode(run, skip_special_tokens=skip_special_tokens)
            for text, run in runs
        )

    def batch_decode(self, several: Iterable[Sequence[int]], **options: Any) -> list[str]:
        """`decode` of each sequence."""
        return [self.decode(ids, **options) for ids in several]

    def convert_ids_to_tokens(self, id: int) -> str | None:
        """The token of an id."""
        token: str | None = self.backend_tokenizer.id_to_token(id)
        return token


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
    settings: Settings = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = read_json(folder / "tokenizer_config.json", "tokenizer_config.json")
    name = _class_of(model, settings, byte_level=lambda: '"ByteLevel"' in path.read_text(encoding="utf-8"))
    for field in settings:
        if field not in _NO_EFFECT | _READ and not field.endswith("_token"):
            raise UnsupportedTokenizer(f"tokenizer_config.json has the field {field!r:.60}")
    template, cleans = _template(folder, settings), settings.get("clean_up_tokenization_spaces")
    file = tokenizer_limits.parsed(path)
    tokenizer_limits.forget()
    kind = file["model"].get("type") if isinstance(file.get("model"), dict) else None
    if cleans and kind != "BPE":
        raise UnsupportedTokenizer("it cleans up spaces")
    settings, own, added = _settings(folder, settings, file)
    if name == BACKEND:
        backend = Tokenizer.from_file(str(path))
    else:
        if kind != "BPE":
            raise UnsupportedTokenizer(f"{name} takes no such vocabulary")
        build, defaults = RECIPES[name]
        settings = {**defaults, **settings}
        backend = build(settings, file)
        if file.get("post_processor") is not None:
            empty = {**json.loads(Tokenizer(models.BPE()).to_str()), "post_processor": file["post_processor"]}
            backend.post_processor = Tokenizer.from_str(json.dumps(empty)).post_processor
    if isinstance(file.get("padding"), dict):
        settings.setdefault("pad_token", file["padding"].get("pad_token"))
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = _flag(settings, "split_special_tokens", False)
    special = {key: settings[key] for key in NAMED if settings.get(key) is not None} | own
    extra = list(settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or ())
    every = [*special.values(), *extra]
    _add(backend, added, {str(token) for token in special.values()}, every)
    if backend.post_processor is None or name == "GPTNeoXTokenizer":
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    if name == "Qwen2Tokenizer":  # which adds its special tokens again
        backend.add_tokens([AddedToken(token, special=True) for token in dict.fromkeys(map(str, every))])
    names = {key: str(token) for key, token in special.items()}
    return PlainTokenizer(backend, names, map(str, extra), template=template, place=str(folder))


def _settings(folder: Path, settings: Settings, file: dict[str, Any]) -> tuple[Settings, Settings, list[AddedToken]]:
    """The arguments of the class, special tokens under the checkpoint's own names, and added tokens by id.

    Without an added_tokens_decoder an older special_tokens_map.json overrides the fields. Lists in that file, and an
    added_tokens.json, are left to transformers.
    """
    settings = {key: value for key, value in settings.items() if key not in _NO_EFFECT}
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    own = {key: settings.pop(key) for key in list(settings) if key.endswith("_token") and key not in NAMED}
    if not all(isinstance(token, str | None) for token in own.values()):
        raise UnsupportedTokenizer("a token of its own is no text")
    own = {key: token for key, token in own.items() if token is not None}
    if isinstance(settings.get("extra_special_tokens"), dict):
        own |= settings.pop("extra_special_tokens")
    decoder = settings.pop("added_tokens_decoder", None)
    if decoder is None:
        path = folder / "special_tokens_map.json"
        for key, value in read_json(path, path.name).items() if path.is_file() else ():
            if key not in NAMED:
                raise UnsupportedTokenizer(f"{path.name} has the field {key!r:.60}")
            settings[key] = _token({**value, "special": True}) if isinstance(value, dict) else value
        if (folder / "added_tokens.json").is_file():
            raise UnsupportedTokenizer("added_tokens.json adds tokens")
        entries = [dict(entry) for entry in file.get("added_tokens") or ()]
        decoder = {entry.pop("id"): entry for entry in entries}
    added = [_token(decoder[number]) for number in sorted(decoder, key=int)]
    by_text = {str(token): token for token in added}
    settings = {key: _converted(value) for key, value in settings.items()}
    settings |= {key: by_text.get(str(settings[key]), settings[key]) for key in NAMED if settings.get(key) is not None}
    return settings, {key: _converted(value) for key, value in own.items()}, added


def _add(backend: Tokenizer, added: list[AddedToken], named: set[str], special: Sequence[Any]) -> None:
    """Add the tokens in the order of their ids, then the special ones that are missing."""
    there = {str(token) for token in (*backend.get_added_tokens_decoder().values(), *added)}
    tokens: list[Any] = [*added, *dict.fromkeys(token for token in special if str(token) not in there)]
    for place, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[place] = AddedToken(token, special=True)
        elif str(token) in named:
            token.special = True
    backend.add_tokens(tokens)


def _template(folder: Path, settings: Settings) -> Any:
    """The chat template, or several by name: from chat_template.jinja, else from tokenizer_config.json."""
    if (folder / "additional_chat_templates").is_dir():
        raise UnsupportedTokenizer("it has additional chat templates")
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        try:
            template = reader.text(folder / "chat_template.jinja", LARGEST_JSON, regular=True)
        except Unreadable as error:
            raise UnsupportedTokenizer(f"its chat template cannot be read: {error}") from None
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    return template


def _token(fields: dict[str, Any]) -> AddedToken:
    """An added token, by the fields that describe it."""
    return AddedToken(**{key: value for key, value in fields.items() if key != "__type"})


def _converted(value: Any) -> Any:
    """JSON, with AddedToken objects for the dictionaries that describe tokens."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return _token(value)
    return [_converted(entry) for entry in value] if isinstance(value, list) else value


def _flag(settings: Settings, name: str, default: bool) -> bool:
    """A boolean setting; null counts as the default."""
    value = settings.get(name)
    return default if value is None else value


# -- the class that transformers' `AutoTokenizer` uses for a folder, by the rules of version 5 -------------------------

# Names of the class that takes tokenizer.json unchanged, and of classes that it replaces.
_BACKENDS = frozenset({BACKEND, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend", "BloomTokenizer"})


def _class_of(config: dict[str, Any], tokenizer_config: dict[str, Any], *, byte_level: Callable[[], bool]) -> str:
    """`BACKEND` or one of `RECIPES`. `byte_level` returns whether tokenizer.json has a ByteLevel part.

    tokenizer_config.json or config.json may name a class, and each model type has a registered one. Raises
    UnsupportedTokenizer for any other class.
    """
    model_type = config.get("model_type")
    facts = facts_of(model_type)
    if facts.tokenizer in ("", LEFT_TO_TRANSFORMERS):
        raise UnsupportedTokenizer(f"model type {model_type!r:.40} has rules of its own")
    if tokenizer_config.get("auto_map") is not None or "model_name" in config:
        raise UnsupportedTokenizer("its class may be another than the one that is named")
    name = tokenizer_config.get("tokenizer_class")
    name = config.get("tokenizer_class") if name is None else name
    registered = None if facts.tokenizer == NO_CLASS else facts.tokenizer
    if name is None:
        name = registered or BACKEND
    elif not isinstance(name, str) or not name:
        raise UnsupportedTokenizer(f"tokenizer_class = {name!r:.40}")
    else:
        name = name.removesuffix("Fast")
        if name == "LlamaTokenizer" and not facts.tokenizer_wins and not facts.reads_tekken and byte_level():
            return BACKEND
        if registered is not None and (registered == BACKEND or facts.tokenizer_wins):
            name = registered
    if name in _BACKENDS:
        return BACKEND
    if name not in RECIPES:
        raise UnsupportedTokenizer(f"{name:.60} is not known to genctl")
    return str(name)


# -- classes that take the vocabulary, the merges and the post-processor of tokenizer.json, and set all other parts ----

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bpe(file: dict[str, Any], **options: Any) -> Tokenizer:
    merges = file["model"].get("merges") or []
    pairs: list[Any] = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    return Tokenizer(models.BPE(vocab=file["model"]["vocab"], merges=pairs, dropout=None, **options))


def _byte_level(
    settings: Settings, file: dict[str, Any], *, composed: bool = True, split: str = "", trims: bool = False
) -> Tokenizer:
    tokenizer = _bpe(file, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    tokenizer.decoder = decoders.ByteLevel()
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = last = pre_tokenizers.ByteLevel(
        add_prefix_space=_flag(settings, "add_prefix_space", False),
        trim_offsets=_flag(settings, "trim_offsets", True) if trims else True,
        use_regex=not split,
    )
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), last])
    return tokenizer


def _llama(settings: Settings, file: dict[str, Any]) -> Tokenizer:
    space = _flag(settings, "add_prefix_space", True)
    first = "always" if _flag(settings, "legacy", False) else "first"
    tokenizer = _bpe(file, fuse_unk=True, byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=first if space else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if space else steps)
    return tokenizer


def _gemma(settings: Settings, file: dict[str, Any]) -> Tokenizer:
    tokenizer = _bpe(file, fuse_unk=True, unk_token=str(settings.get("unk_token")), byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


# How one class builds its tokenizer, and its default special tokens.
Recipe: TypeAlias = tuple[Callable[[Settings, dict[str, Any]], Tokenizer], dict[str, str | None]]


def _recipe(build: Callable[[Settings, dict[str, Any]], Tokenizer], **tokens: str | None) -> Recipe:
    return build, {f"{name}_token": token for name, token in tokens.items()}


_END = "<|endoftext|>"
RECIPES: dict[str, Recipe] = {
    "GPT2Tokenizer": _recipe(partial(_byte_level, composed=False), unk=_END, bos=_END, eos=_END, pad=None),
    "GPTNeoXTokenizer": _recipe(partial(_byte_level, trims=True), unk=_END, bos=_END, eos=_END, pad="<|padding|>"),
    "Qwen2Tokenizer": _recipe(partial(_byte_level, split=_QWEN2), unk=_END, bos=None, eos=_END, pad=_END),
    "LlamaTokenizer": _recipe(_llama, bos="<s>", eos="</s>", unk="<unk>"),
    "GemmaTokenizer": _recipe(_gemma, unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", mask="<mask>"),
}
