"""Knobs that conflict with each other, and knobs that a later layer switches off.

Refuse or report, never ignore: a knob that has no effect because of another one in the same layer or below is a mistake
(`Clash`), which names both sources. A knob that a *later* layer switches off, or that only the checkpoint sets, goes
back to its default. `settle` applies the rules, one function each, to the merged settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from genctl.config.check import default, known, shown
from genctl.config.listed_knobs import CRITERIA, LISTS, PROCESSORS, WINDOW
from genctl.config.names import ALSO_READ_BY, SEARCHES
from genctl.errors import UsageError
from genctl.params import DRAFTING, Generation, Runtime, knobs, spelled

# Knobs that refine others and have no effect without one of them: from processors' rows and from metadata ("refines").
REFINES: dict[str, tuple[str, ...]] = {
    knob: row.knobs[:1] for row in PROCESSORS.values() for knob in row.knobs[1:] if knob not in (*PROCESSORS, WINDOW)
} | {name: refined for name, (kind, _) in known().items() if (refined := knobs(kind)[name].metadata["refines"])}
# Knobs that a list of processors or of stopping criteria may turn on.
LISTED = {row.knobs[0] for row in PROCESSORS.values()} | {name for names in CRITERIA.values() for name in names}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value with the level, the place and the kind of its layer."""

    value: Any
    level: int
    place: str
    kind: Literal["model", "user", "command", "row"] = "user"
    typed: bool = False  # whether the user typed it for this job
    implied: bool = False  # whether it follows from other settings (see `imply`)
    foreign: bool = False  # whether it is from a file outside the user's own folder


class Clash(NamedTuple):
    """Knobs that cannot be combined."""

    keys: frozenset[str]
    sentence: str
    hint: str = ""
    by_default: bool = False  # whether one side is a default, which the checkpoint may still change


class Merged(dict[str, Setting]):
    """The settings of all layers. A knob that no layer sets has its built-in default, below every layer."""

    def __missing__(self, key: str) -> Setting:
        return Setting(default(key) if key in known() else None, -1, "default")

    def phrase(self, key: str) -> str:
        """A setting with its place."""
        return f"{key} = {shown(self[key].value)} ({self[key].place})"

    def is_off(self, key: str) -> bool:
        """Whether a knob has no effect, whatever the others are."""
        return self[key].value in (None, default(key), knobs(known()[key][0])[key].metadata["neutral"])

    @property
    def search(self) -> str:
        """In words, the setting that selects a search, which samples only with do_sample; "" if there is none."""
        return next((self.phrase(key) for key in SEARCHES if self[key].value and self[key].value != default(key)), "")

    @property
    def listed_samplers(self) -> list[str]:
        """The processors of the list that act only when tokens are sampled, or in a search, each named once."""
        names: dict[str, None] = {}
        for table in self["processors"].value or ():
            row = PROCESSORS.get(table["use"])
            if row is not None and row.sampling:
                value = table.get(row.knobs[0], self[row.knobs[0]].value)
                if value not in (None, knobs()[row.knobs[0]].metadata["neutral"]):
                    names[row.name] = None
        return list(names)

    @property
    def greedy(self) -> tuple[str, Setting] | None:
        """The highest setting that switches sampling off, in words; None if tokens are sampled."""
        sample, temperature = self["do_sample"], self["temperature"]
        switches = [
            *([(f"do_sample is false ({sample.place})", sample)] if sample.value is False else []),
            *([(f"temperature is 0 ({temperature.place})", temperature)] if temperature.value == 0 else []),
        ]
        return max(switches, key=lambda pair: pair[1].level, default=None)

    @property
    def idle(self) -> list[str]:
        """Knobs of sampling that are set and have no other use; none if tokens are sampled."""
        sampling = [key for key, item in knobs(Generation).items() if item.metadata["sampling"] and key in self]
        return [
            key
            for key in (sampling if self.greedy else ())
            if not self.is_off(key)
            and not self._is_greedy_temperature(key)
            and not any(self[reader].value for reader in ALSO_READ_BY.get(key, ()))
        ]

    def _is_greedy_temperature(self, key: str) -> bool:
        return key == "temperature" and self[key].value == 0

    def weighs(self, key: str, level: int) -> bool:
        """Whether a knob made ineffective at `level` is a mistake: not a checkpoint's, nor if a later layer did it."""
        return self[key].kind != "model" and self[key].level >= level and not self._is_greedy_temperature(key)


# -- what follows from typed settings ----------------------------------------------------------------------------------


def _typed(settings: Merged) -> dict[str, Setting]:
    """Typed sampling knobs that turn sampling on; none if the user sets do_sample, or if it is on or ruled out."""
    sample = settings["do_sample"]
    written = sample.level >= 0 and sample.kind != "model"
    if written or sample.value or settings["temperature"].value == 0 or settings.search:
        return {}
    sampling = [key for key, item in knobs(Generation).items() if item.metadata["sampling"]]
    sampling += ["processors"] if settings.listed_samplers else []
    return {key: settings[key] for key in sampling if settings[key].typed and settings[key].value is not None}


def _explicit(settings: Mapping[str, Setting]) -> Merged:
    return Merged({key: setting for key, setting in settings.items() if not setting.implied})


def imply(settings: Mapping[str, Setting]) -> Merged:
    """`settings` and those that follow from them: a typed knob of sampling turns sampling on."""
    explicit = _explicit(settings)
    if typed := _typed(explicit):
        last = max(typed.values(), key=lambda setting: setting.level)
        explicit["do_sample"] = Setting(True, last.level, f"implied by {last.place}", last.kind, implied=True)
    return explicit


def notices(settings: Merged) -> list[str]:
    """Effects of typed settings that may surprise the user, in sentences. `settings` as `imply` returns them."""
    sample, temperature = settings["do_sample"], settings["temperature"]
    lines = [sampling_notice(settings)] if sample.implied else []
    if sample.value and temperature.value == 0 and sample.kind == temperature.kind == "command":
        lines.append(_is_greedy(settings))
    return lines


def sampling_notice(settings: Mapping[str, Setting]) -> str:
    """A sentence on the typed settings that turn sampling on."""
    names = [_named(key, setting.place) for key, setting in _typed(_explicit(settings)).items()]
    return f"{' and '.join(names)} {'turns' if len(names) == 1 else 'turn'} sampling on"


def _named(key: str, place: str) -> str:
    """A typed knob in a few words: `--temperature`, `--set temperature`, `temperature (--strategy warm)`."""
    flag = f"flag --{spelled(key)}"
    if place == flag:
        return place.removeprefix("flag ")
    return place if place.endswith(f" {key}") else f"{key} ({place})"


def _is_greedy(settings: Merged) -> str:
    return f"{settings.phrase('temperature')} is greedy: {settings.phrase('do_sample')} has no effect"


# -- the rules ---------------------------------------------------------------------------------------------------------


class Rulings(NamedTuple):
    """Every conflict; the knobs that are switched off, with the value used instead and its origin; and notes."""

    clashes: list[Clash]
    moot: dict[str, tuple[Any, str]]
    notes: list[str]

    def refuse(self, settings: Merged, key: str, other: str, why: str) -> None:
        """Add the conflict of two settings that cannot be combined."""
        words = f"{settings.phrase(key)} cannot be combined with {settings.phrase(other)}: {why}"
        self.clashes.append(Clash(frozenset({key, other}), words, "leave out one of them"))

    def switch_off(self, settings: Merged, level: int, clash: Clash, key: str, value: Any = None) -> None:
        """Reset `key`, which a setting at `level` makes ineffective, and add the `clash` if that is a mistake."""
        self.moot[key] = value or (default(key), "default")
        if settings.weighs(key, level):
            self.clashes.append(clash._replace(by_default=level < 0))


def settle(settings: Mapping[str, Setting]) -> Rulings:
    """Apply the rules to merged settings, in this order."""
    merged, out = Merged(settings), Rulings([], {}, [])
    for rule in (
        _sampling, _sequences, _lengths, _caches, _compiling, _drafting, _refining, _listing, _chat, _languages
    ):  # fmt: skip
        rule(merged, out)
    return out


def _add(key: str, value: str, setting: Setting) -> str:
    """How to set `key` where `setting` is set."""
    if setting.kind != "command":
        return f"add {key} = {value}"
    return f"add --{spelled(key)}" + ("" if value == "true" else f" {value}")


def _sampling(s: Merged, out: Rulings) -> None:
    """Knobs and listed processors that act only when tokens are sampled."""
    if s.greedy is None:
        return
    words, off = s.greedy
    sample, temperature, listed = s["do_sample"], s["temperature"], s["processors"]
    if sample.value:
        out.moot["do_sample"] = False, temperature.place
        if sample.level > temperature.level and sample.kind != "model":
            out.notes.append(_is_greedy(s))

    def clash(key: str, what: str, verb: str = "has") -> Clash:
        hint = _add("do_sample", "true", s[key]) if off.value is False else "set a temperature above 0"
        sentence = f"{what} {verb} no effect {where}while {words}"
        return Clash(frozenset({key, "do_sample", "temperature"}), sentence, hint)

    where = f"in the search of {s.search} " if s.search and off.value is False and off.level < 0 else ""
    for key in s.idle:
        out.switch_off(s, off.level, clash(key, s.phrase(key)), key)
    if (drawing := s.listed_samplers) and not s.search:
        tables = tuple(table for table in listed.value if table["use"] not in drawing)
        what = f"{' and '.join(drawing)} in the list of processors ({listed.place})"
        mistake = clash("processors", what, "has" if len(drawing) == 1 else "have")
        out.switch_off(s, off.level, mistake, "processors", (tables, listed.place))


def _sequences(s: Merged, out: Rulings) -> None:
    """More sequences than a search finds."""
    returned, count = s["num_return_sequences"], s["num_beams"].value or 1
    if returned.value <= count:
        return
    keys = frozenset({"num_return_sequences", "num_beams", "do_sample", "temperature"})
    if returned.kind == "model":
        if s.greedy is not None:
            out.moot["num_return_sequences"] = 1, "default"
            out.notes.append(f"{s.phrase('num_return_sequences')} is not used while {s.greedy[0]}")
    elif count > 1:
        sentence = f"{s.phrase('num_return_sequences')} cannot exceed {s.phrase('num_beams')}"
        hint = _add("num_beams", str(returned.value), returned).replace("add", "use", 1)
        out.clashes.append(Clash(keys, sentence, hint))
    elif s.greedy is not None:
        beams = _add("num_beams", str(returned.value), returned).removeprefix("add ")
        sentence = f"{s.phrase('num_return_sequences')} would return identical sequences while {s.greedy[0]}"
        by_default = s.greedy[1].level < 0 or s["num_beams"].level < 0
        out.clashes.append(Clash(keys, sentence, f"{_add('do_sample', 'true', returned)} or {beams}", by_default))


def _lengths(s: Merged, out: Rulings) -> None:
    """Two limits of the length, and a minimum length above the limit."""
    new, total = s["max_new_tokens"], s["max_length"]
    loser = ""
    if None not in (new.value, total.value):
        loser = "max_new_tokens" if total.level > new.level else "max_length"
        out.moot[loser] = None, "default"
        if new.level == total.level and new.kind != "model":
            out.refuse(s, "max_new_tokens", "max_length", "both limit the length")
            return
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        low, high = s[least], s[most]
        if loser == most or low.value is None or high.value is None or low.value <= high.value:
            continue
        if low.kind == "model":
            # No EOS before `most` tokens, where the text ends in any case: the text is the same.
            out.moot[least] = high.value, high.place
        else:
            out.clashes.append(Clash(frozenset({least, most}), f"{s.phrase(least)} exceeds {s.phrase(most)}"))


def _caches(s: Merged, out: Rulings) -> None:
    """Two names for one setting, of which the later one wins; and a setting that needs a cache."""
    use, form = s["use_cache"], s["cache_implementation"]
    if use.value is (form.value == "off"):
        if use.level == form.level:
            out.refuse(s, "use_cache", "cache_implementation", "one turns the cache off, the other on")
            return
        if use.level > form.level:
            off = default("cache_implementation") if use.value else "off"
            out.moot["cache_implementation"] = off, use.place
        else:
            out.moot["use_cache"] = form.value != "off", form.place
    switch = "use_cache" if use.level > form.level or form.value != "off" else "cache_implementation"
    if s["prompt_cache"].value is not None and s[switch].value in (False, "off"):
        sentence = f"{s.phrase('prompt_cache')} needs a cache, which {s.phrase(switch)} turns off"
        out.clashes.append(Clash(frozenset({"use_cache", "cache_implementation", "prompt_cache"}), sentence))


def _compiling(s: Merged, out: Rulings) -> None:
    """Settings that torch.compile does not work with: packed layers, and caches whose shape changes."""
    pack, use, form = s["pack"], s["use_cache"], s["cache_implementation"]
    if not s["compile"].value:
        return
    if pack.value and pack.level >= 0:
        out.refuse(s, "compile", "pack", "packed layers cannot be compiled")
    if use.value is False:
        out.refuse(s, "compile", "use_cache", "without a cache every step has another shape")
    elif form.level >= 0 and form.value != "static" and not (form.value == "dynamic" and form.kind == "model"):
        out.refuse(s, "compile", "cache_implementation", "compiled steps use a cache of fixed size")


def _drafting(s: Merged, out: Rulings) -> None:
    """--no-draft together with a setting that selects what to draft from."""
    for key in (*DRAFTING, "draft_corpus") if s["draft"].value is False else ():
        if s[key].value is not None and s[key].level == s["draft"].level:
            out.refuse(s, "draft", key, "one drafts nothing, the other says what to draft from")


def _refining(s: Merged, out: Rulings) -> None:
    """Knobs that refine one which is off, unless a list of processors or stopping criteria may turn that one on."""
    listed, idle = "processors" in s or "stopping" in s, s.idle
    for key, (*bases, last) in REFINES.items():
        if key not in s or s[key].value == default(key) or (listed and not LISTED.isdisjoint((*bases, last))):
            continue
        if key not in idle and all(map(s.is_off, (*bases, last))):
            one_of = f"{', '.join(bases)} or {last}" if bases else last
            clash = Clash(frozenset({key, last, *bases}), f"{s.phrase(key)} has no effect without {one_of}")
            out.switch_off(s, max(s[base].level for base in (*bases, last)), clash, key)


def _listing(s: Merged, out: Rulings) -> None:
    """Knobs that a list of processors leaves out, and those that all tables of a list set to something else."""
    listed, idle = s["processors"], s.idle
    read = {knob for table in listed.value or () for knob in LISTS["processors"].get(table["use"], ())}
    for row in PROCESSORS.values() if listed.value is not None else ():
        key = row.knobs[0]
        elsewhere = any(s[reader].value for reader in ALSO_READ_BY.get(key, ()))
        if elsewhere or key in read or key in idle or s[key].value in ([], {}) or s.is_off(key):
            continue
        sentence = f"{s.phrase(key)} has no effect: the list of processors ({listed.place}) leaves it out"
        clash = Clash(frozenset({key, "processors"}), sentence, f'add use = "{row.name}" to the list')
        out.switch_off(s, listed.level, clash, key)
    out.moot.pop("ban", None)  # it stays set: strategies that cannot take back text refuse it
    for kind, rows in LISTS.items():
        for key, setting in s.items():
            tables = [table for table in s[kind].value or () if key in rows.get(table["use"], ())]
            different = tables and all(table.get(key, setting.value) != setting.value for table in tables)
            if different and s.weighs(key, s[kind].level):
                sentence = f"{s.phrase(key)} has no effect: the list of {kind} ({s[kind].place}) sets it"
                out.clashes.append(Clash(frozenset({key, kind}), sentence, "leave out one of them"))


def _chat(s: Merged, out: Rulings) -> None:
    """A system message without a chat, and variables that chat_template_kwargs may not set."""
    system, chat, table = s["system"], s["chat"], s["chat_template_kwargs"]
    if system.value is not None and not chat.value:
        out.moot.update({"system": (None, "default")} if chat.level > system.level else {"chat": (True, system.place)})
        if chat.value is False and chat.level == system.level:
            out.refuse(s, "system", "chat", "only a chat has a system message")
    variables = table.value or {}
    wrong = [f"chat_template_kwargs cannot set {name}: {why}" for name, why in _RESERVED.items() if name in variables]
    if s["enable_thinking"].value is not None and "enable_thinking" in variables:
        wrong.append("enable_thinking is set alone and in chat_template_kwargs; leave out one of them")
    out.clashes.extend(Clash(frozenset({"chat_template_kwargs"}), f"{what} ({table.place})") for what in wrong)


def _languages(s: Merged, out: Rulings) -> None:
    """The target language of a translation together with another first token."""
    forced = s["forced_bos_token_id"]
    if s["tgt_lang"].value is not None and forced.value is not None and forced.kind != "model":
        out.refuse(s, "tgt_lang", "forced_bos_token_id", "both are the first token of a text")


# -- the variables of chat templates -----------------------------------------------------------------------------------


CHAT_KNOBS = ("chat_template_kwargs", "enable_thinking", "chat_template", "tools")
# variables that have a setting of their own, or that the program sets -> why a table may not set them
_RESERVED = {
    "messages": "they are the prompt",
    "add_generation_prompt": "a prompt always ends where the answer begins",
    "tools": "they are the setting tools",
    "chat_template": "it is the setting chat_template",
}


def variables_of(runtime: Runtime) -> dict[str, Any]:
    """The variables that the settings pass to a chat template."""
    variables = dict(runtime.chat_template_kwargs or {})
    if runtime.enable_thinking is not None:
        variables["enable_thinking"] = runtime.enable_thinking
    if runtime.tools is not None:
        variables["tools"] = list(runtime.tools)
    return variables


def check_is_chat(runtime: Runtime) -> None:
    """Raises UsageError for settings of the chat template where the prompt is not a chat."""
    idle = [name for name in CHAT_KNOBS if getattr(runtime, name) is not None]
    if idle and not runtime.is_chat:
        raise UsageError(
            f"{' and '.join(idle)} would change nothing: the prompt is not a chat",
            hint="--chat makes it the message of a user; a row may have messages",
        )


def unused_variables(template: str, runtime: Runtime) -> list[str]:
    """The variables that a template does not name, and which therefore have no effect."""
    return [name for name in variables_of(runtime) if re.search(rf"\b{re.escape(name)}\b", template) is None]
