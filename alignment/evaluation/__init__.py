"""Evaluation of models: win rates, judges, language-model loss. The HTML report is in report/."""

from alignment.evaluation.judge_config import EndpointConfig, JudgeConfig
from alignment.evaluation.judges import Judge, JudgeResult, build_judge, compare, longer_judge, score_judge
from alignment.evaluation.judgments import Judgment, read_judgments
from alignment.evaluation.language_loss import LanguageLoss, language_loss
from alignment.evaluation.people_judge import file_judge, write_annotation_form
from alignment.evaluation.winrate import WinRate, agreement, merge_orders, win_rate

__all__ = [
    "EndpointConfig", "Judge", "JudgeConfig", "JudgeResult", "Judgment", "LanguageLoss", "WinRate", "agreement",
    "build_judge", "compare", "file_judge", "language_loss", "longer_judge", "merge_orders", "read_judgments",
    "score_judge", "win_rate", "write_annotation_form",
]  # fmt: skip
