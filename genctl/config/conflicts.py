"""Knobs that contradict each other, and knobs that a later layer has made moot.

Refuse or report, never ignore: a knob that can do nothing because of another at the same height or below is a mistake
(`Clash`), with both sources named. One that a *later* layer switched off, or that only the checkpoint asked for, is
moot: it goes back to its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from genctl.config.check import default, known, shown
from genctl.params import Generation, knobs, spelled

# Knobs of sampling that another knob reads as well: contrastive search takes its candidates by top_k.
ALSO_READ_BY = {"top_k": ("penalty_alpha",)}

# Knobs that only refine another: without that one they change nothing.
REFINES = {
    "xtc_threshold": "xtc_probability",
    "dynatemp_exponent": "dynatemp_range",
    "mirostat_eta": "mirostat_tau",
    "dry_base": "dry_multiplier",
    "dry_allowed_length": "dry_multiplier",
    "dry_sequence_breakers": "dry_multiplier",
    "negative_prompt": "guidance_scale",
    "stop_repeat_times": "stop_repeat_ngram",
    "early_stopping": "num_beams",
    "mbr_utility": "mbr_samples",
    "max_memory": "device_map",
    "offload_folder": "device_map",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, how high its layer stands, where it was written, and in what sort of layer."""

    value: Any
    level: int
    place: str
    kind: Literal["model", "user", "command", "row"] = "user"


@dataclass(frozen=True)
class Clash:
    """Knobs that cannot both have what they ask for."""

    keys: frozenset[str]
    sentence: str
    hint: str = ""
    by_default: bool = False  # whether it rests on a default, which a checkpoint's generation_config may still change


Settings = Mapping[str, Setting]


def _get(settings: Settings, key: str) -> Setting:
    """The setting of a knob; the built-in default stands below every layer."""
    return settings.get(key) or Setting(default(key) if key in known() else None, -1, "default")


def _say(key: str, setting: Setting) -> str:
    return f"{key} = {shown(setting.value)} ({setting.place})"


def _greedy(settings: Settings) -> tuple[str, Setting] | None:
    """The highest setting that keeps tokens from being drawn, with its words; None where they are drawn."""
    found = []
    sample, temperature = _get(settings, "do_sample"), _get(settings, "temperature")
    if sample.value is False:
        found.append((f"do_sample is false ({sample.place})", sample))
    if temperature.value == 0:
        found.append((f"temperature is 0 ({temperature.place})", temperature))
    return max(found, key=lambda pair: pair[1].level, default=None)


def _idle(settings: Settings) -> Iterator[tuple[str, Setting]]:
    """Knobs of sampling that were set to something, and that nothing else reads."""
    for key, item in knobs(Generation).items():
        setting = settings.get(key)
        if not item.metadata["sampling"] or setting is None:
            continue
        if setting.value in (None, item.metadata["neutral"], default(key)) or (
            key == "temperature" and setting.value == 0
        ):
            continue
        if not any(_get(settings, reader).value for reader in ALSO_READ_BY.get(key, ())):
            yield key, setting


def _add(key: str, value: str, setting: Setting) -> str:
    """How to say `key` where `setting` was said."""
    if setting.kind != "command":
        return f"add {key} = {value}"
    return f"add --{spelled(key)}" + ("" if value == "true" else f" {value}")


def find_clashes(settings: Settings) -> list[Clash]:
    """Every contradiction.

    In the order: sampling, how many sequences, lengths, caches, compiling, knobs that refine others, chat.
    """
    kinds = (_sampling, _sequences, _lengths, _caches, _compiling)
    found = [clash for kind in kinds for clash in kind(settings)]
    idle = {key for key, _ in _idle(settings)} if _greedy(settings) else set()
    for key, setting in _unrefined(settings):
        other = _get(settings, REFINES[key])
        if key not in idle and setting.kind != "model" and setting.level >= other.level:
            words = f"{_say(key, setting)} has no effect without {REFINES[key]}"
            found.append(Clash(frozenset({key, REFINES[key]}), words, by_default=other.level < 0))
    system, chat = _get(settings, "system"), _get(settings, "chat")
    if system.value is not None and chat.value is False and chat.level == system.level:
        words = f"{_say('system', system)} is said in a chat and contradicts {_say('chat', chat)}"
        found.append(Clash(frozenset({"system", "chat"}), words, "leave out one of them"))
    return found


def _unrefined(settings: Settings) -> Iterator[tuple[str, Setting]]:
    """Knobs that were set to refine one which is off. A preset that lists its processors may name it there."""
    if "processors" in settings or "stopping" in settings:
        return
    for key, other in REFINES.items():
        setting = settings.get(key)
        if setting is None or other not in known() or setting.value == default(key):
            continue
        if _get(settings, other).value in (None, default(other), knobs(known()[other][0])[other].metadata["neutral"]):
            yield key, setting


def _sampling(settings: Settings) -> Iterator[Clash]:
    greedy = _greedy(settings)
    if greedy is None:
        return
    words, off = greedy
    sample, temperature = _get(settings, "do_sample"), _get(settings, "temperature")
    if sample.value and sample.kind == temperature.kind == "command":
        yield Clash(
            frozenset({"do_sample", "temperature"}),
            f"{_say('temperature', temperature)} means greedy and contradicts {_say('do_sample', sample)}",
            "leave out one of them",
        )
    for key, setting in _idle(settings):
        if setting.kind == "model" or setting.level < off.level:
            continue
        hint = _add("do_sample", "true", setting) if sample.value is False else "set a temperature above 0"
        sentence = f"{_say(key, setting)} has no effect while {words}"
        yield Clash(frozenset({key, "do_sample", "temperature"}), sentence, hint, by_default=off.level < 0)


def _sequences(settings: Settings) -> Iterator[Clash]:
    wanted = _get(settings, "num_return_sequences")
    beams = _get(settings, "num_beams")
    count = beams.value or 1
    if wanted.kind == "model" or wanted.value <= 1 or wanted.value <= count:
        return
    keys = frozenset({"num_return_sequences", "num_beams", "do_sample", "temperature"})
    if count > 1:
        yield Clash(
            keys,
            f"{_say('num_return_sequences', wanted)} cannot exceed {_say('num_beams', beams)}",
            _add("num_beams", str(wanted.value), wanted).replace("add", "use", 1),
        )
        return
    greedy = _greedy(settings)
    if greedy is None:
        return
    hint = _add("do_sample", "true", wanted)
    if "num_beams" in known():
        hint += f" or {_add('num_beams', str(wanted.value), wanted).removeprefix('add ')}"
    sentence = f"{_say('num_return_sequences', wanted)} would return equal sequences while {greedy[0]}"
    yield Clash(keys, sentence, hint, by_default=greedy[1].level < 0 or beams.level < 0)


def _lengths(settings: Settings) -> Iterator[Clash]:
    new, whole = _get(settings, "max_new_tokens"), _get(settings, "max_length")
    if None not in (new.value, whole.value) and new.level == whole.level and new.kind != "model":
        yield Clash(
            frozenset({"max_new_tokens", "max_length"}),
            f"{_say('max_new_tokens', new)} and {_say('max_length', whole)} are two answers to one question",
            "leave out one of them",
        )
        return
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        low, high = _get(settings, least), _get(settings, most)
        if _loser(settings) != most and low.kind != "model" and _exceeds(low, high):
            yield Clash(frozenset({least, most}), f"{_say(least, low)} exceeds {_say(most, high)}")


def _caches(settings: Settings) -> Iterator[Clash]:
    use, kept, saved = (_get(settings, key) for key in ("use_cache", "cache_implementation", "prompt_cache"))
    both = frozenset({"use_cache", "cache_implementation"})
    if use.level == kept.level and use.value is (kept.value == "off"):
        yield Clash(
            both,
            f"{_say('use_cache', use)} and {_say('cache_implementation', kept)} contradict each other",
            "leave out one of them",
        )
        return
    if saved.value is None:
        return
    off = max((setting for setting in (use, kept) if setting.value in (False, "off")), default=None, key=_level)
    if off is not None and not (off is kept and use.level > kept.level):
        words = _say("use_cache", off) if off is use else _say("cache_implementation", off)
        yield Clash(both | {"prompt_cache"}, f"{_say('prompt_cache', saved)} fills a cache, and {words} keeps none")


def _compiling(settings: Settings) -> Iterator[Clash]:
    """What --compile cannot do, where somebody asked for it: packed layers, and caches whose shape changes."""
    wanted = _get(settings, "compile")
    if not wanted.value:
        return
    pack, use, kept = (_get(settings, key) for key in ("pack", "use_cache", "cache_implementation"))
    found = []
    if pack.value and pack.level >= 0:
        found.append(("pack", pack, "packed layers are opaque to a compiler"))
    if use.value is False:
        found.append(("use_cache", use, "without a cache no two steps have one shape"))
    elif kept.level >= 0 and kept.value != "static" and not (kept.value == "dynamic" and kept.kind == "model"):
        found.append(("cache_implementation", kept, "compiled steps keep a cache of fixed size"))
    for key, setting, why in found:
        words = f"{_say('compile', wanted)} and {_say(key, setting)} contradict each other: {why}"
        yield Clash(frozenset({"compile", key}), words, "leave out one of them")


def _level(setting: Setting) -> int:
    return setting.level


def _exceeds(low: Setting, high: Setting) -> bool:
    return low.value is not None and high.value is not None and low.value > high.value


def _loser(settings: Settings) -> str:
    """Which of max_new_tokens and max_length yields to the other, if both are set."""
    new, whole = _get(settings, "max_new_tokens"), _get(settings, "max_length")
    if None in (new.value, whole.value):
        return ""
    return "max_new_tokens" if whole.level > new.level else "max_length"


def settle(settings: Settings) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """What holds instead of what was set, for knobs that are moot: {key: (value, origin)}, and notes worth telling."""
    moot: dict[str, tuple[Any, str]] = {}
    notes: list[str] = []
    greedy = _greedy(settings)
    if greedy is not None:
        sample, temperature = _get(settings, "do_sample"), _get(settings, "temperature")
        if sample.value:
            moot["do_sample"] = (False, temperature.place)
            if sample.level > temperature.level and sample.kind != "model":
                notes.append(
                    f"{_say('temperature', temperature)} means greedy, in spite of {_say('do_sample', sample)}"
                )
        moot.update((key, (default(key), "default")) for key, _ in _idle(settings))
        wanted = _get(settings, "num_return_sequences")
        if wanted.kind == "model" and wanted.value > (_get(settings, "num_beams").value or 1):
            moot["num_return_sequences"] = (1, "default")
            notes.append(f"{_say('num_return_sequences', wanted)} is not used while {greedy[0]}")
    moot.update((key, (default(key), "default")) for key, _ in _unrefined(settings))
    system, chat = _get(settings, "system"), _get(settings, "chat")
    if system.value is not None and not chat.value:
        if chat.level > system.level:
            moot["system"] = (None, "default")
        else:
            moot["chat"] = (True, system.place)
    use, kept = _get(settings, "use_cache"), _get(settings, "cache_implementation")
    if use.value is (kept.value == "off"):  # two words for one thing: the later one holds
        if use.level > kept.level:
            moot["cache_implementation"] = (default("cache_implementation") if use.value else "off", use.place)
        else:
            moot["use_cache"] = (kept.value != "off", kept.place)
    loser = _loser(settings)
    if loser:
        moot[loser] = (None, "default")
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        low, high = _get(settings, least), _get(settings, most)
        if loser != most and low.kind == "model" and _exceeds(low, high):
            # No EOS before `most` tokens, and then the end: the same text, said without contradiction.
            moot[least] = (high.value, high.place)
    return moot, notes
