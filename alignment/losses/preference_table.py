"""DPO's family by name: each loss's function, the rows and log-probabilities it takes, and its parameters' defaults.

The names are trl's where it has the loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from alignment.losses.direct_preference import (
    apo_down_loss,
    apo_zero_loss,
    bco_loss,
    discopop_loss,
    exo_loss,
    hinge_loss,
    ipo_loss,
    nca_loss,
    odpo_loss,
    rdpo_loss,
    robust_loss,
    sppo_loss,
)
from alignment.losses.preference import dpo_loss
from alignment.losses.ranking import ranked_dpo_loss
from alignment.losses.reference_free import cpo_loss, simpo_loss, weighted_orpo_loss
from alignment.losses.sorted_pairs import aot_paired_loss, aot_unpaired_loss
from alignment.losses.unpaired import apo_zero_unpaired_loss, kto_loss

Rows = Literal["comparisons", "labels", "rankings"]
RowInput = Literal["margins", "length_difference"]
BatchInput = Literal["kl", "shift", "paired_values", "unpaired_values"]
Parameter = float | str


@dataclass(frozen=True)
class LossSpec:
    """What a loss of DPO's family needs.

    Attributes:
        function: log-probabilities, then `row_input`, then the parameters by keyword -> unreduced cost.
        rows: kind of rows that it learns from.
        reference: whether it takes log-probabilities of a reference after the policy's.
        means: whether log-probabilities are means over a response's tokens; otherwise sums.
        by_difference: whether a constant added to both log-ratios changes nothing, so that another f-divergence can take
            the reverse KL's place.
        row_input: a further tensor of the rows.
        batch_input: what the function takes of the whole global batch, computed before the update, without gradient.
        defaults: parameters and their values where the user sets none.
        sft_coef: weight of the chosen response's negative log-likelihood where the user sets none.
        source: the paper.
    """

    function: Callable[..., Tensor]
    source: str
    rows: Rows = "comparisons"
    reference: bool = True
    means: bool = False
    by_difference: bool = False
    row_input: RowInput | None = None
    batch_input: BatchInput | None = None
    defaults: Mapping[str, Parameter] = field(default_factory=dict)
    sft_coef: float = 0.0


BETA = {"beta": 0.1}
SMOOTHED = {"beta": 0.1, "label_smoothing": 0.0}
WEIGHTED = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}

LOSSES: dict[str, LossSpec] = {
    "sigmoid": LossSpec(dpo_loss, "DPO, Rafailov et al. 2023", by_difference=True, defaults=SMOOTHED),
    "sigmoid_norm": LossSpec(
        dpo_loss, "length-normalized DPO, Lambert et al. 2024", means=True, by_difference=True,
        defaults={"beta": 5.0, "label_smoothing": 0.0},
    ),
    "robust": LossSpec(
        robust_loss, "robust DPO, Chowdhury et al. 2024", by_difference=True,
        defaults={"beta": 0.1, "label_smoothing": 0.1},
    ),
    "ipo": LossSpec(ipo_loss, "IPO, Azar et al. 2023", means=True, by_difference=True, defaults=BETA),
    "hinge": LossSpec(hinge_loss, "SLiC, Zhao et al. 2023", by_difference=True, defaults=BETA),
    "exo_pair": LossSpec(
        exo_loss, "EXO, Ji et al. 2024", by_difference=True, defaults={"beta": 0.1, "label_smoothing": 1e-3}
    ),
    "discopop": LossSpec(
        discopop_loss, "DiscoPOP, Lu et al. 2024", by_difference=True, defaults={"beta": 0.05, "tau": 0.05}
    ),
    "odpo": LossSpec(
        odpo_loss, "DPO with an offset, Amini et al. 2024", row_input="margins",
        defaults={"beta": 0.1, "offset_coef": 1.0, "offset_scale": "log"},
    ),
    "rdpo": LossSpec(
        rdpo_loss, "R-DPO, Park et al. 2024", row_input="length_difference",
        defaults={"beta": 0.1, "length_penalty": 0.01},
    ),
    "nca_pair": LossSpec(nca_loss, "NCA, Chen et al. 2024", defaults=BETA),
    "bco_pair": LossSpec(bco_loss, "BCO without its reward shift, Jung et al. 2024", defaults=BETA),
    "bco": LossSpec(bco_loss, "BCO, Jung et al. 2024", batch_input="shift", defaults=BETA),
    "sppo_hard": LossSpec(sppo_loss, "SPPO, Wu et al. 2024", defaults={"beta": 0.001}),
    "apo_zero": LossSpec(apo_zero_loss, "APO-zero, D'Oosterlinck et al. 2024", defaults=BETA),
    "apo_down": LossSpec(apo_down_loss, "APO-down, D'Oosterlinck et al. 2024", defaults=BETA),
    "aot": LossSpec(aot_paired_loss, "AOT, Melnyk et al. 2024", batch_input="paired_values", defaults=SMOOTHED),
    "aot_unpaired": LossSpec(
        aot_unpaired_loss, "AOT unpaired, Melnyk et al. 2024", batch_input="unpaired_values", defaults=SMOOTHED
    ),
    "simpo": LossSpec(
        simpo_loss, "SimPO, Meng et al. 2024", reference=False, means=True, defaults={"beta": 2.0, "gamma": 1.0}
    ),
    "orpo": LossSpec(
        weighted_orpo_loss, "ORPO, Hong et al. 2024", reference=False, means=True, defaults=BETA, sft_coef=1.0
    ),
    "cpo": LossSpec(cpo_loss, "CPO, Xu et al. 2024", reference=False, defaults=SMOOTHED, sft_coef=1.0),
    "kto": LossSpec(
        kto_loss, "KTO, Ethayarajh et al. 2024", rows="labels", batch_input="kl", defaults=WEIGHTED
    ),
    "apo_zero_unpaired": LossSpec(
        apo_zero_unpaired_loss, "APO-zero of single responses, D'Oosterlinck et al. 2024", rows="labels",
        defaults=WEIGHTED,
    ),
    "plackett_luce": LossSpec(
        ranked_dpo_loss, "DPO on rankings, Rafailov et al. 2023", rows="rankings", by_difference=True, defaults=BETA
    ),
}  # fmt: skip

PARAMETERS = sorted({name for spec in LOSSES.values() for name in spec.defaults})
