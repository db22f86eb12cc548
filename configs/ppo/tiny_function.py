"""The reward of tiny_function.yaml: a function of the responses and of the prompts' further columns."""

from collections.abc import Mapping, Sequence


def share_of_facts(
    responses: Sequence[str], facts: Sequence[Mapping[str, str]], asked: Sequence[Sequence[str]], **columns: object
) -> list[float]:
    """Share of the facts asked for that a response states, of those that the prompt has."""
    scores: list[float] = []
    for response, known, topics in zip(responses, facts, asked, strict=True):
        wanted = [known[topic] for topic in topics if topic in known]
        scores.append(sum(fact in response for fact in wanted) / max(1, len(wanted)))
    return scores
