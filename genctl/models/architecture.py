"""Which class of transformers loads a checkpoint, and with which config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from genctl.errors import ModelError
from genctl.models import check
from genctl.models.attempts import guarded
from genctl.models.weights import few

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(checkpoint: check.Checkpoint, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = checkpoint.model_type
    if kind not in CONFIG_MAPPING_NAMES and not trust_remote_code:
        if "auto_map" in checkpoint.config:
            raise ModelError(
                f"{kind!r:.80} is an architecture that transformers has no code for; the checkpoint brings its own, "
                "which runs only with --trust-remote-code"
            )
        import transformers

        raise ModelError(f"transformers {transformers.__version__} knows no architecture {kind!r:.80}")
    config = guarded(
        lambda: AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True
        ),
        "config.json cannot be used",
    )
    # what a forward returns is ours to ask for
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is not None:
            part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False
    return config


def auto_class(checkpoint: check.Checkpoint, config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    """The auto class that loads this checkpoint. Raises ModelError if it has no language-model head."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto as auto

    causal = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    sequences = dict(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    masked = dict(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    kind = checkpoint.model_type
    names = checkpoint.config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("config.json: architectures is not a list of names")
    if trust_remote_code and "auto_map" in checkpoint.config:
        return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    named = few(names) or f"architecture {kind!r:.80}"
    headless = ModelError(f"{named} has no language-model head, so it cannot generate text")
    heads = {name for table in (causal, sequences) for name in _flat(table.values())}
    if names and not heads & set(names):
        raise headless
    if getattr(config, "is_encoder_decoder", False):
        if kind not in sequences:
            raise headless
        return AutoModelForSeq2SeqLM
    encodes = not names and kind in masked and not getattr(config, "is_decoder", False)
    if kind not in causal or encodes:
        raise headless
    return AutoModelForCausalLM


def _flat(values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value
