"""What a file may set that the user did not name: one row for every knob (`TABLE`).

Such files are settings files and presets outside the user's own folder, chats and trees that are opened, recordings and
golden files: they may come from somebody else. A file may choose how text is generated, and from which data. It may not
choose code, a place to send to, a place to read adapters or pickles from, or a place to write to. Only the user sets
those: on the command line, in the environment, or in the files of `config_home`. The settings of a journal are only
compared; those of an input row stay within the run (see `layers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from genctl.config.check import UNSAFE, default, shown
from genctl.config.conflicts import Found, Objection, Setting
from genctl.config.listed_knobs import LISTS
from genctl.errors import UsageError
from genctl.params import spelled


@dataclass(frozen=True)
class Rule:
    """What a found file may do with a knob.

    free: set it, it has no effect outside the run. checkpoint: name one of this machine; it is data, and runs no code.
    file: name a file in or below the folder of the found file. list: tables, whose keys have rows of their own.
    yours: set it only to a value that the user sets too, because it does what `why` says. never: no file may set it.
    """

    kind: Literal["free", "checkpoint", "file", "list", "yours", "never"]
    why: str = ""


FREE, CHECKPOINT, FILE, LIST = Rule("free"), Rule("checkpoint"), Rule("file"), Rule("list")

# Lengths, sampling, penalties, words, structure, search, drafts, stopping, special tokens, cache; then the run. Numbers
# that take memory or time are bounded by their types. `min_tokens` is a key of [[stopping]] alone.
_FREE = """
max_new_tokens max_length min_new_tokens min_length num_return_sequences
do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff top_n_sigma xtc_probability
xtc_threshold dynatemp_range dynatemp_exponent smoothing_factor smoothing_curve mirostat_tau mirostat_eta sampler
min_k p_less adaptive_target adaptive_decay
repetition_penalty encoder_repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size dry_multiplier dry_base dry_allowed_length dry_sequence_breakers
exponential_decay_length_penalty remove_invalid_values renormalize_logits guidance_scale negative_prompt
watermarking_config penalty_last_n
ban ban_ignore_case
bad_words bad_words_ids logit_bias sequence_bias suppress_tokens begin_suppress_tokens forced_bos_token_id
forced_eos_token_id
regex prefix token_healing grammar_after thinking_budget thinking_tags thinking_end
num_beams length_penalty early_stopping num_beam_groups diversity_penalty force_words force_words_ids
best_of mbr_samples mbr_utility penalty_alpha
prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit num_assistant_tokens
draft_sampling assistant_confidence_threshold assistant_lookbehind target_lookbehind
dola_layers contrastive_alpha contrastive_beta amateur_temperature
stop_strings stop_regex stop_in_thought keep_stop stop_token_ids max_time stop_mean_logprob stop_repeat_ngram
stop_repeat_times min_tokens
eos_token_id pad_token_id bos_token_id decoder_start_token_id
use_cache cache_implementation
offline device dtype device_map max_memory tensor_parallel merge_adapter pack quantize dequantize runtime threads
seed batch_size draft draft_corpus truncate row_timeout chat system chat_template chat_template_kwargs enable_thinking
tools processed_logprobs src_lang tgt_lang
about
"""

TABLE: dict[str, Rule] = {
    **dict.fromkeys(_FREE.split(), FREE),
    **dict.fromkeys(("model", "revision", "tokenizer", "assistant_model", "amateur_model"), CHECKPOINT),
    **dict.fromkeys(("json_schema", "grammar", "prompt_cache", "draft_corpus", "ban_file"), FILE),
    **dict.fromkeys(LISTS, LIST),
    "backend": Rule("yours", "decides who gets the prompts and the key"),
    "offload_folder": Rule("yours", "names a folder to write to"),
    "adapter": Rule("yours", "names a folder to read an adapter from"),
    "compile": Rule("yours", "starts a compiler and runs what it writes"),
    **dict.fromkeys(UNSAFE, Rule("never", "runs code that others wrote")),
}

# Flag that lets code run -> the knobs that name the code. With the flag, an unnamed file may not set them.
_CHECKPOINTS = ("model", "revision", "tokenizer", "adapter", "assistant_model", "amateur_model", "prompt_cache")
TRUST: dict[str, Sequence[str]] = {
    "allow_pickle": _CHECKPOINTS,
    "trust_remote_code": _CHECKPOINTS,
    "allow_plugins": tuple(LISTS),
}
DOWNLOADED = ("model", "assistant_model", "amateur_model")  # knobs whose value may be fetched from the Hub


def objection(
    key: str, value: Any, folder: Path | None, found: Found = "unnamed", *, opened: bool = False
) -> Objection | None:
    """Why a file in `folder` may not set `key` to this value; None if it may.

    `folder` is None for a file whose neighbours are not its own, such as a chat that was sent: then a file is named by
    the user only. Code in a list is a matter of `check_trust`, unless the file is "opened".
    """
    if found in ("", "kept"):
        return None
    rule = TABLE.get(key, FREE)  # an unknown key is a mistake of its own
    if rule.kind in ("checkpoint", "file", "yours") and isinstance(value, str) and value.startswith(("\\\\", "//")):
        return _cannot("name", "a folder of another machine")
    if opened and key in DOWNLOADED and key != "model" and may_download(value):
        return _cannot("name", "a checkpoint of the Hub")
    if rule.kind == "file" and isinstance(value, str) and _leads_out(value, folder):
        return _cannot("name", "a file outside of it" if folder is not None else "a file")
    if rule.kind == "list":
        return _of_list(key, value, folder, opened=opened)
    if rule.kind == "never" or (rule.kind == "yours" and value not in (None, default(key))):
        return Objection(rule.why, f"{rule.why}, which a file of this folder cannot choose")
    return None


def _cannot(verb: str, what: str) -> Objection:
    return Objection(f"{verb}s {what}", f"a file of this folder cannot {verb} {what}")


def code_of_row(key: str, value: Any) -> str:
    """The code that a row's list names by its dotted path, in words; "" if there is none."""
    return _code(key, (table for table in value if ":" in str(table.get("use", ""))))


def _of_list(key: str, tables: Any, folder: Path | None, *, opened: bool) -> Objection | None:
    """The first objection to a table of [[processors]] or [[stopping]]."""
    for table in tables if isinstance(tables, (list, tuple)) else ():
        if not isinstance(table, dict):
            continue
        if opened and (code := _code(key, [table])):
            return _cannot("name", f"code ({code})")
        for name, value in table.items():
            if name != "use" and (wrong := objection(name, value, folder)) is not None:
                return wrong
    return None


def _code(key: str, tables: Iterable[Mapping[str, Any]]) -> str:
    """The first table that names a plugin, in words; "" if all are genctl's own."""
    uses = (table.get("use") for table in tables)
    return next((f"use = {shown(use)}" for use in uses if isinstance(use, str) and use not in LISTS[key]), "")


def _leads_out(value: str, folder: Path | None) -> bool:
    """Whether a text names a file that is neither in `folder` nor below it, or that is hidden there."""
    for expand in (Path, lambda text: Path(text).expanduser()):  # not every reader knows ~
        try:
            path = expand(value)
            if not path.exists():
                continue  # a schema or a grammar itself, or an error of the reader
            real = path.resolve()
            if folder is None or not real.is_relative_to(inside := folder.resolve()):
                return True
            if any(part.startswith(".") for part in real.relative_to(inside).parts):
                return True
        except (OSError, RuntimeError, ValueError):  # too long for a name, ~ of an unknown user, a NUL
            continue
    return False


def hint(key: str) -> str:
    """How the user sets a value that a found file cannot."""
    if TABLE[key].kind == "list":
        return "to use it, name the file yourself: --preset FILE, and --allow-plugins for code"
    flag = f"--{spelled(key)}"
    return f"to use it, name it yourself: {flag}, GENCTL_{key.upper()} or $XDG_CONFIG_HOME/genctl/config.toml"


def mistakes(settings: Mapping[str, Setting], named: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str]]:
    """The forbidden settings of found files, each as a sentence and a hint. `named` holds the user's values."""
    for key, setting in settings.items():
        setting_text = f"{setting.place}: {key} = {shown(setting.value)}"
        if setting.objection is not None:
            yield f"{setting_text}: {setting.objection.sentence}", hint(key)
        elif setting.found and key == "offline" and setting.value is False and True in named.get(key, ()):
            yield f"{setting_text}: a file of this folder cannot switch the network on", ""


def confirmed(key: str, value: Any, named: Sequence[Any]) -> bool:
    """Whether the user has set each part of this value too."""
    try:
        parts = set(_parts(value))
        return parts <= set(_parts(named)) if parts else value in named
    except TypeError:  # tables cannot be compared as members of a set
        return value in named


def divided(
    values: Mapping[str, Any], folder: Path | None, found: Found, named: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Objection]]:
    """The settings of a file that is opened: those that hold, those that hold because the user sets them too, and what
    is wrong with the others.
    """
    held, yours, refused = {}, {}, {}
    for key, value in values.items():
        wrong = objection(key, value, folder, found, opened=found == "unnamed")
        if wrong is None:
            held[key] = value
        elif confirmed(key, value, named.get(key, ())):
            yours[key] = value
        else:
            refused[key] = wrong
    return held, yours, refused


def download(settings: Mapping[str, Setting]) -> str:
    """The first knob for which an unnamed file names a checkpoint that may have to be downloaded; "" if none does."""
    return next((key for key in DOWNLOADED if _is_downloaded(settings.get(key))), "")


def _is_downloaded(setting: Setting | None) -> bool:
    return setting is not None and setting.found == "unnamed" and may_download(setting.value)


def may_download(value: Any) -> bool:
    """Whether a checkpoint is no built-in one and no file of this machine."""
    if not isinstance(value, str):
        return False
    try:
        return not value.startswith("builtin:") and not Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def check_trust(settings: Mapping[str, Setting], trust: Mapping[str, bool]) -> None:
    """Raises UsageError for code that a found file names: with the flag, if nobody named the file; without, always."""
    problems = [
        f"--{flag.replace('_', '-')} would run code that {setting.place} names: {key} = {shown(setting.value)}"
        for flag, keys in TRUST.items()
        if trust.get(flag)
        for key in keys
        if (setting := settings.get(key)) is not None and _untrusted(key, setting)
    ]
    if problems:
        raise UsageError(
            "\n".join(problems),
            hint="name it on the command line too: by its flag, or with --preset a file that sets it",
        )
    for key in LISTS:
        setting = settings.get(key)
        if setting is None or setting.found not in ("named", "unnamed") or trust.get("allow_plugins"):
            continue
        if code := _code(key, setting.value):
            raise UsageError(
                f"{setting.place}: {key}: {code} is code, which needs --allow-plugins and a file that you name",
                hint="--preset FILE names it",
            )


def _untrusted(key: str, setting: Setting) -> bool:
    """Whether a flag does not hold for this setting: nobody named its file. A kept chat names no checkpoint anew."""
    return setting.found == "unnamed" or (setting.found == "kept" and key not in LISTS)


def _parts(value: Any) -> Iterable[Any]:
    """The parts of a value: those of a list, of lists in it, or the value itself."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
    else:
        yield value
