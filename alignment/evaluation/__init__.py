"""Evaluation of models, one file a command. Figures are made in statistics/, judges in judging/, pages in reports/."""

from alignment.evaluation.language_loss import LanguageLoss, language_loss
from alignment.judging.config import EndpointConfig, JudgeConfig
from alignment.judging.judges import Judge, JudgeResult, build_judge, compare, longer_judge, score_judge
from alignment.judging.judgments import Judgment, read_judgments
from alignment.judging.people_judge import file_judge, write_annotation_form
from alignment.statistics.agreement import agreement, cohen_kappa, fleiss_kappa, krippendorff_alpha
from alignment.statistics.corrected import corrected_win_rate, labels_needed
from alignment.statistics.length_control import LengthControlledRate, length_controlled_win_rate
from alignment.statistics.ratings import Ratings, bradley_terry_ratings, elo_ratings
from alignment.statistics.seeds import SeedsWinRate, seeds_win_rate
from alignment.statistics.winrate import WinRate, detectable_difference, holm, merge_orders, sign_test, win_rate

__all__ = [
    "EndpointConfig",
    "Judge",
    "JudgeConfig",
    "JudgeResult",
    "Judgment",
    "LanguageLoss",
    "LengthControlledRate",
    "Ratings",
    "SeedsWinRate",
    "WinRate",
    "agreement",
    "bradley_terry_ratings",
    "build_judge",
    "cohen_kappa",
    "compare",
    "corrected_win_rate",
    "detectable_difference",
    "elo_ratings",
    "file_judge",
    "fleiss_kappa",
    "holm",
    "krippendorff_alpha",
    "labels_needed",
    "language_loss",
    "length_controlled_win_rate",
    "longer_judge",
    "merge_orders",
    "read_judgments",
    "score_judge",
    "seeds_win_rate",
    "sign_test",
    "win_rate",
    "write_annotation_form",
]
