"""Generated reviews, whose opinions follow the writer's mood, and general text: reviews of films, and facts about hotels.

A review has opinions (`the pool was superb .`, `we found the bar not dull .`) and, of a hotel, a fact. In a review that is
read without its label most opinions are of one polarity, and many end in a verdict; labeled training reviews have no
verdict and use a few of the adjectives only. What the others mean can be learned from unlabeled text alone.
"""

import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from alignment.hotel_world import grammar
from alignment.hotel_world.datasets import generate_rows

PAD, UNKNOWN, START, END, MASK = range(5)
GOOD, BAD = (
    words.split()
    for words in (
        "superb lovely splendid charming excellent perfect pleasant cozy tasteful spotless fresh elegant cheerful",
        "awful dirty shabby horrible dull filthy gloomy stale noisy broken greasy hideous cramped",
    )
)
FAMILIAR = 4  # adjectives of each polarity that labeled training reviews use
NEGATED = 0.05  # share of the opinions that are said with `not`
VERDICTS = (("never again .", "what a waste ."), ("we loved it .", "we tell all our friends ."))
FRAMES = ("the {} was {} .", "we found the {} {} .")
TOPICS = tuple(grammar.TOPIC)
OF_FILMS = ("plot", "cast", "ending", "music", "script", "camera", "humor", "pace", "title", "scenery")


class Review(NamedTuple):
    """Words of a review; the polarity that most of its opinions have, 1 good; polarity and sentence of each aspect.

    `opinions` maps a topic's name to (polarity, first word of its sentence, word after the last).
    """

    words: list[str]
    label: int
    opinions: dict[str, tuple[int, int, int]]


def write_review(
    rng: Random,
    *,
    topics: Sequence[str] = TOPICS,
    agreement: float = 0.95,
    adjectives: int = len(GOOD),
    verdict: float = 0.0,
) -> Review:
    """One review of three opinions; of a hotel, with a fact.

    Args:
        topics: of the opinions.
        agreement: probability that an opinion has the polarity of the writer's mood; 0.5: every opinion by itself.
        adjectives: those of each polarity that are used, from the front of the lists.
        verdict: probability that the mood is told at the end.
    """
    mood = rng.randrange(2)
    told = {topic: mood if rng.random() < agreement else 1 - mood for topic in rng.sample(topics, 3)}
    sentences: list[tuple[str | None, str]] = [(topic, _opinion(rng, topic, told[topic], adjectives)) for topic in told]
    if topics is TOPICS:
        fact = rng.choice([topic for topic in grammar.TOPICS if topic.name not in told])
        sentences.append((None, f"the {fact.claim} {rng.choice(fact.values)} .".lower()))
    rng.shuffle(sentences)
    if rng.random() < verdict:
        sentences.append((None, rng.choice(VERDICTS[mood])))
    words: list[str] = []
    opinions = {}
    for topic, text in sentences:
        first = len(words)
        words += text.split()
        if topic is not None:
            opinions[topic] = (told[topic], first, len(words))
    return Review(words, int(2 * sum(told.values()) > len(told)), opinions)


def _opinion(rng: Random, topic: str, polarity: int, adjectives: int) -> str:
    """A sentence; some say it with `not` and an adjective of the other polarity."""
    negated = rng.random() < NEGATED
    word = rng.choice((BAD, GOOD)[polarity != negated][:adjectives])
    return rng.choice(FRAMES).format(topic, f"not {word}" if negated else word)


def general_texts(seed: int, count: int, longest: int = 40) -> list[list[str]]:
    """Words of `count` general texts: three in four review a film, the others are of the hotel world, which has no opinions."""
    rows = generate_rows("pretrain", seed=seed, count=count // 4)
    facts = [re.findall(r"\w+|[^\w\s]", row["text"].lower())[:longest] for row in rows]
    rng = Random(f"{seed}/films")
    return facts + [write_review(rng, topics=OF_FILMS, verdict=0.8).words for _ in range(count - len(facts))]


class Vocabulary:
    """Numbers of words; a word that was not counted is UNKNOWN."""

    def __init__(self, texts: Sequence[Sequence[str]]):
        special = ["<pad>", "<unknown>", "<start>", "<end>", "<mask>"]
        self.words = [*special, *sorted({word for text in texts for word in text})]
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Sequence[str]) -> list[int]:
        """START, the words, END."""
        return [START, *(self.numbers.get(word, UNKNOWN) for word in words), END]
