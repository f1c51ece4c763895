"""The transformers class and config of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from genctl.errors import ModelError
from genctl.models import check
from genctl.models.architectures import facts_of
from genctl.models.library_errors import guarded
from genctl.models.weights import few

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(checkpoint: check.Checkpoint, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from genctl import compat  # imports torch

    names = checkpoint.config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("config.json: architectures is not a list of names")
    kind = checkpoint.model_type
    if kind not in CONFIG_MAPPING_NAMES and not trust_remote_code:
        if "auto_map" in checkpoint.config:
            raise ModelError(
                f"{kind!r:.80} is an architecture that transformers has no code for; the checkpoint brings its own, "
                "which runs only with --trust-remote-code"
            )
        if facts_of(kind).compared and compat.older_transformers():
            raise compat.transformers_needed(f"the architecture {kind!r}")
        import transformers

        raise ModelError(f"transformers {transformers.__version__} knows no architecture {kind!r:.80}")
    config = guarded(
        lambda: AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True, **checkpoint.place
        ),
        "config.json cannot be used",
    )
    compat.correct_config(kind, config)
    # the caller chooses what a forward pass returns
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is not None:
            part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False
    return config


def auto_class(checkpoint: check.Checkpoint, config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    """The class that loads this checkpoint, an auto class in general. Raises ModelError if it cannot continue a text.

    Models of audio and text that transformers lists as encoder-decoders are decoders for text alone. For models of
    images and text, AutoModelForCausalLM loads the text model if it supports it.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto as auto

    causal = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    sequences = dict(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    masked = dict(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    kind = checkpoint.model_type
    names = checkpoint.config.get("architectures") or []
    if trust_remote_code and "auto_map" in checkpoint.config:
        return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    described = few(names) or f"architecture {kind!r:.80}"
    for name in (kind, *names):
        if why := facts_of(name).unfit or _UNFIT_CLASSES.get(name):
            raise ModelError(f"{described} {why}, so it cannot continue a text")
    mixed = _names(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    heads = _names(causal) | _names(sequences)
    # an encoder-decoder that was saved without its head, which is the embeddings
    bare = config.is_encoder_decoder and kind in sequences and names == [auto.MODEL_MAPPING_NAMES.get(kind)]
    if names and not bare and not (heads | (mixed if kind in causal else set())) & set(names):
        raise _unfit(described, set(names), auto)
    if getattr(config, "is_encoder_decoder", False):
        if kind not in sequences:
            raise _unfit(described, {kind}, auto)
        return AutoModelForSeq2SeqLM
    encodes = not names and kind in masked and not getattr(config, "is_decoder", False)
    if kind in causal and not encodes:
        return AutoModelForCausalLM
    if kind in sequences:
        return AutoModelForSeq2SeqLM
    for name in names:  # a text model alone, which the table has as part of a larger one (Mllama)
        own = getattr(transformers, name, None) if name in _names(causal) else None
        if own is not None and getattr(own, "config_class", None) is type(config):
            return own
    raise _unfit(described, {kind}, auto)


# Classes among those of language models that cannot continue a text; for architectures see `Architecture.unfit`.
_UNFIT_CLASSES = {
    "Emu3ForConditionalGeneration": "reads pictures, and transformers does not find its text model by itself"
}


def _unfit(described: str, known: set[str], auto: Any) -> ModelError:
    """The error for a class or architecture that cannot be loaded."""

    def among(*tables: str) -> bool:
        return any(known & ({*table} | _names(table)) for table in (dict(getattr(auto, name)) for name in tables))

    if among("MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES", "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES"):
        return ModelError(f"{described} writes sound, not text")
    if among(
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    ):
        return ModelError(f"{described} reads pictures or sound, and genctl loads models that are made for text")
    if any(name.endswith("ForConditionalGeneration") for name in known):
        return ModelError(f"{described} is none of the classes with which transformers continues a text")
    return ModelError(f"{described} has no language-model head, so it cannot generate text")


def _names(table: dict[str, Any]) -> set[str]:
    """The class names in a table of transformers."""
    return {*_flat(table.values())}


def _flat(values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value
