"""Prompts: what is written is what is read back, and the parts of the language do not overlap."""

from itertools import combinations
from random import Random

from alignment.hotel_world.grammar import (
    PRIVATE,
    TOPICS,
    fold,
    parse_prompt,
    sample_request,
    sample_sheet,
    write_prompt,
)


def test_reading_a_prompt_gives_back_what_was_written():
    rng = Random(3)
    for _ in range(500):
        sheet = sample_sheet(rng)
        request = sample_request(rng, sheet)
        reading = parse_prompt(write_prompt(sheet, request))
        assert reading.facts == dict(sheet.facts)
        assert reading.private == sheet.private
        assert (reading.guest, reading.asked) == (request.guest, request.asked)


def test_no_two_topics_share_a_value():
    for one, other in combinations(TOPICS, 2):
        assert not set(one.values) & set(other.values), (one.name, other.name)


def test_the_last_of_several_turns_counts():
    text = "Hotel Swan: bar serves tea.\nGuest Anna: What about the bar?\nConcierge: Hello.\nGuest Leo: Which room is Novak in?\nConcierge:"
    assert (parse_prompt(text).guest, parse_prompt(text).asked) == ("Leo", (PRIVATE,))


def test_fold_depends_on_the_facts_and_not_on_their_order():
    facts = (("bar", "tea"), ("spa", "two"), ("pool", "May"))
    assert fold(facts, 100) == fold(facts[::-1], 100)
    assert fold(facts, 10**9) != fold((*facts[:2], ("pool", "June")), 10**9)
