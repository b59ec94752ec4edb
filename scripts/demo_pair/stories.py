"""Small coherent stories: two characters, a place, an object, a cause, and an ending that follows.

Each plot is a list of beats; each beat offers several sentences. The opening paragraph names who,
where, what and why, so the rest of the story depends on it.
"""

from __future__ import annotations

import grammar
from grammar import Person, Writer, article, capital

OPENINGS = (
    "{hero} was {a_trade} in {town}, a [small|quiet|busy|windy] town [by the river|near the hills|"
    "on the coast|at the edge of a forest].",
    "In {town}, where the {season}s are [long|short|mild|hard], there lived {a_trade} named "
    "{hero}.",
    "Everyone in {town} knew {hero}, the {trade} [with the loud laugh|with the patient hands|who "
    "worked next to the bridge|who lived above the bakery].",
    "{hero} had been {a_trade} in {town} for {years} years.",
    "It was {season} in {town}, and {hero} the {trade} was [up before the sun|already at work|"
    "having a slow morning|in a good mood].",
    "One {weather} {day} in {town}, {hero} the {trade} [opened the shop early|walked to work|"
    "sat down to breakfast|swept the front step].",
)
TRAITS = (
    "{He} was [careful|honest|curious|stubborn|cheerful|quiet] and [never hurried|rarely "
    "complained|liked to finish what {he} began|kept every promise].",
    "{He} owned little, but {he} [took good care of it|never wanted more|shared it freely].",
    "People [came to {him}|asked for {him}] when [nobody else could help|things went wrong|they "
    "needed good advice].",
    "{His} best friend was {friend}, the {friend_trade}.",
)
WEATHER_LINES = (
    "The air was [cold|warm|still] and smelled of [smoke|rain|cut grass|bread|apples].",
    "A [thin|gray|bright] light lay over the roofs.",
    "Outside, the wind [moved the leaves|rattled the shutters|pushed the clouds along].",
    "The streets were [nearly empty|full of carts|wet from the night's rain].",
)
FEELINGS = (
    "{Hero} felt [uneasy|a little foolish|more tired than before|strangely calm].",
    "For a while {hero} [said nothing|only listened|did not know what to do].",
    "{Hero} took a [long|deep|slow] breath and [tried again|went on|counted to ten].",
)
ENDINGS = (
    "From that day on, {hero} and {friend} [ate supper together every {day}|never argued about "
    "small things again|told the story at every {season} fair].",
    "{Hero} [slept well|smiled all the way home|went home whistling] that night.",
    "And the {thing}? It [still stands|hangs|can be seen] in {hero}'s [window|kitchen|workshop] "
    "today.",
    '"[Some days|Now and then|Once in a while]," {hero} said later, "[a small thing|one honest '
    'word|a little patience] [changes everything|is worth more than gold|is all you need]."',
    "Since then, people in {town} say that [nothing is lost for good|good work is never wasted|a "
    "friend is the best tool of all|the slow road is often the short one].",
)

LOST = (
    (
        "[That morning|Before noon|At first light], {he} [noticed|saw|discovered] that the {thing} "
        "was [gone|missing].",
        "But when {he} reached for the {thing}, it was not [there|in its place|on the shelf].",
    ),
    (
        "It had belonged to {his} [grandmother|grandfather|aunt|uncle|first teacher], and {he} "
        "[could not work without it|would not trade it for anything].",
        "{He} needed it [for the fair on {day}|to finish an order|before evening].",
    ),
    (
        "{He} looked under the [bench|bed|table], behind the [door|stove|curtains], and in every "
        "[drawer|box|corner].",
        "{He} searched the [house|shop|yard] from top to bottom and found only [dust|an old coin|a "
        "button|two spiders].",
    ),
    (
        'Then {friend} came by and asked, "Where did you last [see|use] it?"',
        "{friend} the {friend_trade} heard about it and [came to help|put on a "
        "coat and came over].",
    ),
    (
        '"I had it {where}," said {hero}, and suddenly {he} remembered.',
        "{Hero} thought of the evening before, when {he} had been {where}.",
    ),
    (
        "They went there together, and a {animal} [ran past them|watched them from a wall|sat in "
        "the path].",
        "On the way they [met|passed] a {animal} that [seemed to know the road|would not move].",
    ),
    (
        "There, {where}, lay the {thing}, [wet but whole|covered with leaves|bright as new].",
        "The {thing} was {where}, exactly as {he} had left it.",
    ),
)
REPAIR = (
    (
        "That {day}, {friend} the {friend_trade} brought {him} a broken {thing}.",
        "{friend}, the {friend_trade}, came in with a {thing} that was "
        "[cracked|bent|broken] in two "
        "places.",
    ),
    (
        '"Can you [fix|mend|save] it?" asked {friend}. "It was a gift from my [mother|father|'
        'sister|brother]."',
        '"Nobody else will [try|touch it]," said {friend}. "[Will you look|Please look] at it?"',
    ),
    (
        "{Hero} turned it over [twice|slowly|in the light] and found [the crack|the weak place|the "
        "loose part].",
        "{Hero} put the {thing} on the table and [studied|measured|cleaned] it.",
    ),
    (
        "The first try [failed|came apart|made it worse], and the second was no better.",
        "The work was harder than it looked, because the {material} was [thin|old|brittle].",
    ),
    (
        "So {he} [borrowed|bought] a little {material} from [a neighbor|the market|the smith] and "
        "began again.",
        "Then {he} had an idea: {he} would use a strip of {material} to hold it together.",
    ),
    (
        "{He} worked by [candlelight|lamplight] until the clock struck {hour}.",
        "All [afternoon|evening] {he} worked, and {he} forgot to eat.",
    ),
    (
        "By {next_day} the {thing} was whole again, and [stronger than before|only {friend} could "
        "find the mend].",
        "On {next_day}, {friend} came back and [could not believe it|laughed out loud|held it up "
        "to the light].",
    ),
)
STORM = (
    (
        "[Toward evening|After lunch|Near midnight], the sky turned [dark|green|the color of iron] "
        "and a storm came in from the {side}.",
        "The storm began without warning, with [rain|hail|thunder] from the {side}.",
    ),
    (
        "{Hero} was far from home, carrying only a {thing} and [a piece of bread|half a cheese|two "
        "apples].",
        "All {he} had with {him} was a {thing}, because {he} [had meant to be "
        "back early|had packed "
        "in a hurry].",
    ),
    (
        "The [road|path|bridge] was [under water|blocked by a fallen "
        "tree|washed away], so {he} had "
        "to [turn back|find another way].",
        "{He} could hardly see the [road|path], and [the lightning came closer|the wind nearly "
        "knocked {him} down].",
    ),
    (
        "Then {he} saw a light: it was the house of {friend}, the {friend_trade}.",
        "At last {he} heard a voice calling. It was {friend}, the {friend_trade}, with a lamp.",
    ),
    (
        '"Come in," said {friend}, "and [dry your coat|sit by the fire|shut the door]."',
        "{friend} gave {him} [hot soup|dry socks|a blanket] and asked no questions.",
    ),
    (
        "They heard something at the door, and there stood a wet {animal}, so they let it in too.",
        "All night they [told stories|played cards|kept the fire going], while a {animal} slept "
        "between them.",
    ),
    (
        "In the morning the storm was over, and {hero} left the {thing} [on "
        "the table|by the stove] "
        "as a gift.",
        "At dawn the sky was clear. {Hero} gave {friend} the {thing} [to say thank you|as thanks].",
    ),
)
CONTEST = (
    (
        "Every {season}, {town} held a contest for the best {thing}, and the prize was {prize}.",
        "The mayor announced a contest: whoever made the best {thing} would win {prize}.",
    ),
    (
        "{Hero} had never won, but this year {he} [wanted to try|had a plan|felt ready].",
        '"This time I will enter," {hero} told {friend}, the {friend_trade}.',
    ),
    (
        "{friend} was entering too, and for a week the two [worked side by side|hardly spoke|kept "
        "their doors shut].",
        "{His} only rival was {friend}, who [had won twice|was quick and clever|never made "
        "mistakes].",
    ),
    (
        "On the last night, {friend}'s {material} ran out, and [the shops were closed|there was no "
        "time to buy more].",
        'The night before the contest, {friend} came to the door. "I have no {material} left," '
        "{friend} said.",
    ),
    (
        "{Hero} thought about {prize}, and then {he} [cut {his} own {material} "
        "in half|gave {friend} "
        "everything {he} had left].",
        "{He} could have said no. Instead {he} [opened the cupboard|shared what {he} had].",
    ),
    (
        "On {day} the judges [walked slowly from table to table|looked at every piece twice].",
        "The whole town came on {day}, and the judges [took an hour|whispered for a long time].",
    ),
    (
        "They could not choose, so {hero} and {friend} shared {prize}.",
        "{friend} won, but {friend} [walked across the square|turned around] "
        "and gave half of it to "
        "{hero}.",
    ),
)
ANIMAL = (
    (
        "On the road {he} found a young {animal} with a [hurt|stiff|bleeding] leg.",
        "Behind the [barn|mill|fence] sat a {animal} that could not [walk|stand].",
    ),
    (
        "{Hero} wrapped it in {his} [coat|scarf|apron] and carried it home in a {thing}.",
        "{He} made a bed for it in a {thing} and gave it [water|milk|some bread].",
    ),
    (
        '{friend} the {friend_trade} looked at the leg and said, "It needs '
        "[rest|time|a bandage and "
        'rest]."',
        '"It will live," said {friend}, the {friend_trade}, "if you [keep it warm|are patient]."',
    ),
    (
        "For {days} days the {animal} [slept and ate|hid under the table|would not eat].",
        "It took {days} days before the {animal} [stood up|trusted {him}|ate from {his} hand].",
    ),
    (
        "Soon it followed {him} everywhere, even to [the market|church|the well].",
        "After that it [sat by the door every evening|woke {him} every morning].",
    ),
    (
        "One night it made a terrible noise, and {hero} woke to find [smoke in the kitchen|water "
        "coming under the door|a thief at the window].",
        "Then, one {weather} night, the {animal} would not stop crying, and {hero} got up and saw "
        "[fire next door|the river rising].",
    ),
    (
        "Because of the {animal}, [nobody was hurt|the house was saved|everyone got out in time].",
        '"[You saved it|You helped it] once," said {friend}, "and now it has saved you."',
    ),
)
DOOR = (
    (
        "While cleaning, {he} moved [an old cupboard|a heavy shelf|a pile of boards] and found a "
        "small door.",
        "Behind the [stove|bookcase|barrels] there was a door that {he} had never seen.",
    ),
    (
        "It was locked, and the lock was made of {material}.",
        "A {material} lock held it shut, and there was no key.",
    ),
    (
        "{friend} the {friend_trade} tried [a wire|three old keys|a little oil], but it would not "
        "open.",
        "{Hero} called {friend}, the {friend_trade}, who [knew about locks|was good with tools].",
    ),
    (
        "Then {hero} thought of the {thing} that had come with the house.",
        '"Wait," said {hero}. "What about the {thing} [on the wall|in the attic]?"',
    ),
    (
        "Inside the {thing} was a key, [no longer than a finger|black with age|wrapped in paper].",
        "They shook the {thing}, and a key fell out.",
    ),
    (
        "The door opened on a narrow room with [a table, a lamp, and a letter|shelves full of jars|"
        "a chair and a chest].",
        "Behind the door were [stairs going down|a tiny library|a dry little cellar].",
    ),
    (
        'A note said: "Whoever finds this, [use it well|keep it safe|it is yours now]."',
        "On the wall someone had written the name of {hero}'s [grandfather|grandmother].",
    ),
)
GARDEN = (
    (
        "That {season}, nothing would grow in {his} garden: the {food} [stayed small|turned yellow|"
        "dried up].",
        "{He} had planted {food} behind the house, but the leaves were [brown|full of holes|limp].",
    ),
    (
        "{He} tried [more water|ashes|new soil], and still nothing changed.",
        "{He} read two books about it and asked [three neighbors|the whole street], without luck.",
    ),
    (
        '{friend} the {friend_trade} walked around it once and said, "[The '
        "wall takes the light|The "
        'soil is too hard|The well is too far]."',
        'One {day}, {friend}, the {friend_trade}, leaned over the fence. "May I [try|show you '
        'something]?"',
    ),
    (
        "Together they dug [a channel from the well|a deep bed|a ditch along the wall], and {hero} "
        "used the {thing} [to carry earth|to carry water].",
        "They worked from [breakfast to noon|noon to dark], and the {thing} served as a bucket.",
    ),
    (
        "After {days} days there were [green tips|new leaves|small white flowers].",
        "Then it rained, and {days} days later the first {food} appeared.",
    ),
    (
        "By the end of {season} there was so much that {he} [gave half away|filled every basket|"
        "sold some at the market].",
        "{Hero} picked so many {food} that {he} had to borrow [a cart|baskets|a mule].",
    ),
    (
        "The first basket went to {friend}, with the {thing} on top.",
        "{He} cooked the {food} for {friend}, and they ate outside [under the lamp|in the last "
        "sun].",
    ),
)
PLOTS = (LOST, REPAIR, STORM, CONTEST, ANIMAL, DOOR, GARDEN)
HIDING_PLACES = (
    "under the old bridge", "behind the mill", "at the well", "in the church garden",
    "by the ferry landing", "in the hay barn", "under the oak tree", "on the market steps",
    "next to the baker's cart", "at the edge of the pond", "on the stone wall",
    "in the schoolyard", "beside the railway gate", "in the boat shed", "at the foot of the tower",
)  # fmt: skip
PRIZES = (
    "a silver cup", "a fat goose", "ten gold coins", "a barrel of cider", "a new coat",
    "a good saddle", "a place at the mayor's table", "a wheel of cheese", "a pair of boots",
)  # fmt: skip


def _slots(writer: Writer, hero: Person, friend: Person) -> dict[str, str]:
    """Every value a story may mention."""
    material, noun = writer.pick(grammar.MATERIALS), writer.pick(grammar.THINGS)
    first_day = writer.rng.randrange(7)
    return {
        "hero": hero.name, "Hero": hero.name, "friend": friend.name, "trade": hero.trade,
        "a_trade": article(hero.trade), "friend_trade": friend.trade, "he": hero.he,
        "He": capital(hero.he), "him": hero.him, "his": hero.his, "His": capital(hero.his),
        "town": writer.town(), "thing": f"{material} {noun}", "material": material,
        "season": writer.pick(grammar.SEASONS), "weather": writer.pick(grammar.WEATHERS),
        "day": grammar.DAYS[first_day], "next_day": grammar.DAYS[(first_day + 2) % 7],
        "years": grammar.number_word(writer.rng.randint(3, 40)),
        "days": grammar.number_word(writer.rng.randint(3, 14)),
        "hour": grammar.number_word(writer.rng.randint(9, 12)),
        "side": writer.pick(("north", "south", "east", "west", "sea", "mountains")),
        "animal": writer.pick(grammar.ANIMALS), "food": writer.pick(grammar.CROPS),
        "where": writer.pick(HIDING_PLACES), "prize": writer.pick(PRIZES),
    }  # fmt: skip


def story(seed: str) -> str:
    """One story of about 120 to 250 words in three or four paragraphs."""
    writer = Writer(seed)
    hero = writer.person()
    friend = writer.person(taken=(hero.name,))
    while friend.trade == hero.trade:
        friend = writer.person(taken=(hero.name,))
    plot = writer.pick(PLOTS)
    slots = _slots(writer, hero, friend)
    beats = [writer.say(options, **slots) for options in plot]
    opening = [writer.say(OPENINGS, **slots), writer.say(TRAITS, **slots)]
    if writer.chance(0.4):
        opening.append(writer.say(WEATHER_LINES, **slots))
    if writer.chance(0.5):
        beats.insert(writer.rng.randint(3, 5), writer.say(FEELINGS, **slots))
    ending = writer.say(ENDINGS, **slots)
    cut = writer.rng.randint(3, 4)
    paragraphs = [opening + beats[:1], beats[1:cut], beats[cut:], [ending]]
    if writer.chance(0.3):
        title = f"The {slots['thing'].title()}" if plot is not ANIMAL else (
            f"The {slots['trade'].title()} and the {slots['animal'].title()}")  # fmt: skip
        paragraphs.insert(0, [title])
    return "\n\n".join(" ".join(p) for p in paragraphs) + "\n"
