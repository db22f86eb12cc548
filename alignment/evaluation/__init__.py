"""Evaluation of models: win rates, judges, language-model loss. The HTML report is in report/."""

from alignment.evaluation.agreement import agreement
from alignment.evaluation.judges import (
    Judge,
    JudgeResult,
    compare,
    file_judge,
    longer_judge,
    score_judge,
    write_annotation_form,
)
from alignment.evaluation.language_loss import LanguageLoss, language_loss
from alignment.evaluation.winrate import WinRate, merge_orders, win_rate

__all__ = [
    "Judge", "JudgeResult", "LanguageLoss", "WinRate", "agreement", "compare", "file_judge", "language_loss",
    "longer_judge", "merge_orders", "score_judge", "win_rate", "write_annotation_form",
]  # fmt: skip
