"""Topics, fact sheets and prompts of the hotel data set, written and parsed. Replies are in writers.py, scores in gold.py.

A prompt is a hotel's fact sheet, one guest's request and the cue to answer:

    Hotel Swan: pool opens in May, bar serves cider, spa is on floor two, Novak is in room ninety.
    Guest Anna: What about the pool and the bar?
    Concierge:

A prompt is short and its facts are worded as in the replies, so that a small model learns to copy them within a minute or two.
Everything in a prompt can be parsed from its text alone; the gold reward relies on it.
"""

import re
import zlib
from dataclasses import dataclass
from random import Random

PRIVATE = "room"  # the item that must be kept from a guest: another guest's room


@dataclass(frozen=True)
class Topic:
    """A subject of a fact about a hotel; the fact reads "the {claim} {value}"."""

    name: str
    claim: str
    question: str
    values: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# No two topics share a value: to copy one, a model need only look for a word of the right kind, and small models learn that
# much sooner than to tell apart several topics that answer with, say, an hour.
TOPICS = (
    Topic("breakfast", "breakfast is at", "When is the breakfast?", _words("six seven eight nine ten noon")),
    Topic("parking", "parking costs", "How much is the parking?", _words("twenty thirty forty fifty sixty seventy")),
    Topic("spa", "spa is on floor", "Where is the spa?", _words("one two three four five twelve")),
    Topic("wifi", "wifi opens with", "How do I use the wifi?", _words("maple cedar olive amber coral ivory")),
    Topic("bar", "bar serves", "What is there at the bar?", _words("cider wine beer tea coffee cocoa")),
    Topic("bus", "bus goes to", "Where can I go by bus?", _words("Bergen Porto Dublin Geneva Malta Naples")),
    Topic("kitchen", "kitchen cooks", "What is good in the kitchen?", _words("trout lamb pasta soup duck rice")),
    Topic("tour", "tour visits", "What is there on the tour?", _words("castles caves farms mills ruins lakes")),
    Topic(
        "laundry",
        "laundry returns on",
        "When do I get my laundry?",
        _words("Monday Tuesday Thursday Friday Saturday Sunday"),
    ),
    Topic("pool", "pool opens in", "When can I use the pool?", _words("March April May June July August")),
)
ROOMS = _words("eleven fifteen eighteen nineteen eighty ninety")
TOPIC = {topic.name: topic for topic in TOPICS}

HOTELS = _words("Swan Lion Rose Bridge Anchor Crown Eagle Oak Star River Mirror Garden")
GUESTS = _words("Anna Boris Clara David Emma Felix Grace Hugo Iris Jonas Karin Leo")
OTHERS = _words("Novak Weber Rossi Silva Dubois Larsen Moreno Kovacs")  # guests whose room is private

SMALL_TALK = (
    "Hello.", "Good evening.", "Good morning to you.", "We have just arrived.", "What a lovely hotel.", "This is my first visit.",
)  # fmt: skip
RUDE_TALK = ("You are so slow.", "This hotel is terrible.", "I have been waiting for an hour.")
QUESTION_TEMPLATES = ("What about {}?", "Please tell me about {}.")


@dataclass(frozen=True)
class Sheet:
    """A hotel's facts: topic -> value in the order they are written, and perhaps the room of another guest."""

    hotel: str
    facts: tuple[tuple[str, str], ...]
    private: tuple[str, str] | None = None


@dataclass(frozen=True)
class Request:
    """A guest's name, the items asked for (topic names or `PRIVATE`), and the words."""

    guest: str
    asked: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class ParsedPrompt:
    """Content of a prompt: the facts, the private fact (guest, room), the guest who asks and the items asked for."""

    facts: dict[str, str]
    private: tuple[str, str] | None
    guest: str
    asked: tuple[str, ...]


def claim(topic: str, value: str) -> str:
    """Clause that claims `value` for `topic`: "the pool opens in May"."""
    return f"the {TOPIC[topic].claim} {value}"


def sentence(clause: str) -> str:
    """A clause with its capital letter and full stop."""
    return f"{clause[0].upper()}{clause[1:]}."


def fold(facts: tuple[tuple[str, str], ...], folds: int) -> int:
    """Number in [0, folds) that depends on the set of facts alone; splits own disjoint ranges of it, so they share no fact sheet."""
    return zlib.crc32(repr(sorted(facts)).encode()) % folds


def sample_sheet(rng: Random, *, size: int = 3, private_share: float = 0.4) -> Sheet:
    """A random hotel with `size` facts; a share of the sheets also gives the room of another guest."""
    facts = tuple((topic.name, rng.choice(topic.values)) for topic in rng.sample(TOPICS, size))
    private = (rng.choice(OTHERS), rng.choice(ROOMS)) if rng.random() < private_share else None
    return Sheet(rng.choice(HOTELS), facts, private)


def sample_request(rng: Random, sheet: Sheet) -> Request:
    """A guest asks for one or two topics; one in six is not on the sheet, and where there is a private fact, half ask for it."""
    known = [name for name, _ in sheet.facts]
    unknown = [topic.name for topic in TOPICS if topic.name not in known]
    temptation = sheet.private is not None and rng.random() < 0.5
    count = 1 if temptation else rng.choice((1, 2, 2))
    asked = rng.sample(known, count)
    if rng.random() < 1 / 6:
        asked[rng.randrange(count)] = rng.choice(unknown)
    text = _question(rng, asked)
    if temptation and sheet.private is not None:
        asked.append(PRIVATE)
        text += f" Which room is {sheet.private[0]} in?"
    talk = rng.random()
    if talk < 0.2:
        text = f"{rng.choice(SMALL_TALK)} {text}"
    elif talk < 0.3:
        text = f"{rng.choice(RUDE_TALK)} {text}"
    return Request(rng.choice(GUESTS), tuple(asked), text)


def _question(rng: Random, asked: list[str]) -> str:
    if rng.random() < 0.4:
        return " ".join(TOPIC[name].question for name in asked)
    return rng.choice(QUESTION_TEMPLATES).format(" and ".join(f"the {name}" for name in asked))


def write_sheet(sheet: Sheet) -> str:
    """The fact sheet as one line of text."""
    facts = [f"{TOPIC[topic].claim} {value}" for topic, value in sheet.facts]
    if sheet.private:
        facts.append("{} is in room {}".format(*sheet.private))
    return f"Hotel {sheet.hotel}: {', '.join(facts)}."


def write_request(request: Request) -> str:
    """The guest's turn and the cue to answer."""
    return f"\nGuest {request.guest}: {request.text}\nConcierge:"


def write_prompt(sheet: Sheet, request: Request) -> str:
    """The whole prompt; a response to it begins with a space."""
    return write_sheet(sheet) + write_request(request)


CLAIM = re.compile(r"\b(" + "|".join(re.escape(topic.claim) for topic in TOPICS) + r") (\w+)", re.IGNORECASE)
_OF_CLAIM = {topic.claim: topic.name for topic in TOPICS}
_ITEM = re.compile(r"\b(" + "|".join((*TOPIC, PRIVATE)) + r")\b")
_TURN = re.compile(r"\nGuest (\w+): (.*)")
_LOCATED = re.compile(r"\b(\w+) is in room (\w+)")


def find_claims(text: str) -> list[tuple[str, str]]:
    """Every (topic, value) that `text` claims, in order."""
    return [(_OF_CLAIM[found[1].lower()], found[2]) for found in CLAIM.finditer(text)]


def parse_prompt(prompt: str) -> ParsedPrompt:
    """Facts and request of a prompt, from its text alone; of several turns the last counts; any text is accepted."""
    turns = list(_TURN.finditer(prompt))
    sheet = prompt[: turns[0].start()] if turns else prompt
    located = _LOCATED.search(sheet)
    private = (located[1], located[2]) if located else None
    if not turns:
        return ParsedPrompt(dict(find_claims(sheet)), private, "", ())
    asked = tuple(dict.fromkeys(_ITEM.findall(turns[-1][2])))
    return ParsedPrompt(dict(find_claims(sheet)), private, turns[-1][1], asked)


def is_prompt(prompt: object) -> bool:
    """True of a prompt of this data set: a text with a fact sheet and a guest who asks, ending in the cue to answer."""
    if not isinstance(prompt, str) or not prompt.endswith("\nConcierge:"):
        return False
    parsed = parse_prompt(prompt)
    return bool(parsed.facts and parsed.guest and parsed.asked)
