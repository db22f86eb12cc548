"""The scale of a reward model's scores and its parameter of ties: found by training, kept beside the weights.

The weights and config.json stay as they were trained, so transformers' logits are the raw scores; `load_reward_model` gives
gain * logit + bias. PPO's own normalizer leaves scores alone that come from such a model.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from alignment.errors import UserError
from alignment.files import read_json_object, write_json

CALIBRATION = "reward_calibration.json"


@dataclass(frozen=True)
class Calibration:
    """gain * score + bias has mean 0 and deviation 1 on the samples that it was fitted on.

    Attributes:
        gain: 1 / deviation of the raw scores.
        bias: -mean / deviation of the raw scores.
        samples: number of samples; 0: not fitted.
        of: what the samples were, in words.
        theta: of Rao and Kupper's ties, learned or as it was set, for differences of raw scores; None: another loss.
    """

    gain: float = 1.0
    bias: float = 0.0
    samples: int = 0
    of: str = ""
    theta: float | None = None

    @property
    def fitted(self) -> bool:
        """True where scores are changed at all."""
        return self.samples > 0

    def apply(self, scores: Tensor) -> Tensor:
        """gain * scores + bias; the scores themselves where nothing was fitted."""
        return self.gain * scores + self.bias if self.fitted else scores

    def write(self, directory: Path) -> None:
        """Write the file beside the weights in `directory`; none where there is nothing to say."""
        if self != Calibration():
            write_json(directory / CALIBRATION, asdict(self))


def fit_calibration(scores: Tensor, of: str) -> Calibration:
    """The gain and bias that give raw scores mean 0 and (population) deviation 1.

    Args:
        scores: of reference samples, [n].
        of: what the samples are, in words.

    Raises:
        UserError: all scores are equal, or one is not finite.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (samples of the starting policy).
    """
    scores = scores.double()
    mean, deviation = scores.mean().item(), scores.std(correction=0).item()
    if not deviation > 0:  # NaN too
        raise UserError(
            f"normalize: the deviation of the {len(scores)} scores of {of} is {deviation:g}, so no scale follows from them; "
            "take more or other samples, or leave normalize out"
        )
    return Calibration(1 / deviation, -mean / deviation, len(scores), of)


def read_calibration(directory: Path) -> Calibration:
    """The calibration of a saved reward model; one that changes nothing where there is no file."""
    path = directory / CALIBRATION
    if not path.is_file():
        return Calibration()
    found = read_json_object(path)
    try:
        scale = float(found["gain"]), float(found["bias"]), int(found["samples"]), str(found.get("of", ""))
        return Calibration(*scale, theta=None if found.get("theta") is None else float(found["theta"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: gain, bias, samples and theta must be numbers ({error!r}); train again, or delete the file for raw scores"
        ) from error
