"""Who scores sampled responses in online DPO: a reward model, the hotel data set's gold reward, or a judge of pairs."""

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from alignment.data.batches import Example
from alignment.data.rows.records import Prompt
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.generation import response_text
from alignment.hotel_world.gold import gold_score
from alignment.hotel_world.grammar import is_prompt
from alignment.rewards.combine import Scorer

# Prompts, responses shown first, responses shown second -> verdict for the one shown first; None: could not judge.
PairJudge = Callable[[Sequence[Prompt], Sequence[str], Sequence[str]], Sequence[float | None]]


def require_hotel_prompts(prompts: Sequence[Example]) -> None:
    """Refuse prompts that the gold reward cannot score."""
    others = [prompt.row_id for prompt in prompts if not is_prompt(prompt.prompt)]
    if others:
        raise UserError(
            f"{others[0]}: judge=gold judges only prompts of the generated hotel world, and {len(others)} of "
            f"{len(prompts)} are none; take judge=reward_model with reward_model=DIR, or judge=module:function"
        )


def gold_scorer(tokenizer: Tokenizer) -> Scorer:
    """Scores by the true reward of the hotel data set."""

    def score(prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
        texts = [response_text(tokenizer, ids, end) for ids, end in zip(responses, ended, strict=True)]
        return torch.tensor(gold_score([str(prompt.prompt) for prompt in prompts], texts))

    return score


def pair_scorer(judge: PairJudge, tokenizer: Tokenizer, responses_per_prompt: int) -> Scorer:
    """Scores that are shares of comparisons won: each two responses to a prompt are judged in both orders.

    A prompt of which some comparison was not judged has no scores (not a number). Equal texts tie without being judged.
    """

    def score(prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
        texts = [response_text(tokenizer, ids, end) for ids, end in zip(responses, ended, strict=True)]
        starts = range(0, len(texts), responses_per_prompt)
        shown = [
            (start + one, start + other)
            for start in starts
            for i, j in combinations(range(responses_per_prompt), 2)
            for one, other in ((i, j), (j, i))
        ]
        records = [Prompt(prompt.prompt, prompt.extra, prompt.row_id) for prompt in prompts]
        different = [(one, other) for one, other in shown if texts[one] != texts[other]]
        verdicts = judged(judge, records, texts, different)
        won = torch.zeros(len(texts))
        for one, other in shown:
            verdict = verdicts.get((one, other), 0.5)
            won[one] += float("nan") if verdict is None else verdict
            won[other] += float("nan") if verdict is None else 1 - verdict
        shares = won.view(-1, responses_per_prompt) / (2 * (responses_per_prompt - 1))
        return shares.masked_fill(shares.isnan().any(1, keepdim=True), float("nan")).view(-1)

    return score


def judged(
    judge: PairJudge, prompts: Sequence[Prompt], texts: Sequence[str], shown: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float | None]:
    """The judge's verdict on each comparison, for the response shown first."""
    if not shown:
        return {}
    ones, others = [one for one, _ in shown], [other for _, other in shown]
    verdicts = list(judge([prompts[i] for i in ones], [texts[i] for i in ones], [texts[i] for i in others]))
    wrong = [verdict for verdict in verdicts if verdict is not None and not 0 <= verdict <= 1]
    if len(verdicts) != len(shown) or wrong:
        found = f"{len(verdicts)} verdicts on {len(shown)} comparisons" if not wrong else f"the verdict {wrong[0]!r}"
        raise UserError(
            f"judge: it gave {found}; for each comparison it must give 1, 0.5 or 0 for the response shown first, or None"
        )
    return dict(zip(shown, verdicts, strict=True))
