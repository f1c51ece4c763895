"""The tokenizer of a GGUF file with the tokenizers library alone, as transformers builds it from the file's metadata.

The steps are those of `integrations/gguf/gguf_tokenizer_mapping.py` of transformers 5.24: the vocabulary goes into one
of its classes (here `tokenizer_recipes`), the file's control and user-defined tokens are added, `tokenizer.ggml.pre`
names the expression that splits texts, and `add_bos_token` and `add_eos_token` what goes around them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from genctl.models import gguf_header, sizes
from genctl.models.gguf_header import Header, TokenLists
from genctl.models.tokenizer import NAMED, PlainTokenizer
from genctl.models.tokenizer_files import UnsupportedTokenizer
from genctl.models.tokenizer_recipes import QWEN2, RECIPES, Fields

_KEY = "tokenizer.ggml"
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CONTROL, _USER = sizes.ADDED
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_TEKKEN = "|".join((*_CASED, r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES))
_GPT4O = "|".join((*(f"{word}{_CONTRACTIONS}?" for word in _CASED), r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES))
_SPLITS = {  # by tokenizer.ggml.pre; None is GPT-2's own
    **dict.fromkeys(("", "default", "gpt-2")),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "dbrx"), _LLAMA3
    ),
    **dict.fromkeys(("smaug-bpe", "lfm2", "jina-v5-nano"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "tekken": _TEKKEN,
}
_ARCHITECTURES = frozenset(  # whose class of transformers adds nothing else to what the file says
    {"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gpt2", "starcoder2", "stablelm", "falcon", "gpt-oss"}
    | {"phi3", "gemma2", "gemma3"}
)
_BESIDE = ("config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json",
           "chat_template.jinja", "additional_chat_templates", "tekken.json")  # fmt: skip


def plain(path: Path) -> PlainTokenizer:
    """The tokenizer of a GGUF file. Raises UnsupportedTokenizer with a reason, or ModelError for a damaged file."""
    header = gguf_header.read(path, vocabulary=True)
    beside = next((name for name in _BESIDE if (path.parent / name).exists()), None)
    if beside is not None:
        raise UnsupportedTokenizer(f"{beside} beside the file may change it")
    if header.architecture not in _ARCHITECTURES:
        raise UnsupportedTokenizer(f"the architecture {header.architecture!r:.60} may have rules of its own")
    try:
        return _plain(header, path)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # metadata of an unknown form
        raise UnsupportedTokenizer(f"it is read otherwise: {type(error).__name__}: {error}"[:200]) from error


def _plain(header: Header, path: Path) -> PlainTokenizer:
    metadata, vocabulary, kind = header.metadata, header.vocabulary, header.metadata.get(f"{_KEY}.model")
    if kind == "gpt2":
        backend = _byte_level(vocabulary, metadata.get(f"{_KEY}.pre", ""))
    elif kind == "llama":
        backend = _sentencepiece(vocabulary, header.architecture)
    else:
        raise UnsupportedTokenizer(f"its kind is {kind!r:.40}")
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise UnsupportedTokenizer("its chat template is no text")

    ids = {name: metadata.get(f"{_KEY}.{key}_token_id") for name, key in _NAMED.items()}
    special = {name: vocabulary.tokens[id] for name, id in ids.items() if id is not None}
    if header.architecture.startswith("gemma"):
        special["mask_token"] = "<mask>"
    there = {token.content for token in backend.get_added_tokens_decoder().values()}
    again = header.architecture.startswith("qwen")  # its class makes user-defined ones special
    new = [token for token in special.values() if again or token not in there]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in new])
    before, after = (
        [special[name]] if name in special and metadata.get(f"{_KEY}.add_{name}", default) else []
        for name, default in (("bos_token", kind == "llama"), ("eos_token", False))
    )
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *after],
        special_tokens=[(token, backend.token_to_id(token)) for token in (*before, *after)],
    )
    return PlainTokenizer(backend, special, template=template, place=str(path.parent))


def _byte_level(vocabulary: TokenLists, pre: Any) -> Tokenizer:
    """Bytes are spelled as letters; a token in other letters stands for their bytes."""
    if pre not in _SPLITS:
        raise UnsupportedTokenizer(f"{_KEY}.pre is {pre!r:.40}")
    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    ids = {
        token if alphabet.issuperset(token) else "".join(part for part, _ in spelled(token)): id
        for id, token in enumerate(vocabulary.tokens)
    }
    backend = _backend("GPT2Tokenizer", ids, vocabulary.merges)
    _add(backend, vocabulary, alphabet)
    if (split := _SPLITS[pre]) is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return backend


def _sentencepiece(vocabulary: TokenLists, architecture: str) -> Tokenizer:
    """A SentencePiece vocabulary; where the file has no merges, its tokens imply them.

    Gemma's merges follow the places of its tokens, those of others their scores; its files have real spaces.
    """
    gemma = architecture.startswith("gemma")
    tokens = vocabulary.tokens
    if gemma:
        tokens = ["▁" * len(token) if " " in token and not token.strip() else token for token in tokens]
    ids = {token: id for id, token in enumerate(tokens)}
    scores = [-float(id) for id in range(len(tokens))] if gemma else vocabulary.scores
    merges = vocabulary.merges or _merges(ids, dict(zip(tokens, scores, strict=True)))
    backend = _backend("GemmaTokenizer" if gemma else "LlamaTokenizer", ids, merges)
    if architecture == "phi3":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    _add(backend, vocabulary)
    return backend


def _merges(ids: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token: the best of what they make first, then the longest parts."""
    found = []
    for token, score in scores.items():
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        whole = sorted((ids[left], ids[right], left, right) for left, right in pairs if left in ids and right in ids)
        found += [(score, len(left), len(right), left, right) for _, _, left, right in whole]
    found.sort(key=lambda one: one[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _backend(recipe: str, ids: dict[str, int], merges: list[Any]) -> Tokenizer:
    """A class's tokenizer with its default special tokens, new ones where the vocabulary lacks them."""
    own = RECIPES[recipe]
    backend = own.parts(Fields({**own.tokens}, {"model": {"vocab": ids, "merges": merges}}))
    named = (own.tokens.get(name) for name in NAMED)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(named) if token])
    return backend


def _add(backend: Tokenizer, vocabulary: TokenLists, letters: frozenset[str] | None = None) -> None:
    """Add the tokens that texts hold whole. Control tokens in other `letters` are mislabelled ones, and left out."""
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=False))
    control = [token for token, kind in typed if kind == _CONTROL and (letters is None or letters.issuperset(token))]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    known = backend.get_vocab(with_added_tokens=True)
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in typed if kind == _USER and token in known]
    )
