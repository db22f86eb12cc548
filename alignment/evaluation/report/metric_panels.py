"""The panels of a report: which metrics share a chart, their order, titles and notes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One chart of a stage: title, a few words of explanation, and metric keys with the label of each."""

    title: str
    note: str
    keys: Mapping[str, str]


def _one(key: str, title: str, note: str = "") -> Panel:
    return Panel(title, note, {key: title})


MAIN = (
    _one("loss", "Loss", "nats"),
    _one("accuracy", "Accuracy", "share of pairs ranked as labeled; ties count half"),
    _one("score", "Score", "mean reward-model score per response"),
    _one("kl", "KL to the reference", "nats per response"),
    Panel("Implicit rewards", "beta times log-ratio", {"chosen_reward": "chosen", "rejected_reward": "rejected"}),
    Panel("Log-probabilities", "nats per response", {"chosen_log_prob": "chosen", "rejected_log_prob": "rejected"}),
    _one("margin", "Margin", "chosen minus rejected"),
    _one("language_loss", "Language-model loss", "held-out text, nats per token"),
    _one("pretrain_loss", "Pretraining loss", "nats per token, in the mix"),
    _one("policy_loss", "Policy loss"),
    _one("value_loss", "Value loss"),
    _one("entropy", "Entropy", "nats per token"),
    _one("response_tokens", "Response length", "tokens"),
    _one("ended_share", "Responses that ended", "share that stopped by themselves"),
)

FURTHER = (
    _one("learning_rate", "Learning rate"),
    _one("grad_norm", "Gradient norm", "before clipping"),
    _one("approx_kl", "KL of one update", "nats per token"),
    _one("clip_fraction", "Clipped share", "tokens whose gradient is clipped"),
    _one("first_ratio_error", "First ratio error", "largest |ratio − 1| before any update"),
    _one("kl_coef", "KL coefficient"),
    _one("explained_variance", "Explained variance", "1: a perfect critic"),
    _one("distinct_share", "Distinct responses", "share of the rollout"),
    _one("ties", "Ties", "share of pairs"),
    _one("tokens_per_second", "Tokens per second"),
)
