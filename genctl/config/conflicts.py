"""Knobs that conflict with each other, and knobs that a later layer switches off.

Refuse or report, never ignore: a knob that has no effect because of another one in the same layer or below is a mistake
(`Clash`), which names both sources. A knob that a *later* layer switches off, or that only the checkpoint sets, goes
back to its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from genctl.config import chat_settings
from genctl.config.check import default, known, shown
from genctl.config.listed_knobs import CRITERIA, LISTS, PROCESSORS, WINDOW
from genctl.params import DRAFTING, Generation, knobs, spelled

# A file that is not the user's own: "named" on the command line, or "unnamed": read because it exists, or opened as a
# chat or a tree. "kept": a chat or a tree that genctl keeps for the user. "": all other places.
Found: TypeAlias = Literal["", "kept", "named", "unnamed"]

# Knobs of sampling with another use: contrastive search takes its candidates by top_k.
ALSO_READ_BY = {"top_k": ("penalty_alpha",)}

# Searches that take the most probable continuations unless do_sample is set, as in transformers.
SEARCHES = ("num_beams", "num_beam_groups", "penalty_alpha", "force_words", "force_words_ids")

# Knobs that refine others and have no effect without one of them: those of a processor's row, and those that say so.
REFINES: dict[str, tuple[str, ...]] = {
    knob: row.knobs[:1] for row in PROCESSORS.values() for knob in row.knobs[1:] if knob not in (*PROCESSORS, WINDOW)
} | {name: refined for name, (kind, _) in known().items() if (refined := knobs(kind)[name].metadata["refines"])}
# Knobs that a list of processors or stopping criteria may turn on.
LISTED = {row.knobs[0] for row in PROCESSORS.values()} | {name for names in CRITERIA.values() for name in names}


@dataclass(frozen=True)
class Objection:
    """Why a found file may not set a value: a verb with its object, and how that ends as an error."""

    why: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A value with the level, the place and the kind of its layer."""

    value: Any
    level: int
    place: str
    kind: Literal["model", "user", "command", "row"] = "user"
    typed: bool = False  # whether the user typed it for this job
    implied: bool = False  # whether it follows from other settings (see `imply`)
    found: Found = ""  # how the file was reached, if it is not the user's own (see `found_files`)
    objection: Objection | None = None  # why such a file may not set this value


@dataclass(frozen=True)
class Clash:
    """Knobs that cannot be combined."""

    keys: frozenset[str]
    sentence: str
    hint: str = ""
    by_default: bool = False  # whether one side is a default, which the checkpoint may still change


Settings = Mapping[str, Setting]


def _get(settings: Settings, key: str) -> Setting:
    """The setting of a knob; the built-in default is below every layer."""
    return settings.get(key) or Setting(default(key) if key in known() else None, -1, "default")


def _say(key: str, setting: Setting) -> str:
    return f"{key} = {shown(setting.value)} ({setting.place})"


def _searches(settings: Settings) -> str:
    """The setting, in words, that selects a search which samples only with do_sample."""
    for key in SEARCHES:
        setting = _get(settings, key)
        if setting.value and setting.value != default(key):
            return _say(key, setting)
    return ""


def _typed(settings: Settings) -> dict[str, Setting]:
    """Typed knobs of sampling that turn it on: do_sample is set nowhere, and they have no other meaning."""
    sample = _get(settings, "do_sample")
    written = sample.level >= 0 and sample.kind != "model"
    if written or sample.value or _get(settings, "temperature").value == 0 or _searches(settings):
        return {}
    sampling = {
        key: settings[key] for key, item in knobs(Generation).items() if item.metadata["sampling"] and key in settings
    }
    if _listed_samplers(settings):
        sampling["processors"] = settings["processors"]
    return {key: setting for key, setting in sampling.items() if setting.typed and setting.value is not None}


def _listed_samplers(settings: Settings) -> list[str]:
    """The processors of a list that act only when tokens are drawn, or in a search."""
    names = []
    for table in _get(settings, "processors").value or ():
        row = PROCESSORS.get(table["use"])
        if row is not None and row.sampling:
            knob = row.knobs[0]
            value = table.get(knob, _get(settings, knob).value)
            names += [] if value in (None, knobs()[knob].metadata["neutral"]) else [row.name]
    return names


def _explicit(settings: Settings) -> dict[str, Setting]:
    return {key: setting for key, setting in settings.items() if not setting.implied}


def imply(settings: Settings) -> dict[str, Setting]:
    """`settings` and those that follow from them: a typed knob of sampling turns sampling on."""
    explicit = _explicit(settings)
    typed = _typed(explicit)
    if typed:
        last = max(typed.values(), key=lambda setting: setting.level)
        explicit["do_sample"] = Setting(True, last.level, f"implied by {last.place}", last.kind, implied=True)
    return explicit


def notices(settings: Settings) -> list[str]:
    """Effects of typed settings that may surprise the user, in sentences. `settings` as `imply` returns them."""
    sample, temperature = _get(settings, "do_sample"), _get(settings, "temperature")
    lines = [sampling_notice(settings)] if sample.implied else []
    if sample.value and temperature.value == 0 and sample.kind == temperature.kind == "command":
        lines.append(_is_greedy(temperature, sample))
    return lines


def sampling_notice(settings: Settings) -> str:
    """Which typed settings turn sampling on."""
    names = [_named(key, setting.place) for key, setting in _typed(_explicit(settings)).items()]
    return f"{' and '.join(names)} {'turns' if len(names) == 1 else 'turn'} sampling on"


def _named(key: str, place: str) -> str:
    """A typed knob in a few words: `--temperature`, `--set temperature`, `temperature (--strategy warm)`."""
    flag = f"flag --{spelled(key)}"
    if place == flag:
        return place.removeprefix("flag ")
    return place if place.endswith(f" {key}") else f"{key} ({place})"


def _is_greedy(temperature: Setting, sample: Setting) -> str:
    return f"{_say('temperature', temperature)} is greedy: {_say('do_sample', sample)} has no effect"


def _greedy(settings: Settings) -> tuple[str, Setting] | None:
    """The highest setting that switches sampling off, in words; None if tokens are sampled."""
    switches = []
    sample, temperature = _get(settings, "do_sample"), _get(settings, "temperature")
    if sample.value is False:
        switches.append((f"do_sample is false ({sample.place})", sample))
    if temperature.value == 0:
        switches.append((f"temperature is 0 ({temperature.place})", temperature))
    return max(switches, key=lambda pair: pair[1].level, default=None)


def _idle(settings: Settings) -> Iterator[tuple[str, Setting]]:
    """Knobs of sampling that are set and have no other use."""
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
    """How to set `key` in the place where `setting` is set."""
    if setting.kind != "command":
        return f"add {key} = {value}"
    return f"add --{spelled(key)}" + ("" if value == "true" else f" {value}")


def find_clashes(settings: Settings) -> list[Clash]:
    """Every conflict: sampling, sequences, lengths, caches, compiling, what refines another, lists, chat, languages."""
    kinds = (_sampling, _sequences, _lengths, _caches, _compiling, _drafting, _refining, _listing, _chat, _languages)
    return [clash for kind in kinds for clash in kind(settings)]


def _between(settings: Settings, key: str, other: str, why: str) -> Clash:
    """Two settings of the same level that cannot be combined."""
    words = f"{_say(key, _get(settings, key))} cannot be combined with {_say(other, _get(settings, other))}: {why}"
    return Clash(frozenset({key, other}), words, "leave out one of them")


def _refining(settings: Settings) -> Iterator[Clash]:
    idle = {key for key, _ in _idle(settings)} if _greedy(settings) else set()
    for key, setting in _unrefined(settings):
        level = max(_get(settings, base).level for base in REFINES[key])
        if key not in idle and setting.kind != "model" and setting.level >= level:
            *bases, last = REFINES[key]
            one_of = f"{', '.join(bases)} or {last}" if bases else last
            words = f"{_say(key, setting)} has no effect without {one_of}"
            yield Clash(frozenset({key, last, *bases}), words, by_default=level < 0)


def _unlisted(settings: Settings) -> Iterator[tuple[str, str, Setting]]:
    """The processors that a list leaves out, each with the knob that turns it on."""
    listed = _get(settings, "processors").value
    if listed is None:
        return
    read = {knob for table in listed for knob in LISTS["processors"].get(table["use"], ())}
    idle = {key for key, _ in _idle(settings)} if _greedy(settings) else set()
    for row in PROCESSORS.values():
        key = row.knobs[0]
        elsewhere = any(_get(settings, reader).value for reader in ALSO_READ_BY.get(key, ()))
        if elsewhere or key in read | idle or _get(settings, key).value in ([], {}) or _is_off(settings, key):
            continue
        yield row.name, key, settings[key]


def _listing(settings: Settings) -> Iterator[Clash]:
    """Knobs that a list of processors leaves out, and those that all tables of a list set to something else."""
    for name, key, setting in _unlisted(settings):
        listed = settings["processors"]
        if setting.kind != "model" and setting.level >= listed.level and not _is_greedy_temperature(key, setting):
            sentence = f"{_say(key, setting)} has no effect: the list of processors ({listed.place}) leaves it out"
            yield Clash(frozenset({key, "processors"}), sentence, f'add use = "{name}" to the list')
    for kind, rows in LISTS.items():
        listed = _get(settings, kind)
        for key, setting in settings.items():
            tables = [table for table in listed.value or () if key in rows.get(table["use"], ())]
            if (
                not tables
                or setting.kind == "model"
                or setting.level < listed.level
                or _is_greedy_temperature(key, setting)
            ):
                continue
            if all(table.get(key, setting.value) != setting.value for table in tables):
                sentence = f"{_say(key, setting)} has no effect: the list of {kind} ({listed.place}) sets it"
                yield Clash(frozenset({key, kind}), sentence, "leave out one of them")


def _is_greedy_temperature(key: str, setting: Setting) -> bool:
    """Whether this is the temperature of greedy search, which no list can set."""
    return key == "temperature" and setting.value == 0


def _chat(settings: Settings) -> Iterator[Clash]:
    system, chat = _get(settings, "system"), _get(settings, "chat")
    if system.value is not None and chat.value is False and chat.level == system.level:
        yield _between(settings, "system", "chat", "only a chat has a system message")
    table, thinking = _get(settings, "chat_template_kwargs"), _get(settings, "enable_thinking")
    for sentence in chat_settings.mistakes(table.value or {}, thinking=thinking.value is not None):
        yield Clash(frozenset({"chat_template_kwargs"}), f"{sentence} ({table.place})")


def _languages(settings: Settings) -> Iterator[Clash]:
    forced, language = _get(settings, "forced_bos_token_id"), _get(settings, "tgt_lang")
    if language.value is not None and forced.value is not None and forced.kind != "model":
        yield _between(settings, "tgt_lang", "forced_bos_token_id", "both are the first token of a text")


def _unrefined(settings: Settings) -> Iterator[tuple[str, Setting]]:
    """Knobs that refine one which is off. A preset that lists its processors may turn that one on there."""
    listed = "processors" in settings or "stopping" in settings
    for key, bases in REFINES.items():
        setting = settings.get(key)
        if setting is None or setting.value == default(key) or (listed and not LISTED.isdisjoint(bases)):
            continue
        if all(_is_off(settings, base) for base in bases):
            yield key, setting


def _is_off(settings: Settings, key: str) -> bool:
    neutral = knobs(known()[key][0])[key].metadata["neutral"]
    return _get(settings, key).value in (None, default(key), neutral)


def _sampling(settings: Settings) -> Iterator[Clash]:
    greedy = _greedy(settings)
    if greedy is None:
        return
    words, off = greedy
    searches = _searches(settings)
    for key, setting in _idle(settings):
        if setting.kind == "model" or setting.level < off.level:
            continue
        hint = _add("do_sample", "true", setting) if off.value is False else "set a temperature above 0"
        where = f"in the search of {searches} " if searches and off.value is False and off.level < 0 else ""
        sentence = f"{_say(key, setting)} has no effect {where}while {words}"
        yield Clash(frozenset({key, "do_sample", "temperature"}), sentence, hint, by_default=off.level < 0)
    listed = _get(settings, "processors")
    if not searches and listed.level >= off.level and (names := _listed_samplers(settings)):
        hint = _add("do_sample", "true", listed) if off.value is False else "set a temperature above 0"
        what = f"{' and '.join(names)} in the list of processors ({listed.place})"
        sentence = f"{what} {'has' if len(names) == 1 else 'have'} no effect while {words}"
        yield Clash(frozenset({"processors", "do_sample", "temperature"}), sentence, hint, by_default=off.level < 0)


def _sequences(settings: Settings) -> Iterator[Clash]:
    returned = _get(settings, "num_return_sequences")
    beams = _get(settings, "num_beams")
    count = beams.value or 1
    if returned.kind == "model" or returned.value <= 1 or returned.value <= count:
        return
    keys = frozenset({"num_return_sequences", "num_beams", "do_sample", "temperature"})
    if count > 1:
        yield Clash(
            keys,
            f"{_say('num_return_sequences', returned)} cannot exceed {_say('num_beams', beams)}",
            _add("num_beams", str(returned.value), returned).replace("add", "use", 1),
        )
        return
    greedy = _greedy(settings)
    if greedy is None:
        return
    hint = _add("do_sample", "true", returned)
    if "num_beams" in known():
        hint += f" or {_add('num_beams', str(returned.value), returned).removeprefix('add ')}"
    sentence = f"{_say('num_return_sequences', returned)} would return identical sequences while {greedy[0]}"
    yield Clash(keys, sentence, hint, by_default=greedy[1].level < 0 or beams.level < 0)


def _lengths(settings: Settings) -> Iterator[Clash]:
    new, total = _get(settings, "max_new_tokens"), _get(settings, "max_length")
    if None not in (new.value, total.value) and new.level == total.level and new.kind != "model":
        yield _between(settings, "max_new_tokens", "max_length", "both limit the length")
        return
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        low, high = _get(settings, least), _get(settings, most)
        if _loser(settings) != most and low.kind != "model" and _exceeds(low, high):
            yield Clash(frozenset({least, most}), f"{_say(least, low)} exceeds {_say(most, high)}")


def _caches(settings: Settings) -> Iterator[Clash]:
    use, form, saved = (_get(settings, key) for key in ("use_cache", "cache_implementation", "prompt_cache"))
    both = frozenset({"use_cache", "cache_implementation"})
    if use.level == form.level and use.value is (form.value == "off"):
        yield _between(settings, "use_cache", "cache_implementation", "one turns the cache off, the other on")
        return
    if saved.value is None:
        return
    off = max(
        (setting for setting in (use, form) if setting.value in (False, "off")),
        default=None,
        key=lambda setting: setting.level,
    )
    if off is not None and not (off is form and use.level > form.level):
        words = _say("use_cache", off) if off is use else _say("cache_implementation", off)
        yield Clash(both | {"prompt_cache"}, f"{_say('prompt_cache', saved)} needs a cache, which {words} turns off")


def _drafting(settings: Settings) -> Iterator[Clash]:
    draft = _get(settings, "draft")
    for key in (*DRAFTING, "draft_corpus") if draft.value is False else ():
        if _get(settings, key).value is not None and _get(settings, key).level == draft.level:
            yield _between(settings, "draft", key, "one drafts nothing, the other says what to draft from")


def _compiling(settings: Settings) -> Iterator[Clash]:
    """Settings that torch.compile does not work with: packed layers, and caches whose shape changes."""
    compiling = _get(settings, "compile")
    if not compiling.value:
        return
    pack, use, form = (_get(settings, key) for key in ("pack", "use_cache", "cache_implementation"))
    if pack.value and pack.level >= 0:
        yield _between(settings, "compile", "pack", "packed layers cannot be compiled")
    if use.value is False:
        yield _between(settings, "compile", "use_cache", "without a cache every step has another shape")
    elif form.level >= 0 and form.value != "static" and not (form.value == "dynamic" and form.kind == "model"):
        yield _between(settings, "compile", "cache_implementation", "compiled steps use a cache of fixed size")


def _exceeds(low: Setting, high: Setting) -> bool:
    return low.value is not None and high.value is not None and low.value > high.value


def _loser(settings: Settings) -> str:
    """The one of max_new_tokens and max_length that the other overrides, if both are set."""
    new, total = _get(settings, "max_new_tokens"), _get(settings, "max_length")
    if None in (new.value, total.value):
        return ""
    return "max_new_tokens" if total.level > new.level else "max_length"


def settle(settings: Settings) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """The values of knobs that are switched off, {key: (value, origin)}, and notes for the user."""
    moot: dict[str, tuple[Any, str]] = {}
    notes: list[str] = []
    greedy = _greedy(settings)
    if greedy is not None:
        sample, temperature = _get(settings, "do_sample"), _get(settings, "temperature")
        if sample.value:
            moot["do_sample"] = (False, temperature.place)
            if sample.level > temperature.level and sample.kind != "model":
                notes.append(_is_greedy(temperature, sample))
        moot.update((key, (default(key), "default")) for key, _ in _idle(settings))
        if (drawing := _listed_samplers(settings)) and not _searches(settings):
            listed = settings["processors"]
            tables = tuple(table for table in listed.value if table["use"] not in drawing)
            moot["processors"] = (tables, listed.place)
        returned = _get(settings, "num_return_sequences")
        if returned.kind == "model" and returned.value > (_get(settings, "num_beams").value or 1):
            moot["num_return_sequences"] = (1, "default")
            notes.append(f"{_say('num_return_sequences', returned)} is not used while {greedy[0]}")
    moot.update((key, (default(key), "default")) for key, _ in _unrefined(settings))
    moot.update((key, (default(key), "default")) for _, key, _ in _unlisted(settings) if key != "ban")  # ban is refused
    system, chat = _get(settings, "system"), _get(settings, "chat")
    if system.value is not None and not chat.value:
        if chat.level > system.level:
            moot["system"] = (None, "default")
        else:
            moot["chat"] = (True, system.place)
    use, form = _get(settings, "use_cache"), _get(settings, "cache_implementation")
    if use.value is (form.value == "off"):  # two names for one setting: the later one wins
        if use.level > form.level:
            moot["cache_implementation"] = (default("cache_implementation") if use.value else "off", use.place)
        else:
            moot["use_cache"] = (form.value != "off", form.place)
    loser = _loser(settings)
    if loser:
        moot[loser] = (None, "default")
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        low, high = _get(settings, least), _get(settings, most)
        if loser != most and low.kind == "model" and _exceeds(low, high):
            # No EOS before `most` tokens, where the text ends anyway: the text is the same.
            moot[least] = (high.value, high.place)
    return moot, notes
