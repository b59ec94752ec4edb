"""Numbered steps, schedules, packing lists, inventories, and checklists that end in a summary."""

from __future__ import annotations

from collections.abc import Callable

import grammar
from grammar import Writer, article, capital, join_words, number_word

PREPARE = {
    "apples": "Peel and core", "apricots": "Halve", "beans": "Soak", "beets": "Peel",
    "cabbage": "Shred", "carrots": "Peel and slice", "celery": "Chop", "cherries": "Pit",
    "chestnuts": "Roast", "corn": "Shuck", "cucumbers": "Slice", "figs": "Quarter",
    "garlic": "Crush", "ginger": "Grate", "leeks": "Wash and slice", "lentils": "Rinse",
    "mushrooms": "Clean and slice", "olives": "Pit and chop", "onions": "Peel and chop",
    "peaches": "Peel", "pears": "Core and slice", "peas": "Shell", "peppers": "Seed and slice",
    "plums": "Halve", "potatoes": "Scrub and dice", "pumpkins": "Peel and cube",
    "spinach": "Wash", "tomatoes": "Chop", "turnips": "Peel and dice", "walnuts": "Crack",
}  # fmt: skip
DISHES = ("soup", "stew", "salad", "pie", "sauce", "relish", "bake")
HERBS = ("thyme", "parsley", "dill", "basil", "mint", "rosemary", "sage", "bay leaf", "chives")
FATS = ("butter", "olive oil", "walnut oil", "bacon fat", "cream")
COOKING = {
    "soup": ("[Heat|Warm] the {fat} in a {pot}.",
             "Add the {first} and [cook|stir] for {short} minutes.",
             "Add the {rest} and [a quart|two quarts] of water.",
             "[Simmer|Cook gently] for {long} minutes.",
             "Season with {herb} and salt.", "Serve hot [with bread|in deep bowls]."),
    "stew": ("[Brown|Fry] the {first} in {fat} for {short} minutes.",
             "Put the {rest} into the {pot} as well.",
             "Cover with water and add the {herb}.",
             "Let it [simmer|cook slowly] for {long} minutes.",
             "[Taste it and add salt|Add salt and pepper].", "Rest it for {short} minutes and "
             "serve."),
    "salad": ("Put the {first} in a large bowl.", "Add the {rest}.",
              "[Whisk|Stir] the {fat} with [vinegar|lemon juice] and salt.",
              "Chop the {herb} and sprinkle it over the bowl.",
              "Toss everything and [chill|wait] for {long} minutes."),
    "pie": ("Roll out the dough and line a [tin|dish] with it.",
            "Mix the {first} with the {rest}.", "[Dot|Brush] the filling with {fat}.",
            "Sprinkle the {herb} on top.", "Bake for {long} minutes until [golden|brown].",
            "Cool the pie for {short} minutes before cutting."),
    "sauce": ("Melt the {fat} in a {pot}.", "Stir in the {first} for {short} minutes.",
              "Add the {rest} with a [cup|glass] of [water|wine|broth].",
              "Simmer for {long} minutes, stirring [often|now and then].",
              "Press the sauce through a sieve.", "Finish with {herb}."),
    "relish": ("Combine the {first} and the {rest} in a {pot}.",
               "Add a cup of [vinegar|cider] and [half a cup|two spoons] of sugar.",
               "Boil for {long} minutes.", "Stir in the {herb} and a spoon of {fat}.",
               "Fill clean jars and close them at once."),
    "bake": ("Grease a dish with {fat}.", "Layer the {first} and the {rest} in the dish.",
             "Scatter the {herb} over [it|the top].", "Bake for {long} minutes.",
             "Let it stand for {short} minutes, then serve."),
}  # fmt: skip
POTS = ("wide pan", "deep pot", "heavy skillet", "copper pot", "clay pot", "small saucepan")


def _asked(writer: Writer, pairs: list[tuple[str, str]]) -> list[str]:
    """Two of the questions with their answers; `|` separates wordings of a question."""
    lines: list[str] = []
    for question, answer in writer.some(pairs, 2):
        lines += [f"Q: {writer.pick(question.split('|'))}", f"A: {answer}"]
    return lines


def recipe(writer: Writer) -> str:
    """Ingredients, then steps that prepare each of them and cook them in order."""
    foods = writer.some(list(PREPARE), writer.rng.randint(2, 4))
    dish, fat, herb = writer.pick(DISHES), writer.pick(FATS), writer.pick(HERBS)
    slots = {
        "fat": fat, "herb": herb, "pot": writer.pick(POTS), "first": foods[0],
        "rest": join_words(foods[1:]), "short": number_word(writer.rng.randint(3, 10)),
        "long": str(writer.rng.randrange(15, 95, 5)),
    }  # fmt: skip
    title = f"{foods[0][:-1] if foods[0].endswith('s') else foods[0]} {dish}".replace("tomatoe",
            "tomato").replace("potatoe", "potato").replace("peache", "peach")  # fmt: skip
    steps = [f"{PREPARE[food]} the {food}." for food in foods]
    steps += [writer.fill(step, **slots) for step in COOKING[dish]]
    head = writer.say(("Recipe: {t}", "How to make {t}", "{T} for {n} people"), t=title,
                      T=capital(title), n=number_word(writer.rng.randint(2, 8)))  # fmt: skip
    lines = [head, "", f"You need: {join_words([*foods, fat, herb])}.", ""]
    lines += [f"{i}. {step}" for i, step in enumerate(steps, 1)]
    if writer.chance(0.8):
        person = writer.person()
        lines += ["", writer.say((
            "{name}'s tip: use [fresh|dried] {herb} and do not [rush|skip] the {long} minutes.",
            "This {dish} keeps for {days} days in a cool place. {name} serves it with {food}.",
        ), name=person.name, dish=dish, days=number_word(writer.rng.randint(2, 6)),
            food=writer.pick(("bread", "rice", "cheese", "barley", "eggs")), **slots)]  # fmt: skip
    asked = writer.rng.randrange(len(steps) - 1)
    lines += ["", *_asked(writer, [
        (f"How long does it take?|How many minutes?|Is {slots['long']} minutes enough?",
         f"{capital(slots['long'])} minutes, after all the chopping."),
        (f"What comes after step {asked + 1}?", steps[asked + 1]),
        ("Which herb do I need?|Can I leave out the herb?", f"The recipe asks for {herb}."),
        (f"What do I do with the {foods[-1]}?", f"{PREPARE[foods[-1]]} them first."),
    ])]  # fmt: skip
    return "\n".join(lines)


ACTIVITIES = (
    "meet {name} at the {place}", "repair the {thing}", "buy {food} and {food2}",
    "call {name} about the {thing}", "clean the {place}", "water the {crop}",
    "write to {name} in {town}", "return the {thing} to {name}", "lunch with {name}",
    "feed the {animal}", "paint the {place}", "take the train to {town}", "visit the {place}",
    "practice the song with {name}", "sell the {thing} at the market", "pick {crop} with {name}",
    "walk the {animal}", "bake bread for {name}", "read the letter from {town}",
    "sharpen the tools", "carry the {thing} to the {place}", "count the {crop} in the cellar",
)  # fmt: skip
SPOTS = ("mill", "barn", "library", "bridge", "station", "kitchen", "chapel", "harbor", "school",
         "workshop", "town hall", "garden", "market", "boat house", "cellar", "tower")  # fmt: skip


def _activities(writer: Writer, count: int) -> list[str]:
    result = []
    for template in writer.some(ACTIVITIES, count):
        foods = writer.some(grammar.FOODS, 2)
        result.append(
            template.format(
                name=writer.person().name, place=writer.pick(SPOTS), thing=writer.thing(),
                food=foods[0], food2=foods[1], crop=writer.pick(grammar.CROPS), town=writer.town(),
                animal=writer.pick(grammar.ANIMALS),
            )
        )  # fmt: skip
    return result


def schedule(writer: Writer) -> str:
    """Times of a day in order, then the same day told in sentences."""
    who, day = writer.person(), writer.pick(grammar.DAYS)
    count = writer.rng.randint(5, 7)
    hours = sorted(writer.some(range(6, 22), count))
    times = [f"{hour}:{writer.pick(('00', '15', '30', '45'))}" for hour in hours]
    plans = _activities(writer, count)
    lines = [writer.say(("{day}'s plan for {name}:", "{name}, {day}:", "{day} ({name})"), day=day,
                        name=who.full)]  # fmt: skip
    lines += [f"- {time} {plan}" for time, plan in zip(times, plans, strict=True)]
    told = [f"On {day}, {who.name} [will start|starts] at {times[0]}: {plans[0]}."]
    links = writer.some(("Then, at {t}, {p}.", "At {t}: {p}.", "Next comes {t}: {p}.",
                         "After that, at {t}, {p}.", "{t} is the time to {p}.",
                         "Around {t}, {p}.", "The plan for {t} is to {p}."), count - 2)  # fmt: skip
    for link, time, plan in zip(links, times[1:-1], plans[1:-1], strict=True):
        told.append(link.format(t=time, p=plan))
    told.append(f"Last of all, at {times[-1]}, {plans[-1]}.")
    one, two = writer.some(range(count - 1), 2)
    questions = _asked(writer, [
        (f"What happens at {times[one]}?|What is planned for {times[one]}?",
         f"{who.name} has to {plans[one]}."),
        (f"When will {who.name} {plans[two]}?", f"At {times[two]}."),
        ("How many things are planned?", f"There are {number_word(count)}."),
        (f"What comes after {times[two]}?", f"At {times[two + 1]}: {plans[two + 1]}."),
    ])  # fmt: skip
    return "\n".join([*lines, "", writer.fill(" ".join(told)), "", *questions])


def inventory(writer: Writer) -> str:
    """Counted things, then the total and the extremes, which follow from the counts."""
    shop, town = writer.pick(SPOTS), writer.town()
    kinds = writer.some(grammar.THINGS, writer.rng.randint(4, 6))
    kinds = [k for k in kinds if k not in {"brush", "box", "knife", "glass", "brass"}]
    counts = writer.some(range(2, 21), len(kinds))
    stuff = [writer.pick(grammar.MATERIALS) for _ in kinds]
    lines = [f"Inventory of the {shop} in {town}"]
    lines += [f"- {c} {m} {k}s" for c, m, k in zip(counts, stuff, kinds, strict=True)]
    named = [f"{number_word(c)} {k}s" for c, k in zip(counts, kinds, strict=True)]
    most, least = counts.index(max(counts)), counts.index(min(counts))
    sentences = [
        f"The {shop} has {join_words(named)}.",
        f"That makes {sum(counts)} things in all.",
        f"There are more {kinds[most]}s than anything else, "
        f"and the fewest are the {kinds[least]}s.",
    ]
    order = writer.some(range(len(kinds)), len(kinds) - 1)
    sentences += [f"The {kinds[i]}s are made of {stuff[i]}." for i in order]
    one, two = writer.some(range(len(kinds)), 2)
    questions = _asked(writer, [
        (f"How many {kinds[one]}s are there?", f"There are {counts[one]}."),
        (f"What are the {kinds[two]}s made of?", f"They are made of {stuff[two]}."),
        (f"Are there more {kinds[one]}s or {kinds[two]}s?",
         f"There are more {kinds[one if counts[one] > counts[two] else two]}s."),
    ])  # fmt: skip
    return "\n".join([*lines, "", *sentences, "", *questions])


def checklist(writer: Writer) -> str:
    """Ticked and open tasks, then what is done and what is left."""
    who = writer.person()
    tasks = _activities(writer, writer.rng.randint(4, 6))
    done = [writer.chance(0.5) for _ in tasks]
    done[0], done[-1] = True, False
    title = writer.say(("Checklist for the {event} in {town}", "{name}'s list before the {event}",
                        "Tasks, {month} {date}"), name=who.name, town=writer.town(),
                       event=writer.pick(("fair", "wedding", "voyage", "harvest", "concert",
                                          "move", "long winter", "school play")),
                       month=writer.pick(grammar.MONTHS), date=writer.rng.randint(1, 28)
                       )  # fmt: skip
    lines = [title]
    lines += [f"[{'x' if ok else ' '}] {task}" for ok, task in zip(done, tasks, strict=True)]
    finished = [task for ok, task in zip(done, tasks, strict=True) if ok]
    left = [task for ok, task in zip(done, tasks, strict=True) if not ok]
    lines += ["", "Done:"] + [f"- {task}" for task in finished]
    lines += ["", "Still to do:"] + [f"- {task}" for task in left]
    lines += [
        "",
        f"{capital(number_word(len(finished)))} of {number_word(len(tasks))} tasks are "
        f"done, and {number_word(len(left))} {'is' if len(left) == 1 else 'are'} left.",
    ]
    return "\n".join(lines)


def packing(writer: Writer) -> str:
    """Who takes what on a trip, by person, then checked by person."""
    people: list[str] = []
    while len(people) < 3:
        people.append(writer.person(taken=people).name)
    things = writer.some(grammar.THINGS, 6)
    foods = writer.some(grammar.FOODS, 3)
    loads = [(things[2 * i], things[2 * i + 1], foods[i]) for i in range(3)]
    lines = [f"Packing list for {article(writer.pick(grammar.WEATHERS))} trip to {writer.town()}"]
    for name, (one, two, food) in zip(people, loads, strict=True):
        lines.append(f"- {name}: {one}, {two}, {food}")
    verbs = writer.some(("carries", "brings", "packs", "takes"), 3)
    sentences = [
        f"{name} {verb} the {one}, the {two}, and the {food}."
        for name, verb, (one, two, food) in zip(people, verbs, loads, strict=True)
    ]
    asked = writer.rng.randrange(3)
    sentences += [
        f"Who has the {loads[asked][1]}? {people[asked]} has it.",
        f"For supper there will be {join_words(foods)}.",
    ]
    one, two = writer.some(range(3), 2)
    questions = _asked(writer, [
        (f"What does {people[one]} have?", f"{capital(article(loads[one][0]))}, "
         f"{article(loads[one][1])}, and {foods[one]}."),
        (f"Who has the {loads[two][0]}?", f"{people[two]}."),
        (f"Does {people[one]} have the {loads[two][1]}?", f"No, {people[two]} has it."),
        (f"Who brings the {foods[two]}?", f"{people[two]} does."),
    ])  # fmt: skip
    return "\n".join([*lines, "", *sentences, "", *questions])


FORMS: tuple[Callable[[Writer], str], ...] = (
    recipe, recipe, recipe, schedule, inventory, checklist, packing,
)  # fmt: skip


def listing(seed: str) -> str:
    """One list document of a random form."""
    writer = Writer(seed)
    return writer.pick(FORMS)(writer) + "\n"
