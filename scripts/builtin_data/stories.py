"""Short English stories from a grammar: characters, things and pronouns stay the same in a story."""

from __future__ import annotations

import random
import re
from pathlib import Path


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _sentences() -> dict[str, tuple[tuple[str, ...], ...]]:
    """The blocks of each section of story_plots.txt: wordings, of which one is taken."""
    text = Path(__file__).with_name("story_plots.txt").read_text(encoding="utf-8")
    sections = (section.partition("\n\n") for section in text.split("\n# ")[1:])
    return {name: tuple(tuple(block.split("\n")) for block in body.strip().split("\n\n")) for name, _, body in sections}


SENTENCES = _sentences()
(LOVES,), (TRAITS,), (ENDINGS,) = (SENTENCES.pop(name) for name in ("loves", "traits", "endings"))
(BACKGROUND_OPENINGS,) = SENTENCES.pop("background_openings")  # of the past in general: "One day, ..." goes on
(SCENE_OPENINGS,) = SENTENCES.pop("scene_openings")  # of one day already: "That day, ..." goes on
PLOTS = tuple(SENTENCES.values())
HIS_NAMES = _words(
    "Arlo Ben Felix Finn Gus Hugo Jack Jasper Leo Max Milo Oscar Otto Pip Rowan Sam Theo Toby Tom Walter"
)
HER_NAMES = _words(
    "Anna Clara Daisy Ella Greta Hazel Ivy Lily Luna Maya Mia Molly Nora Penny Poppy Rosie Ruby Tilly Willa Zoe"
)
ANIMALS = _words(
    "fox rabbit bear mouse hedgehog squirrel badger otter duck frog cat dog goat deer mole beaver hare turtle kitten "
    "puppy lamb pony"
)
HIS_TRADES = _words("baker farmer fisherman shepherd tailor miller gardener painter")
HER_TRADES = _words("baker farmer weaver shepherd gardener painter")
ADJECTIVES = _words(
    "little young small brave curious shy cheerful gentle clever kind quiet playful lively friendly dreamy merry"
)

# (adjective, noun, whether it can break)
THINGS = (
    ("red", "kite", True),
    ("blue", "scarf", False),
    ("silver", "bell", True),
    ("wooden", "boat", True),
    ("golden", "key", False),
    ("woolen", "hat", False),
    ("green", "umbrella", True),
    ("leather", "ball", False),
    ("paper", "lantern", True),
    ("little", "drum", True),
    ("tin", "whistle", True),
    ("old", "picture book", False),
    ("tiny", "music box", True),
    ("straw", "basket", True),
    ("glass", "marble", True),
    ("shiny", "mirror", True),
    ("soft", "blanket", False),
    ("orange", "vase", True),
    ("yellow", "toy horse", True),
    ("brown", "teddy bear", False),
)
FOODS = _phrases(
    "carrot soup,apple pie,honey cake,blackberry jam,warm bread,nut cookies,pumpkin stew,cheese rolls,mushroom soup,"
    "plum cake,corn pancakes,vegetable stew"
)
HOMES = _phrases(
    "in a small village,deep in the forest,by the river,on a green hill,at the edge of the forest,near the sea,"
    "in a quiet valley,beside a blue lake,in a cozy cottage,in a little house by the mill,on a farm,"
    "under an old oak tree,in a town full of flowers,at the foot of a mountain"
)
SPOTS = _phrases(
    "near the pond,behind the old barn,beside the stone bridge,near the mill,under the apple tree,by the well,"
    "at the edge of the meadow,beside the garden wall,in the tall grass,behind the hedge,at the foot of the hill,"
    "near the market,under the willow tree,beside the path"
)
WEATHERS = _words("sunny cold windy warm bright foggy cloudy clear lovely mild")
PROJECTS = _phrases("tree house,boat,raft,bridge,windmill,birdhouse,sled,wagon,swing,tower")
GOALS = _phrases(
    "the sea,the snowy mountain,the old castle,the great waterfall,the golden city,the island of birds,the crystal cave"
)
SKILLS = _phrases("skate,juggle,dance,ski,walk on stilts,ride a bicycle,jump rope,do a handstand")
FEARS = _phrases("the dark,deep water,thunder,high places,spiders,the big forest,loud noises")
BACKGROUND_TIMES = (
    "One day,",
    "One day,",
    "One morning,",
    "One afternoon,",
    "One {weather} day,",
    "One {weather} morning,",
    "One {weather} afternoon,",
    "Then, one day,",
)
SCENE_TIMES = ("That very day,", "After breakfast,", "A little later,", "Soon,", "Before long,", "Not much later,")
HIS = {"he": "he", "him": "him", "his": "his", "himself": "himself"}
HERS = {"he": "she", "him": "her", "his": "her", "himself": "herself"}

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
# The first letter of a sentence; after ?" and !" the sentence goes on, and the templates say so.
_START = re.compile(r"(^|[.?!] |[.]\" )([a-z])")


class Story:
    """One story in the making: who and what it is about, and which slots are filled with what."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.introduced = False
        pick = generator.choice
        hero_is_he = generator.random() < 0.5
        hero, friend = (HIS, HERS) if hero_is_he else (HERS, HIS)
        kind = self._kind(hero_is_he)
        friend_kind = self._kind(not hero_is_he)
        while friend_kind == kind:
            friend_kind = self._kind(not hero_is_he)
        adjective, friend_adjective = generator.sample(ADJECTIVES, 2)
        spots = generator.sample(SPOTS, 3)
        home = pick(HOMES)
        self.slots = {
            "h": pick(HIS_NAMES if hero_is_he else HER_NAMES),
            "fname": pick(HER_NAMES if hero_is_he else HIS_NAMES),
            "kind": kind,
            "fkind": friend_kind,
            "adj": adjective,
            "fadj": friend_adjective,
            "home": home,
            "spot": spots[0],
            "spot2": spots[1],
            "spot3": spots[2],
            "food": pick(FOODS),
            "weather": pick(WEATHERS),
            "love": pick(LOVES),
            "project": pick(PROJECTS),
            "goal": pick([goal for goal in GOALS if goal not in home]),
            "skill": pick(SKILLS),
            "fear": pick(FEARS),
        }
        # "Mia the girl" would sound odd.
        self.slots["hero"] = "a {adj} {kind} [named|called] {h}" if kind in ("boy", "girl") else "{h} the {kind}"
        for word, pronoun in hero.items():
            self.slots[word] = pronoun
            self.slots[word.capitalize()] = pronoun.capitalize()
        for word, pronoun in friend.items():
            self.slots["f" + word] = pronoun
            self.slots["F" + word] = pronoun.capitalize()

    def _kind(self, is_he: bool) -> str:
        draw = self.generator.random()
        if draw < 0.65:
            return self.generator.choice(ANIMALS)
        if draw < 0.87:
            return "boy" if is_he else "girl"
        return self.generator.choice(HIS_TRADES if is_he else HER_TRADES)

    def _friend(self) -> str:
        """The friend's name, with an introduction the first time."""
        if self.introduced:
            return "{fname}"
        self.introduced = True
        forms = ["{his} friend {fname}", "a {fadj} {fkind} named {fname}"]
        if self.slots["fkind"] not in ("boy", "girl"):
            forms += ["{fname} the {fkind}", "{his} friend {fname} the {fkind}"]
        return self.generator.choice(forms)

    def fill(self, template: str) -> str:
        """Choose between the wordings, then fill in the slots from left to right."""
        template = template.replace("{hero}", self.slots["hero"])
        while match := _CHOICE.search(template):
            chosen = self.generator.choice(match[1].split("|"))
            template = template[: match.start()] + chosen + template[match.end() :]
        while match := _SLOT.search(template):
            name = match[1]
            value = self._friend() if name == "f" else self.slots[name]
            if name == "fname":
                self.introduced = True
            template = template[: match.start()] + value + template[match.end() :]
        return template

    def text(self) -> str:
        generator = self.generator
        plot = generator.choice(PLOTS)
        # These two plots begin with a sentence that does not follow from "One morning, ...".
        scene = plot not in (SENTENCES["storm"], SENTENCES["fear"]) and generator.random() < 0.3
        self.slots["When"] = generator.choice(SCENE_TIMES if scene else BACKGROUND_TIMES)
        things = [thing for thing in THINGS if thing[2] or plot is not SENTENCES["truth"]]
        first, second = generator.sample(things, 2)
        self.slots.update(obj=f"{first[0]} {first[1]}", thing=first[1], obj2=f"{second[0]} {second[1]}")
        beats = [generator.choice(SCENE_OPENINGS if scene else BACKGROUND_OPENINGS)]
        if not scene and "{love}" not in beats[0] and generator.random() < 0.3:
            beats.append(generator.choice(TRAITS))
        beats += [generator.choice(variants) for variants in plot]
        if generator.random() < 0.4:
            beats.append(generator.choice(ENDINGS))
        text = " ".join(self.fill(beat) for beat in beats)
        text = _ARTICLE.sub(r"\1n ", text)
        return _START.sub(lambda match: match[1] + match[2].upper(), text)


def agreeing_words() -> list[str]:
    """Names and pronouns: the words that have to agree with the rest of the story."""
    pronouns = {*HIS.values(), *HERS.values()}
    return [*HIS_NAMES, *HER_NAMES, *sorted(pronouns), *sorted(word.capitalize() for word in pronouns)]


def held_out_stories(count: int, seed: int) -> list[str]:
    """`count` different stories, the same for every training seed."""
    generator = random.Random(f"held out {seed}")
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[Story(generator).text()] = None
    return list(texts)


def training_stories(count: int, seed: int, exclude: set[str]) -> list[str]:
    """`count` different stories, none of them in `exclude`."""
    generator = random.Random(f"training {seed}")
    texts: dict[str, None] = {}
    while len(texts) < count:
        text = Story(generator).text()
        if text not in exclude:
            texts[text] = None
    return list(texts)
