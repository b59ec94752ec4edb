"""Short scenes of questions and answers over facts that the opening lines state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grammar
from grammar import Writer, capital, number_word


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that the notes state, that a visitor asks about, and that the host answers."""

    notes: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


TIME = Fact(
    ("[It opens|The doors open] at {open} and [it closes|they close] at {close}.",
     "Open from {open} to {close}.",
     "Hours: {open} to {close}."),
    ("What time do you [open|close]?", "When are you open?", "[How late|Until when] are you open?",
     "Could you tell me your hours?"),
    ("We open at {open} and close at {close}.", "From {open} to {close}.",
     "The doors open at {open}, and we close at {close}."),
)  # fmt: skip
PRICE = Fact(
    ("[A|One] {item} costs {price} dollars.", "The price of a {item} is {price} dollars.",
     "{Item}: {price} dollars each."),
    ("How much is a {item}?", "What does [a|one] {item} cost?", "And the price of a {item}?",
     "How much do you [ask|want] for a {item}?"),
    ("A {item} costs {price} dollars.", "That is {price} dollars for one.",
     "One {item} is {price} dollars, and two are {double}."),
)  # fmt: skip
STOCK = Fact(
    ("There are {count} {plural} left.", "{Count} {plural} remain.", "In stock: {count} {plural}."),
    ("How many {plural} do you have?", "Do you [still have|have any] {plural}?",
     "Are there any {plural} left?"),
    ("Yes, we have {count} {plural} left.", "There are {count} {plural} [left|in the back room].",
     "We have {count}. After you there may be {one_less}."),
)  # fmt: skip
PERSON = Fact(
    ("{chief} [is in charge|runs the place].", "The manager is {chief}.",
     "Ask for {chief}, the {chief_trade}."),
    ("Who is in charge [here|today]?", "Whom should I ask about [repairs|orders|visits]?",
     "Who runs this place?"),
    ("That would be {chief}.", "{chief} is in charge. {He} is usually [upstairs|in the back|here "
     "by noon].", "Ask {chief}; {he} knows everything about it."),
)  # fmt: skip
PLACE = Fact(
    ("The {room} is {where}.", "You will find the {room} {where}.", "{Room}: {where}."),
    ("Where is the {room}?", "How do I find the {room}?", "[Excuse me, where|Where] can I find the "
     "{room}?"),
    ("The {room} is {where}.", "It is {where}. You cannot miss it.",
     "Go straight on; the {room} is {where}."),
)  # fmt: skip
DAY = Fact(
    ("Closed on {day}.", "On {day} [it stays|the place is] closed.", "No visitors on {day}."),
    ("Are you open [every day|all week]?", "On which day are you closed?",
     "Can I come on {day}?"),
    ("We are closed on {day}.", "Every day except {day}.",
     "Not on {day}, but [any other day is fine|every other day we are here]."),
)  # fmt: skip
BUS = Fact(
    ("The [bus|train] to {dest} leaves at {depart} from platform {stop}.",
     "Next departure to {dest}: {depart}, platform {stop}."),
    ("How do I get to {dest} [from here|afterwards]?", "When is the next [bus|train] to {dest}?",
     "Is there a way to {dest} today?"),
    ("The next one to {dest} leaves at {depart} from platform {stop}.",
     "Take the one at {depart}. It goes to {dest} from platform {stop}."),
)  # fmt: skip
MATERIAL = Fact(
    ("The {item} is made of {material} and {color} {second}.",
     "The {item}: {material}, with {color} {second}."),
    ("What is the {item} made of?", "Is the {item} really {material}?",
     "Which material did you use for the {item}?"),
    ("It is made of {material} and {color} {second}.",
     "{Material} on the outside, with {color} {second} inside."),
)  # fmt: skip
AGE = Fact(
    ("The house was built in {year} by {builder}.", "Built in {year} by {builder}."),
    ("How old is this house?", "When was this place built?", "Who built this house?"),
    ("It was built in {year} by {builder}.", "{builder} built it in {year}."),
)  # fmt: skip
FACTS = (TIME, PRICE, STOCK, PERSON, PLACE, DAY, BUS, MATERIAL, AGE)

PLACES = (
    "bakery", "bookshop", "boat yard", "clinic", "clock shop", "farm stand", "garden center",
    "hat shop", "hotel", "library", "lighthouse", "market hall", "mill", "museum", "music school",
    "post office", "pottery", "repair shop", "tea house", "theater", "toy shop", "train station",
    "weaving room", "zoo",
)  # fmt: skip
ROOMS = ("office", "cellar", "reading room", "workshop", "kitchen", "cloakroom", "map room",
         "waiting room", "garden", "tower", "exit", "ticket desk", "well", "stable")  # fmt: skip
WHERES = (
    "on the second floor", "behind the stairs", "to the left of the entrance", "across the yard",
    "at the end of the hall", "next to the fountain", "under the arch", "past the blue door",
    "opposite the bakery", "on the right, after the gate", "in the basement",
    "above the shop", "between the two pillars",
)  # fmt: skip
GOODS = (
    "baskets", "blankets", "tickets", "cakes", "candles", "maps", "postcards", "tulips", "lanterns",
    "notebooks", "red apples", "wool hats", "small kites", "jars of honey", "paper boats",
    "old books", "painted plates", "rye loaves", "umbrellas", "brass bells", "stamps", "bicycles",
    "rose bushes", "pocket knives", "walking sticks",
)  # fmt: skip
GREETINGS = ("[Good morning|Good afternoon|Hello].", "[Good day|Hello], and welcome.",
             "Hello! [How can I help you|What can I do for you]?",
             "Welcome to the {place}. [What would you like to know|How may I help]?")  # fmt: skip
FIRST = ("[Good morning|Hello]. I have a few questions.", "Hello. I am [new here|only visiting].",
         "Good day. [May I ask you something|Do you have a minute]?",
         "Hello. {friend} [sent me|told me about this place].")  # fmt: skip
REACTIONS = (
    "[Good|Perfect|Excellent], thank you.", "[That is|Oh, that is] [good to know|very helpful].",
    "[I see|All right|I understand].", "[Really|Is that so]? I did not know that.",
    "[Let me|I will] write that down.", "That is [better|more|less] than I expected.",
    "Thanks. One more thing.", "[Fine|Wonderful].",
)  # fmt: skip
UNKNOWN = (
    (
        "Do you [also sell|also have] {food}?",
        "[No, I am sorry|I am afraid not]. Try the market in {dest}.",
    ),
    ("Will it {rain} tomorrow?", "I [really do not|do not] know. Ask the {chief_trade}."),
    ("Do you know {stranger}?", "No, I have never [met|heard of] {stranger}."),
    ("May I bring my {animal}?", "Yes, as long as the {animal} stays [outside|quiet|with you]."),
)
CLOSINGS = (
    (
        "That is all I wanted to know. [Thank you|Many thanks].",
        "[You are welcome|My pleasure]. [Goodbye|See you soon]!",
    ),
    (
        "Then I will [come back|be back] tomorrow.",
        "[Good|We will be here]. Have a [nice|good] day.",
    ),
    (
        "[Thank you|Thanks] for your [help|time], {host}.",
        "[Any time|Gladly]. Say hello to {friend}.",
    ),
    ("You have been very kind.", "It was nothing. [Mind the step|Safe travels|Take care]."),
)
SUMMARY = (
    "Later, {guest} told {friend} what {guest} had learned: {learned}",
    "{guest} wrote in the notebook: {learned}",
    "That evening {friend} asked about the {place}, and {guest} said: {learned}",
)


def _slots(writer: Writer) -> dict[str, str]:
    """Every value a scene may mention; people in one scene have different names."""
    people = [writer.person()]
    while len(people) < 5:
        people.append(writer.person(taken=[p.name for p in people]))
    host, guest, friend, chief, stranger = people
    noun, (material, second) = writer.pick(grammar.THINGS), writer.some(grammar.MATERIALS, 2)
    price, count = writer.rng.randint(2, 40), writer.rng.randint(3, 20)
    opening, stock = writer.rng.randint(6, 11), writer.pick(GOODS)
    room = writer.pick(ROOMS)
    return {
        "host": host.name, "guest": guest.name, "friend": friend.name, "stranger": stranger.full,
        "chief": chief.full, "chief_trade": chief.trade, "He": capital(chief.he), "he": chief.he,
        "place": writer.pick(PLACES), "town": writer.town(), "dest": writer.town(),
        "item": noun, "Item": capital(noun), "price": str(price), "double": str(2 * price),
        "plural": stock,
        "count": number_word(count), "Count": capital(number_word(count)),
        "one_less": number_word(count - 1), "room": room, "Room": capital(room),
        "where": writer.pick(WHERES), "day": writer.pick(grammar.DAYS),
        "open": f"{opening}:{writer.pick(('00', '15', '30', '45'))}",
        "close": f"{writer.rng.randint(4, 11) + 12}:{writer.pick(('00', '30'))}",
        "depart": writer.clock(12, 21), "stop": str(writer.rng.randint(1, 12)),
        "material": material, "Material": capital(material), "second": second,
        "color": writer.pick(grammar.COLORS), "year": str(writer.rng.randint(1620, 1990)),
        "builder": f"{writer.pick(grammar.BOYS + grammar.GIRLS)} {writer.surname()}",
        "food": writer.pick(grammar.FOODS), "animal": writer.pick(grammar.ANIMALS),
        "rain": writer.pick(("rain", "snow", "be sunny", "be windy")),
    }  # fmt: skip


HEADERS: tuple[Callable[[dict[str, str], str], str], ...] = (
    lambda s, n: f"Notes about the {s['place']} in {s['town']}: {n}",
    lambda s, n: f"The {s['place']} in {s['town']}. {n}",
    lambda s, n: f"{s['guest']} visits the {s['place']} in {s['town']}. {n}",
    lambda s, n: f"[{capital(s['place'])}, {s['town']}] {n}",
)


def dialogue(seed: str) -> str:
    """One scene: a note with three or four facts, then turns that ask about each and end."""
    writer = Writer(seed)
    slots = _slots(writer)
    facts = writer.some(FACTS, writer.rng.randint(3, 4))
    notes = [writer.say(fact.notes, **slots) for fact in facts]
    lines = [writer.pick(HEADERS)(slots, " ".join(notes)), ""]
    host, guest = slots["host"], slots["guest"]
    if writer.chance(0.5):
        lines.append(f"{host}: {writer.say(GREETINGS, **slots)}")
    first = f"{guest}: {writer.say(FIRST, **slots)}" if writer.chance(0.6) else ""
    learned: list[str] = []
    for index, fact in enumerate(writer.some(facts, len(facts))):
        question = writer.say(fact.questions, **slots)
        if index == 0:
            prefix = f"{first} " if first else f"{guest}: "
        else:
            reaction = f"{writer.say(REACTIONS, **slots)} " if writer.chance(0.55) else ""
            prefix = f"{guest}: {reaction}"
        lines += [prefix + question, f"{host}: {writer.say(fact.answers, **slots)}"]
        learned.append(writer.say(fact.notes, **slots))
    if writer.chance(0.6):
        question, answer = writer.pick(UNKNOWN)
        lines += [f"{guest}: {writer.fill(question, **slots)}",
                  f"{host}: {writer.fill(answer, **slots)}"]  # fmt: skip
    last, reply = writer.pick(CLOSINGS)
    lines += [f"{guest}: {writer.fill(last, **slots)}", f"{host}: {writer.fill(reply, **slots)}"]
    if writer.chance(0.4):
        summary = writer.say(SUMMARY, learned=" ".join(learned[:2]), **slots)
        lines += ["", summary]
    return "\n".join(lines) + "\n"
