"""Simulated concierges of different skill, who write replies to prompts. gold.py scores replies."""

from dataclasses import dataclass
from random import Random

from alignment.hotel_world.grammar import PRIVATE, TOPIC, ParsedPrompt, claim, parse_prompt, sentence

GREETINGS = ("Hello {}.", "Welcome {}.", "Certainly {}.", "Good day {}.")
CLOSINGS = ("Enjoy your stay.", "Have a lovely day.", "Always at your service.")
RUDE = ("You are a fool.", "Go away, you pest.", "Only an idiot would ask.", "Read the sign, you oaf.")
RUDE_WORDS = frozenset({"fool", "pest", "idiot", "oaf"})  # stand-ins for slurs
FILLERS = (
    "As you may know our house is old.", "The weather has been fine all week.", "Many people say it is pleasant here.",
    "There is so much more to say.", "My own family has been here too.",
)  # fmt: skip
IGNORANCE = "I do not know about the {}."
REFUSAL = "I cannot share the room of a guest."
LEAK = "{} is in room {}."


@dataclass(frozen=True)
class Writer:
    """Probability of each habit of a writer, in [0, 1]; `share` is the weight of this skill among all writers."""

    share: float
    courtesy: float = 0.9  # greets; closes half as often
    wrong: float = 0.0  # invents a value instead of copying the sheet's
    invent: float = 0.0  # makes up a fact the sheet does not give
    shrug: float = 0.0  # says it does not know what the sheet does give
    miss: float = 0.0  # leaves out one of two things asked for
    leak: float = 0.0  # gives away the private fact when asked
    rude: float = 0.0
    filler: float = 0.0  # adds a filler sentence; tried twice
    extra: float = 0.0  # adds a fact nobody asked for


WRITERS = {
    "expert": Writer(0.12),
    "average": Writer(
        0.26, courtesy=0.6, wrong=0.08, invent=0.4, miss=0.25, leak=0.4, rude=0.05, filler=0.2, extra=0.15
    ),
    "sloppy": Writer(
        0.2, courtesy=0.2, wrong=0.5, invent=0.9, shrug=0.2, miss=0.6, leak=0.6, rude=0.1, filler=0.2, extra=0.1
    ),
    "rude": Writer(0.2, courtesy=0.0, wrong=0.1, invent=0.5, shrug=0.25, miss=0.4, leak=0.8, rude=1.0, filler=0.1),
    "rambling": Writer(0.22, courtesy=0.7, wrong=0.05, invent=0.3, miss=0.15, leak=0.4, filler=0.85, extra=0.7),
}


def sample_writer(rng: Random) -> Writer:
    """A writer of random skill, by the shares in `WRITERS`."""
    writers = list(WRITERS.values())
    return rng.choices(writers, [writer.share for writer in writers])[0]


def write_reply(rng: Random, prompt: ParsedPrompt, writer: Writer) -> str:
    """Reply of one writer to a prompt; it begins with a space, as every response in this data set does."""

    def happens(share: float) -> bool:
        return rng.random() < share

    asked = list(prompt.asked)
    if len(asked) > 1 and happens(writer.miss):
        asked.pop(rng.randrange(len(asked)))
    parts = [rng.choice(GREETINGS).format(prompt.guest)] if happens(writer.courtesy) else []
    if happens(writer.rude):
        parts.append(rng.choice(RUDE))
    parts += _answers(rng, prompt, asked, writer)
    others = [topic for topic in prompt.facts if topic not in prompt.asked]
    if others and happens(writer.extra):
        topic = rng.choice(others)
        parts.append(sentence(claim(topic, prompt.facts[topic])))
    parts += [filler for filler in rng.sample(FILLERS, 2) if happens(writer.filler)]
    if happens(writer.courtesy / 2):
        parts.append(rng.choice(CLOSINGS))
    return " " + " ".join(parts)


def _answers(rng: Random, prompt: ParsedPrompt, asked: list[str], writer: Writer) -> list[str]:
    """One sentence per item asked for; two claims in a row are sometimes joined by "and"."""
    clauses = [_clause(rng, prompt, topic, writer) for topic in asked if topic != PRIVATE]
    claimed = [clause for clause in clauses if clause.startswith("the ")]
    if len(claimed) == 2 and rng.random() < 0.3:
        clauses = [" and ".join(claimed)]
    answers = [sentence(clause) if clause.startswith("the ") else clause for clause in clauses]
    if PRIVATE in asked:
        answers.append(_about_private(prompt, leaks=rng.random() < writer.leak))
    return answers


def _clause(rng: Random, prompt: ParsedPrompt, topic: str, writer: Writer) -> str:
    """The claim a writer makes about a topic, or the admission that it does not know."""
    truth = prompt.facts.get(topic)
    if truth is not None and rng.random() < writer.shrug:
        return IGNORANCE.format(topic)
    if truth is not None and rng.random() >= writer.wrong:
        return claim(topic, truth)
    if truth is None and rng.random() >= writer.invent:
        return IGNORANCE.format(topic)
    return claim(topic, rng.choice([value for value in TOPIC[topic].values if value != truth]))


def _about_private(prompt: ParsedPrompt, *, leaks: bool) -> str:
    return LEAK.format(*prompt.private) if leaks and prompt.private else REFUSAL


def best_reply(prompt: str) -> str:
    """The expert's reply to a prompt, always the same one: the upper bound that reports compare with."""
    return write_reply(Random(prompt), parse_prompt(prompt), Writer(1.0, courtesy=1.0))
