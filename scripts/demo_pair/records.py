"""Small tables and JSON records, restated as sentences, and sentences turned into records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import grammar
from grammar import Writer, capital

Row = dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of record: how to draw a row and the sentences that restate it."""

    name: str
    draw: Callable[[Writer], Row]
    sentences: tuple[str, ...]


def _person(w: Writer) -> Row:
    person = w.person()
    return {"name": person.full, "age": w.rng.randint(18, 80), "trade": person.trade,
            "town": w.town()}  # fmt: skip


def _ship(w: Writer) -> Row:
    return {
        "ship": f"{capital(w.pick(grammar.COLORS))} {capital(w.pick(grammar.ANIMALS))}",
        "port": w.town(),
        "crew": w.rng.randint(4, 60),
        "cargo": w.pick(grammar.FOODS),
    }


def _book(w: Writer) -> Row:
    return {"title": f"The {w.thing().title()}", "author": w.person().full,
            "year": w.rng.randint(1700, 1999), "pages": w.rng.randrange(80, 600, 4)}  # fmt: skip


def _house(w: Writer) -> Row:
    return {"street": f"{w.rng.randint(1, 90)} {w.pick(grammar.TOWN_STARTS)} Street",
            "owner": w.person().full, "rooms": w.rng.randint(2, 14),
            "door": w.pick(grammar.COLORS)}  # fmt: skip


def _animal(w: Writer) -> Row:
    return {"name": w.pick(grammar.GIRLS + grammar.BOYS), "animal": w.pick(grammar.ANIMALS),
            "color": w.pick(grammar.COLORS), "owner": w.person().full}  # fmt: skip


def _order(w: Writer) -> Row:
    return {"order": w.rng.randint(100, 999), "customer": w.person().full, "item": w.thing(),
            "quantity": w.rng.randint(2, 30)}  # fmt: skip


def _weather(w: Writer) -> Row:
    return {"town": w.town(), "day": w.pick(grammar.DAYS), "sky": w.pick(grammar.WEATHERS),
            "degrees": w.rng.randint(-9, 34)}  # fmt: skip


SHAPES = (
    Shape("people", _person, ("{name} is {age} years old and works as a {trade} in {town}.",
          "In {town} lives {name}, a {trade} of {age}.",
          "{name}, aged {age}, is the {trade} of {town}.",
          "The {trade} {name} comes from {town} and is {age}.")),
    Shape("ships", _ship, ("The {ship} sails from {port} with a crew of {crew} and carries "
          "{cargo}.", "From {port} comes the {ship}, loaded with {cargo}, {crew} people aboard.",
          "{crew} sailors work on the {ship}, which brings {cargo} from {port}.",
          "The {ship} of {port} has {crew} hands and a hold full of {cargo}.")),
    Shape("books", _book, ("{title} by {author} appeared in {year} and has {pages} pages.",
          "In {year}, {author} wrote {title}, a book of {pages} pages.",
          "{author} is the author of {title} ({year}, {pages} pages).",
          "With its {pages} pages, {title} was finished by {author} in {year}.")),
    Shape("houses", _house, ("{owner} owns {street}, a house with {rooms} rooms and a {door} "
          "door.", "The house at {street} has {rooms} rooms; {owner} painted its door {door}.",
          "Behind the {door} door of {street} there are {rooms} rooms, and they belong to "
          "{owner}.", "{street} belongs to {owner}. It has {rooms} rooms and a {door} door.")),
    Shape("animals", _animal, ("{name} is a {color} {animal} that belongs to {owner}.",
          "{owner} keeps a {color} {animal} called {name}.",
          "The {animal} {name} is {color}, and its owner is {owner}.",
          "A {color} {animal}, {name}, lives with {owner}.")),
    Shape("orders", _order, ("Order {order}: {customer} wants {quantity} of the {item}.",
          "{customer} placed order {order} for {quantity} pieces, each a {item}.",
          "The {item} was ordered {quantity} times by {customer}, order number {order}.",
          "In order {order}, {customer} asks for the {item}, {quantity} in all.")),
    Shape("weather", _weather, ("On {day} it was {sky} in {town}, with {degrees} degrees.",
          "{town} had a {sky} {day} and {degrees} degrees.",
          "The thermometer in {town} showed {degrees} degrees on a {sky} {day}.",
          "{degrees} degrees and a {sky} sky: that was {day} in {town}.")),
)  # fmt: skip


def _csv(rows: list[Row]) -> str:
    return "\n".join([",".join(rows[0]), *(",".join(str(v) for v in r.values()) for r in rows)])


def _json(rows: list[Row]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]"


def _cards(rows: list[Row]) -> str:
    return "\n\n".join("\n".join(f"{capital(k)}: {v}" for k, v in row.items()) for row in rows)


FORMATS: tuple[tuple[str, Callable[[list[Row]], str]], ...] = (
    ("CSV", _csv), ("JSON", _json), ("Cards", _cards),
)  # fmt: skip


def _fix_articles(text: str) -> str:
    """`a orange door` to `an orange door`."""
    words = text.split(" ")
    for i in range(len(words) - 1):
        if words[i] in {"a", "A"} and words[i + 1][:1].lower() in {"a", "e", "i", "o"}:
            words[i] += "n"
    return " ".join(words)


def _question(writer: Writer, shape: Shape, rows: list[Row]) -> str:
    """One look-up: given the first field of a row, name another of its fields."""
    row = writer.pick(rows)
    keys = list(row)
    key = writer.pick(keys[1:])
    return f"Question: what is the {key} for {row[keys[0]]}?\nAnswer: {row[key]}"


def record(seed: str) -> str:
    """Two to four rows in one notation, then the same rows in another, then a look-up."""
    writer = Writer(seed)
    shape = writer.pick(SHAPES)
    rows = [shape.draw(writer) for _ in range(writer.rng.randint(2, 4))]
    label, render = writer.pick(FORMATS)
    told = "\n".join(_fix_articles(writer.say(shape.sentences, **row)) for row in rows)
    form = writer.rng.randrange(3)
    if form == 0:
        parts = [f"{label}, {shape.name}:\n{render(rows)}", f"In sentences:\n{told}"]
    elif form == 1:
        parts = [f"Text, {shape.name}:\n{told}", f"As {label}:\n{render(rows)}"]
    else:
        other, render_other = writer.pick([f for f in FORMATS if f[0] != label])
        parts = [f"{label}, {shape.name}:\n{render(rows)}", f"As {other}:\n{render_other(rows)}"]
    parts.append(_question(writer, shape, rows))
    if form == 2 and writer.chance(0.5):
        parts.append(f"In sentences:\n{told}")
    if writer.chance(0.3):
        parts.append(f"There are {grammar.number_word(len(rows))} rows in this "
                     f"{writer.pick(('table', 'list'))}.")  # fmt: skip
    return "\n\n".join(parts) + "\n"
