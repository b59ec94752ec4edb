"""Seeded template writer shared by the generators, with word banks that combine into thousands.

A template may hold alternatives in square brackets, `[quickly|at once]`, and slots in braces,
`{place}`. Within one document no template is used twice, so that a model trained on the text
learns to move on instead of repeating itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_ALTERNATIVES = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")

GIRLS = (
    "Ada Alma Anna Berta Cara Clara Dora Edith Elena Elsa Emma Erin Flora Freya Grace Greta Hana "
    "Helen Ida Ines Irene Iris Ivy Jana Julia June Kate Laila Lena Lily Lucy Mara Maria Maya Mina "
    "Mira Nadia Nina Nora Olga Paula Petra Rosa Ruth Sara Selma Sofia Stella Tara Tessa Thea Una "
    "Vera Viola Wanda Willa Yara Zoe"
).split()
BOYS = (
    "Adam Alan Anton Arlo Ben Boris Carl Cole Daniel David Dean Edwin Eli Emil Eric Felix Finn "
    "Frank Fred George Gus Hank Hugo Ian Ivan Jack James Jonas Karl Leo Liam Lorenz Louis Marco "
    "Mark Martin Max Milo Nils Noah Omar Oscar Otto Owen Paul Peter Ralph Ravi Robin Samuel Simon "
    "Sven Theo Thomas Tobias Victor Walter Will Yusuf"
).split()
SURNAME_STARTS = (
    "Ash Barn Black Bright Brook Clay Cold Dale Elm Fair Field Fox Green Hart Hay Hill Holt Lake "
    "Lang Marsh Mill North Oak Pen Reed Rock Sand Stone Thorn Wald West White Wind Wood"
).split()
SURNAME_ENDS = "berg bury er field ford ham ley low man mere son ton wald well wick worth".split()
TOWN_STARTS = (
    "Alder Amber Ash Beck Birch Black Bramble Bridge Cedar Clear Copper Crow Deer Elm Falcon Fern "
    "Fox Glen Gold Gray Hazel Heron High Iron Juniper King Lark Linden Long Maple Mill Moor Moss "
    "Oak Otter Pine Quarry Raven Red River Rose Salt Silver Stone Swan Thorn Wheat Willow Wolf"
).split()
TOWN_ENDS = (
    "bay brook burn bury cliff cross dale field ford gate grove ham haven hill hollow mouth point "
    "port ridge side stead ton vale view ville water wick wood"
).split()
TRADES = (
    "baker barber beekeeper blacksmith bookbinder brewer builder butcher carpenter clerk "
    "clockmaker cobbler cook cooper dentist doctor driver farmer ferryman fisher gardener "
    "glassblower hatter innkeeper judge librarian locksmith mason mechanic miller miner nurse "
    "painter pharmacist pilot plumber potter printer sailor saddler shepherd singer surveyor "
    "tailor tanner teacher tinsmith violinist watchman weaver welder"
).split()
MATERIALS = (
    "brass bronze ceramic clay copper glass iron ivory leather linen marble oak paper pewter pine "
    "silk silver steel stone tin walnut wicker wool"
).split()
THINGS = (
    "basket bell bottle bowl box bracelet brush bucket button candle chair chest clock coin comb "
    "cup drum flute globe hammer hinge jar kettle key knife ladder lamp lantern lock mask mirror "
    "mug needle nail pan pipe plate pot ring rope saddle scale shelf spoon stool telescope thimble "
    "tray vase wheel whistle"
).split()
COLORS = (
    "amber black blue brown cream crimson gold gray green orange pink purple red scarlet silver "
    "violet white yellow"
).split()
ANIMALS = (
    "badger calf cat crow dog donkey duck ferret finch fox goat goose hare hawk hen horse lamb "
    "mare mule otter owl parrot pigeon pony puppy rabbit raven sheep sparrow squirrel swan turtle"
).split()
FOODS = (
    "apples apricots barley beans beets bread butter cabbage carrots celery cheese cherries "
    "chestnuts corn cucumbers eggs figs flour garlic ginger grapes honey leeks lemons lentils milk "
    "mushrooms mustard oats olives onions oranges peaches pears peas peppers plums potatoes "
    "pumpkins raisins rice salt spinach sugar tomatoes turnips walnuts"
).split()
CROPS = (
    "apples apricots beans beets carrots cherries cucumbers figs grapes leeks lemons lentils "
    "olives onions oranges peaches pears peas peppers plums potatoes pumpkins tomatoes turnips"
).split()
WEATHERS = (
    "clear cloudy cold cool damp dry foggy frosty gray hot humid mild rainy snowy stormy sunny "
    "warm wet windy"
).split()
SEASONS = "spring summer autumn winter".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True, slots=True)
class Person:
    """A character with the pronouns that later sentences need."""

    name: str
    surname: str
    he: str
    him: str
    his: str
    trade: str

    @property
    def full(self) -> str:
        """First name and surname."""
        return f"{self.name} {self.surname}"


class Writer:
    """One document's random choices; templates already used are not offered again."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self._used: set[str] = set()

    def pick(self, options: Sequence[T]) -> T:
        """One option, uniformly."""
        return options[self.rng.randrange(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options in random order."""
        return self.rng.sample(list(options), count)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.rng.random() < probability

    def fill(self, template: str, **slots: object) -> str:
        """Resolve alternatives and slots of one template."""
        while _ALTERNATIVES.search(template):
            template = _ALTERNATIVES.sub(lambda m: self.pick(m.group(1).split("|")), template)
        return template.format_map({key: str(value) for key, value in slots.items()})

    def say(self, options: Sequence[str], **slots: object) -> str:
        """Fill a template that this document has not used yet."""
        fresh = [option for option in options if option not in self._used] or list(options)
        template = self.pick(fresh)
        self._used.add(template)
        return self.fill(template, **slots)

    def person(self, taken: Sequence[str] = ()) -> Person:
        """A new person whose first name is not in `taken`."""
        girl = self.chance(0.5)
        name = self.pick([n for n in (GIRLS if girl else BOYS) if n not in taken])
        pronouns = ("she", "her", "her") if girl else ("he", "him", "his")
        return Person(name, self.surname(), *pronouns, self.pick(TRADES))

    def surname(self) -> str:
        """A surname such as Hartwell."""
        return self.pick(SURNAME_STARTS) + self.pick(SURNAME_ENDS)

    def town(self) -> str:
        """A town such as Willowford."""
        return self.pick(TOWN_STARTS) + self.pick(TOWN_ENDS)

    def thing(self) -> str:
        """An object such as `copper lantern`."""
        return f"{self.pick(MATERIALS)} {self.pick(THINGS)}"

    def clock(self, first: int = 6, last: int = 21) -> str:
        """A time of day such as 7:30."""
        return f"{self.rng.randint(first, last)}:{self.pick(('00', '15', '30', '45'))}"


def article(phrase: str) -> str:
    """The phrase with `a` or `an` in front."""
    vowel = phrase[0].lower() in "aeiou" and not phrase.lower().startswith("us")
    return ("an " if vowel else "a ") + phrase


def number_word(value: int) -> str:
    """English word for 0..99, digits above."""
    if value <= 20:
        return NUMBERS[value]
    if value > 99:
        return str(value)
    tens, ones = divmod(value, 10)
    return TENS[tens] + (f"-{NUMBERS[ones]}" if ones else "")


def join_words(words: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b, and c`."""
    if len(words) < 3:
        return " and ".join(words)
    return ", ".join(words[:-1]) + f", and {words[-1]}"


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
