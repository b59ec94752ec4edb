"""Small Python modules: a docstring says what each function does, the body then does it."""

from __future__ import annotations

from collections.abc import Callable

from grammar import Writer, article, capital

NOUNS = (
    "account album animal answer article basket book bottle bridge camera card chapter city "
    "coin color contact country course customer device document driver event exam farm field "
    "flight flower forest game garden hotel house image invoice island item job lamp lesson letter "
    "machine market member message meter model movie note order package page "
    "paper parcel part path payment person photo piece place plan planet plant player point port "
    "price product project question recipe record report river road room route row "
    "rule sample scene school score seat sensor service ship shop signal song station step story "
    "street student table task team test ticket tool town track train tree trip user valley "
    "vehicle village visit visitor voice wall watch wheel window word worker"
).split()
FIELDS = (
    "age area cost count depth distance duration height length level limit mass pages price "
    "quality rank rating score size speed stock total value volume weight width"
).split()
LABELS = "author city code color country group kind label owner region state status type".split()


def plural(noun: str) -> str:
    """Regular plural of one of `NOUNS`."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "ch", "x")) else "s")


FUNCTIONS = (
    '''def count_{ns}_above({ns}, limit):
    """Return how many {ns} have {a_f} above the limit."""
    count = 0
    for {n} in {ns}:
        if {n}["{f}"] > limit:
            count += 1
    return count''',
    '''def total_{f}({ns}):
    """Return the sum of the {f} of all {ns}."""
    return sum({n}["{f}"] for {n} in {ns})''',
    '''def average_{f}({ns}):
    """Return the mean {f} of the {ns}, or 0.0 if there are none."""
    if not {ns}:
        return 0.0
    return sum({n}["{f}"] for {n} in {ns}) / len({ns})''',
    '''def {max}_{n}({ns}):
    """Return the {n} with the [largest|highest] {f}, or None if there are no {ns}."""
    best = None
    for {n} in {ns}:
        if best is None or {n}["{f}"] > best["{f}"]:
            best = {n}
    return best''',
    '''def {ns}_by_{l}({ns}):
    """Group the {ns} by their {l}."""
    groups = {{}}
    for {n} in {ns}:
        groups.setdefault({n}["{l}"], []).append({n})
    return groups''',
    '''def sort_{ns}({ns}, reverse=False):
    """Return the {ns} sorted by {f}."""
    return sorted({ns}, key=lambda {n}: {n}["{f}"], reverse=reverse)''',
    '''def find_{n}({ns}, {l}):
    """Return the first {n} with the given {l}, or None."""
    for {n} in {ns}:
        if {n}["{l}"] == {l}:
            return {n}
    return None''',
    '''def unique_{l}s({ns}):
    """Return the different {l}s of the {ns} in order of first appearance."""
    seen = set()
    result = []
    for {n} in {ns}:
        if {n}["{l}"] not in seen:
            seen.add({n}["{l}"])
            result.append({n}["{l}"])
    return result''',
    '''def update_{f}({n}, change, lowest=0):
    """Add the change to the {f} of the {n}, but never go below the lowest value."""
    {n}["{f}"] = max(lowest, {n}["{f}"] + change)
    return {n}''',
    '''def read_{ns}(path):
    """Read {ns} from a file with one {l} and one {f} per line."""
    {ns} = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            {l}, {f} = line.strip().split(",")
            {ns}.append({{"{l}": {l}, "{f}": int({f})}})
    return {ns}''',
    '''def write_{ns}(path, {ns}):
    """Write the {ns} to a file, one {l} and one {f} per line."""
    with open(path, "w", encoding="utf-8") as file:
        for {n} in {ns}:
            file.write(f"{{{n}['{l}']}},{{{n}['{f}']}}\\n")''',
    '''def describe_{n}({n}):
    """Return one sentence about the {n}."""
    return f"The {n} {{{n}['{l}']}} has {a_f} of {{{n}['{f}']}}."''',
    '''def check_{n}({n}):
    """Raise ValueError if the {n} has no {l} or a negative {f}."""
    if not {n}.get("{l}"):
        raise ValueError("{n} without {l}")
    if {n}["{f}"] < 0:
        raise ValueError("{n} with negative {f}")''',
    '''def split_{ns}({ns}, size):
    """Yield the {ns} in parts of the given size."""
    for start in range(0, len({ns}), size):
        yield {ns}[start:start + size]''',
    '''def remove_{l}({ns}, {l}):
    """Return the {ns} without those that have the given {l}."""
    return [{n} for {n} in {ns} if {n}["{l}"] != {l}]''',
    '''def merge_{ns}(first, second):
    """Merge two lists of {ns}; for an equal {l} the larger {f} wins."""
    merged = {{}}
    for {n} in first + second:
        old = merged.get({n}["{l}"])
        if old is None or {n}["{f}"] > old["{f}"]:
            merged[{n}["{l}"]] = {n}
    return list(merged.values())''',
    '''def {f}_per_{l}({ns}):
    """Return the total {f} for each {l}."""
    totals = {{}}
    for {n} in {ns}:
        totals[{n}["{l}"]] = totals.get({n}["{l}"], 0) + {n}["{f}"]
    return totals''',
    '''def has_{n}({ns}, {l}):
    """Return True if any of the {ns} has the given {l}."""
    return any({n}["{l}"] == {l} for {n} in {ns})''',
    '''def scale_{f}({ns}, factor):
    """Return copies of the {ns} with the {f} multiplied by the factor."""
    return [{{**{n}, "{f}": {n}["{f}"] * factor}} for {n} in {ns}]''',
)  # fmt: skip

METHODS = (
    '''    def add(self, {n}):
        """Add {a_n} and return how many {ns} there are now."""
        self.{ns}.append({n})
        return len(self.{ns})''',
    '''    def total(self):
        """Return the total {f} of all {ns}."""
        return sum({n}.{f} for {n} in self.{ns})''',
    '''    def remove(self, {l}):
        """Remove every {n} with the given {l}."""
        self.{ns} = [{n} for {n} in self.{ns} if {n}.{l} != {l}]''',
    '''    def best(self):
        """Return the {n} with the highest {f}."""
        if not self.{ns}:
            raise LookupError("no {ns} in this {owner}")
        return max(self.{ns}, key=lambda {n}: {n}.{f})''',
    '''    def __len__(self):
        """Return the number of {ns}."""
        return len(self.{ns})''',
    '''    def __contains__(self, {l}):
        """Return True if {a_n} has this {l}."""
        return any({n}.{l} == {l} for {n} in self.{ns})''',
    '''    def __iter__(self):
        """Iterate over the {ns} in order of {f}."""
        return iter(sorted(self.{ns}, key=lambda {n}: {n}.{f}))''',
    '''    def names(self):
        """Return the {l} of each {n}."""
        return [{n}.{l} for {n} in self.{ns}]''',
)


def _slots(writer: Writer) -> dict[str, str]:
    noun, owner = writer.some(NOUNS, 2)
    field = writer.pick([f for f in FIELDS if f != noun])
    label = writer.pick([name for name in LABELS if name not in {noun, owner}])
    return {
        "n": noun, "ns": plural(noun), "f": field, "l": label, "owner": owner,
        "a_n": article(noun), "a_f": article(field), "a_l": article(label),
        "Owner": capital(owner), "max": writer.pick(("largest", "best", "top")),
    }  # fmt: skip


def _render(writer: Writer, template: str, slots: dict[str, str]) -> str:
    """Fill slots only: square brackets are Python here, except one marked choice."""
    word = writer.pick(("largest", "highest"))
    return template.replace("[largest|highest]", word).format_map(slots)


def _module(writer: Writer) -> str:
    """A module docstring and three functions about the same kind of thing."""
    slots = _slots(writer)
    bodies = [_render(writer, t, slots) for t in writer.some(FUNCTIONS, 3)]
    head = writer.pick((
        f'"""Functions for {slots["ns"]} with {slots["l"]} and {slots["f"]}."""',
        f'# {capital(slots["ns"])}: each {slots["n"]} has {slots["a_l"]} and {slots["a_f"]}.',
        f'"""Helpers that work on a list of {slots["ns"]}."""',
    ))  # fmt: skip
    return "\n\n\n".join([head, *bodies])


def _collection(writer: Writer) -> str:
    """A class that owns a list, with three or four methods."""
    slots = _slots(writer)
    head = (
        'class {Owner}:\n    """{a} with {ns}; each {n} has {a_l} and {a_f}."""\n\n'
        "    def __init__(self, {l}):\n        self.{l} = {l}\n        self.{ns} = []"
    )
    methods = [_render(writer, t, slots) for t in writer.some(METHODS, writer.rng.randint(3, 4))]
    return "\n\n".join(
        [head.format_map({**slots, "a": capital(article(slots["owner"]))}), *methods]
    )


def _numbers(writer: Writer) -> str:
    """Arithmetic helpers with checked examples."""
    noun, factor = writer.pick(NOUNS), writer.rng.randint(2, 12)
    low, high = sorted(writer.some(range(1, 60), 2))
    fee, values = writer.rng.randint(1, 9), writer.some(range(1, 40), 3)
    parts = [
        f'def {noun}_price(count, fee={fee}):\n    """Return the price of some {plural(noun)} at '
        f'{factor} each, plus the fee."""\n    return count * {factor} + fee',
        f'def clamp_{noun}(value):\n    """Limit the value to the range {low} to {high}."""\n'
        f"    if value < {low}:\n        return {low}\n"
        f"    if value > {high}:\n        return {high}\n    return value",
        "\n".join([f"assert {noun}_price({v}) == {v * factor + fee}" for v in values]
                  + [f"assert clamp_{noun}({v}) == {min(high, max(low, v))}" for v in values]),
    ]  # fmt: skip
    return "\n\n\n".join(parts)


FORMS: tuple[Callable[[Writer], str], ...] = (
    _module, _module, _module, _collection, _collection, _numbers,
)  # fmt: skip


def module(seed: str) -> str:
    """One small module of a random form."""
    writer = Writer(seed)
    return writer.pick(FORMS)(writer) + "\n"
