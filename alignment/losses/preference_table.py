"""DPO's family by name: each loss's function, the rows and log-probabilities it takes, and its parameters' defaults.

The names are trl's where it has the loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from alignment.losses import preference
from alignment.losses.ranking import ranked_dpo_loss

Rows = Literal["comparisons", "labels", "rankings"]
Input = Literal["margins", "length_difference", "kl", "shift", "order"]
Parameter = float | str


@dataclass(frozen=True)
class LossSpec:
    """A loss of DPO's family.

    Attributes:
        function: log-ratios (without a reference log-probabilities), `needs`, parameters by keyword -> unreduced cost.
        source: the paper.
        defaults: parameters and their values where the user sets none.
        rows: kind of rows that it learns from.
        reference: True where it takes a reference.
        means: True where log-probabilities are means over a response's tokens; otherwise sums.
        by_difference: True where a constant added to both log-ratios changes nothing, so that another f-divergence can
            take the reverse KL's place.
        needs: a further input: a column of the rows (margins, length_difference), or what is computed over the whole
            global batch before the update, without gradient (kl, shift, order; see algorithms/dpo/global_inputs.py).
        sft_coef: weight of the chosen response's negative log-likelihood where the user sets none.
    """

    function: Callable[..., Tensor]
    source: str
    defaults: Mapping[str, Parameter] = field(default_factory=lambda: BETA)
    rows: Rows = "comparisons"
    reference: bool = True
    means: bool = False
    by_difference: bool = False
    needs: Input | None = None
    sft_coef: float = 0.0


BETA = {"beta": 0.1}
SMOOTHED = {"beta": 0.1, "label_smoothing": 0.0}
WEIGHTED = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}

LOSSES: dict[str, LossSpec] = {
    "sigmoid": LossSpec(preference.dpo_loss, "DPO, Rafailov et al. 2023", SMOOTHED, by_difference=True),
    "sigmoid_norm": LossSpec(
        preference.dpo_loss, "length-normalized DPO, Lambert et al. 2024",
        {"beta": 5.0, "label_smoothing": 0.0}, means=True, by_difference=True,
    ),
    "robust": LossSpec(
        preference.robust_loss, "robust DPO, Chowdhury et al. 2024",
        {"beta": 0.1, "label_smoothing": 0.1}, by_difference=True,
    ),
    "ipo": LossSpec(preference.ipo_loss, "IPO, Azar et al. 2023", means=True, by_difference=True),
    "hinge": LossSpec(preference.hinge_loss, "SLiC, Zhao et al. 2023", by_difference=True),
    "exo_pair": LossSpec(
        preference.exo_loss, "EXO, Ji et al. 2024", {"beta": 0.1, "label_smoothing": 1e-3}, by_difference=True
    ),
    "discopop": LossSpec(
        preference.discopop_loss, "DiscoPOP, Lu et al. 2024", {"beta": 0.05, "tau": 0.05}, by_difference=True
    ),
    "odpo": LossSpec(
        preference.odpo_loss, "DPO with an offset, Amini et al. 2024",
        {"beta": 0.1, "offset_coef": 1.0, "offset_scale": "log"}, needs="margins",
    ),
    "rdpo": LossSpec(
        preference.rdpo_loss, "R-DPO, Park et al. 2024",
        {"beta": 0.1, "length_penalty": 0.01}, needs="length_difference",
    ),
    "nca_pair": LossSpec(preference.nca_loss, "NCA, Chen et al. 2024"),
    "bco_pair": LossSpec(preference.bco_loss, "BCO without its reward shift, Jung et al. 2024"),
    "bco": LossSpec(preference.bco_loss, "BCO, Jung et al. 2024", needs="shift"),
    "sppo_hard": LossSpec(preference.sppo_loss, "SPPO, Wu et al. 2024", {"beta": 0.001}),
    "apo_zero": LossSpec(preference.apo_zero_loss, "APO-zero, D'Oosterlinck et al. 2024"),
    "apo_down": LossSpec(preference.apo_down_loss, "APO-down, D'Oosterlinck et al. 2024"),
    "aot": LossSpec(preference.aot_paired_loss, "AOT, Melnyk et al. 2024", SMOOTHED, needs="order"),
    "aot_unpaired": LossSpec(preference.aot_unpaired_loss, "AOT unpaired, Melnyk et al. 2024", SMOOTHED, needs="order"),
    "simpo": LossSpec(
        preference.simpo_loss, "SimPO, Meng et al. 2024", {"beta": 2.0, "gamma": 1.0}, reference=False, means=True
    ),
    "orpo": LossSpec(
        preference.orpo_loss, "ORPO, Hong et al. 2024", reference=False, means=True, sft_coef=1.0
    ),
    "cpo": LossSpec(preference.cpo_loss, "CPO, Xu et al. 2024", SMOOTHED, reference=False, sft_coef=1.0),
    "kto": LossSpec(preference.kto_loss, "KTO, Ethayarajh et al. 2024", WEIGHTED, rows="labels", needs="kl"),
    "apo_zero_unpaired": LossSpec(
        preference.kto_loss, "APO-zero of single responses, D'Oosterlinck et al. 2024", WEIGHTED, rows="labels"
    ),
    "plackett_luce": LossSpec(
        ranked_dpo_loss, "DPO on rankings, Rafailov et al. 2023", rows="rankings", by_difference=True
    ),
}  # fmt: skip

ALIASES = {"dpo": "sigmoid"}
PARAMETERS = sorted({name for spec in LOSSES.values() for name in spec.defaults})
