"""The loss of SFT and pretraining, also of the text beside PPO."""

from dataclasses import replace

from alignment.losses.language import TokenLoss
from alignment.models.outputs import LogProbModel
from alignment.ragged import Ragged, Seq2Seq
from alignment.training import LossFn, LossSum
from alignment.training.terms import ONE_SOURCE, Sources


def language_loss_fn(model: LogProbModel, sources: Sources = ONE_SOURCE, token_loss: TokenLoss | None = None) -> LossFn:
    """Return the loss function of a language model: -log p(token), summed over the batch's targets.

    The metric `perplexity` is the exponential of its mean. Mixtures of experts add their load-balancing loss, times the
    weight of the targets.

    Args:
        model: called on a batch.
        sources: told apart in metrics, and weighed.
        token_loss: label smoothing and z-loss; -log p(token) itself is then the metric `nll`.
    """

    def loss_fn(batch: Ragged | Seq2Seq) -> LossSum:
        output = model(batch=batch) if token_loss is None else model(batch=batch, token_loss=token_loss)
        nll = -output.log_probs if token_loss is None else -output.log_probs.detach()
        losses, sums = (nll, {}) if output.losses is None else (output.losses, {"nll": nll.sum()})
        loss = sources.loss_sum(losses, batch, sums, perplexity=nll)
        means = loss.means | {"perplexity": (nll.detach().sum(), nll.new_tensor(float(len(nll))))}
        if output.balance is None:
            return replace(loss, means=means)
        balance = output.balance * batch.weight
        return LossSum(loss.total + balance, {**loss.metrics, "balance_loss": balance}, means)

    return loss_fn
