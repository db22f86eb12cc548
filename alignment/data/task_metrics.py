"""Metrics of downstream tasks, of classes, numbers, entities and answers: pure functions of labels and predictions."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
Entity = tuple[str, int, int]  # kind, first word, the one after the last
BLEU_COUNTS = [*(f"{what}_{n}" for what in ("matches", "ngrams") for n in range(1, 5)), "written", "reference"]


def class_metrics(labels: Sequence[int], predictions: Sequence[int], classes: int) -> dict[str, float]:
    """`accuracy`, `macro_f1`, `matthews`, and for two classes `f1`, that of class 1.

    F1 of a class is 2 right / (labeled + predicted); macro_f1 is the mean over the classes that are labeled or
    predicted.
    """
    cells = torch.tensor(labels) * classes + torch.tensor(predictions)
    table = torch.bincount(cells, minlength=classes * classes).reshape(classes, classes).double()  # rows: labels
    counts = table.sum(0) + table.sum(1)
    f1 = 2 * table.diagonal() / counts.clamp(min=1)
    return {
        "accuracy": float(table.trace() / table.sum()),
        "macro_f1": float(f1[counts > 0].mean()),
        "matthews": matthews(table),
        **({"f1": float(f1[1])} if classes == 2 else {}),
    }


def matthews(table: Tensor) -> float:
    """Correlation of labels (rows) and predictions, [C, C] float64, in [-1, 1]; 0 where either is always one class.

    r = (n correct - sum_k labeled_k predicted_k) / sqrt((n^2 - sum_k labeled_k^2) (n^2 - sum_k predicted_k^2))

    Source: Matthews 1975 for two classes; for more Gorodkin 2004, "Comparing two K-category assignments by a
    K-category correlation coefficient", eq. 8.
    """
    labeled = table.sum(1)
    predicted = table.sum(0)
    rows = table.sum()
    spread = (rows**2 - labeled.square().sum()) * (rows**2 - predicted.square().sum())
    if spread == 0:
        return 0.0
    return float((rows * table.trace() - labeled @ predicted) / spread.sqrt())


def number_metrics(labels: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """`pearson` and `spearman`, correlations of numbers and of their ranks, in [-1, 1]; 0 where either is constant."""
    from scipy.stats import pearsonr, spearmanr  # two seconds, which only this task needs

    if len(set(labels)) < 2 or len(set(predictions)) < 2:
        return {"pearson": 0.0, "spearman": 0.0}
    scores = (correlation(labels, predictions).statistic for correlation in (pearsonr, spearmanr))  # pyright: ignore
    return dict(zip(("pearson", "spearman"), map(float, scores), strict=True))


def rouge_l(answer: str, accepted: Sequence[str]) -> float:
    """F1 of the longest common subsequence of stems with the closest accepted answer, in [0, 1], by rouge-score.

    Source: Lin 2004, "ROUGE: a package for automatic evaluation of summaries", section 3.
    """
    from rouge_score.rouge_scorer import RougeScorer  # of an extra

    return RougeScorer(["rougeL"], use_stemmer=True).score_multi(accepted, answer)["rougeL"].fmeasure


def bleu_counts(answer: str, accepted: Sequence[str]) -> dict[str, float]:
    """Counts of an answer for a corpus: matching n-grams and all n-grams, n = 1 to 4, and the lengths of both sides."""
    from sacrebleu.metrics.bleu import BLEU

    score = BLEU(effective_order=True).sentence_score(answer, accepted)
    return dict(zip(BLEU_COUNTS, [*score.counts, *score.totals, score.sys_len, score.ref_len], strict=True))


def bleu(counts: Sequence[int]) -> float:
    """sacrebleu's BLEU of a corpus, in [0, 100], from the sums of `bleu_counts` over its answers, [10].

    Source: Papineni et al. 2002, "BLEU: a method for automatic evaluation of machine translation"; Post 2018,
    arXiv:1804.08771.
    """
    from sacrebleu.metrics.bleu import BLEU

    matches = counts[:4]
    there = counts[4:8]
    written, reference = counts[8:]
    return BLEU.compute_bleu(list(matches), list(there), written, reference).score


def are_entities(names: Iterable[str]) -> bool:
    """True for labels of the beginnings and insides of entities: B-PERSON, I-PERSON ..., and O."""
    names = set(names)
    return bool(names - {"O"}) and all(name == "O" or re.match(r"[BI]-.", name) for name in names)


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of a text with B-, I-, O labels; an I- that does not continue an entity of its kind begins one.

    Source: conlleval, the scorer of the CoNLL-2000 and 2003 tasks.
    """
    spans = set()
    start = 0
    for position, tag in enumerate([*tags, "O"]):
        before = tags[position - 1] if position else "O"
        continues = tag.startswith("I-") and before[2:] == tag[2:]
        if before != "O" and not continues:
            spans.add((before[2:], start, position))
        if tag != "O" and not continues:
            start = position
    return spans


def entity_metrics(labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]) -> dict[str, float]:
    """`entity_precision`, `entity_recall`, `entity_f1` over all texts; an entity is right if kind and both ends are."""
    pairs = [(entities(ours), entities(theirs)) for ours, theirs in zip(labels, predictions, strict=True)]
    right = sum(len(gold & predicted) for gold, predicted in pairs)
    wanted, given = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    return {
        "entity_precision": right / max(1, given),
        "entity_recall": right / max(1, wanted),
        "entity_f1": 2 * right / max(1, wanted + given),
    }


def normalized(text: str) -> str:
    """The text in lower case, without punctuation and articles, with single blanks.

    Source: Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1, and their evaluation script.
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def answer_metrics(answers: Sequence[str], golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """`exact_match` and `f1` of the words, each with the best of the correct answers; means over questions, in [0, 1].

    Where `golds` has no answer to a question, its context does not answer it, and "" is correct.

    Source: as `normalized`; empty answers Rajpurkar et al. 2018, arXiv:1806.03822, and their script.
    """
    matches = 0.0
    overlaps = 0.0
    for answer, texts in zip(answers, golds, strict=True):
        words = normalized(answer).split()
        correct = [gold for text in texts if (gold := normalized(text).split())] or [[]]
        matches += words in correct
        overlaps += max(_word_f1(words, gold) for gold in correct)
    return {"exact_match": matches / len(answers), "f1": overlaps / len(answers)}


def _word_f1(words: list[str], gold: list[str]) -> float:
    return 2 * (Counter(words) & Counter(gold)).total() / (len(words) + len(gold)) if words or gold else 1.0
