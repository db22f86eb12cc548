"""The parts that several algorithms start from: rows, policies, references, losses over a model. No training loop here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from alignment.adapters import (
    AdapterSpec,
    PrefixSpec,
    attach,
    disabled,
    is_adapter,
    is_scalar_adapter,
    load_adapter,
    merge_adapter,
    read_base,
    read_revision,
    read_spec,
    save_adapter,
)
from alignment.config.load import to_dict
from alignment.data.batches import Example, collate
from alignment.data.prepare import documents_of, prepare
from alignment.data.rows.read import DataConfig
from alignment.data.rows.records import Kind
from alignment.data.stream import Stream
from alignment.data.tokenizers.load import check_vocabulary, save_tokenizer
from alignment.errors import UserError
from alignment.files import atomic_directory
from alignment.generation import response_text
from alignment.loading import architecture_of, find_base, find_directory, load_model, load_tokenizer, set_special_tokens
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model, save_model
from alignment.models.lengths import check_lengths
from alignment.ragged import Ragged, Seq2Seq
from alignment.training import Engine, LossSum, OptimConfig, Run, TrainingConfig, fit
from alignment.training.distributed import launched_rank
from alignment.training.ranks import compare_rows, compare_start, failing_together


@dataclass(frozen=True)
class Policy:
    """A network about to be trained, and what is needed to save it.

    Attributes:
        model: language or scalar model, its adapter attached.
        adapter: None where every weight trains.
        base: directory or Hub name of the frozen weights under the adapter.
        revision: their commit, where they come from the Hub.
        source: the checkpoint it started from.
        disabled_is_start: whether switching the adapter off gives the starting checkpoint back.
    """

    model: Any
    adapter: AdapterSpec | None = None
    base: str | None = None
    revision: str | None = None
    source: str | None = None
    disabled_is_start: bool = False


@contextmanager
def open_run(config: Any, stage: str, parents: Sequence[str | None]) -> Iterator[Run]:
    """The run's directory, its config and lineage written, closed whatever happens; all that is random follows its seed."""
    names = [name for name in parents if name]
    with failing_together():
        compare_start(to_dict(config))
        for name in names:
            find_directory(name)
        torch.manual_seed(config.training.seed)  # new weights, dropout; data order and sampling have their own seeds
        with Run(config.output, to_dict(config), stage=stage, parents=names) as run:
            yield run


def read_split(data: DataConfig, kind: Kind, tokenizer: Any, run: Run) -> tuple[list[Any], list[Any]]:
    """Training and held-out examples; what was dropped or cut is noted in the run.

    Raises:
        UserError: bad rows, all at once; or more of them lost than `data.max_lost_share`.
    """
    train = read_examples(data, kind, tokenizer, run)
    return train, [] if data.evaluation is None else read_examples(data, kind, tokenizer, run, "evaluation")


def read_examples(
    data: DataConfig, kind: Kind, tokenizer: Any, run: Run, part: Literal["train", "evaluation"] = "train"
) -> list[Any]:
    """Examples of one part of the data."""
    examples, counts = prepare(data, kind, tokenizer, part)
    for line in counts.lines():
        run.note(f"{part} {kind}: {line}")
    compare_rows(f"data.{part}" if kind != "text" else f"pretrain.{part}", examples)
    return examples


def check_rows(model: Any, examples: Sequence[Any], max_length: int, new_tokens: int = 0) -> None:
    """Refuse examples that do not fit the model's positions, before the first update and all at once.

    Args:
        max_length: of the data, `data.max_length`; no example is longer.
        new_tokens: tokens that will follow each prompt.

    Raises:
        UserError: naming how many, the longest, and the way out.
    """
    lengths = [(example.row_id, min(max_length, max(map(len, documents_of(example))))) for example in examples]
    ways = f"lower data.max_length (it is {max_length})" + (" or max_new_tokens" if new_tokens else "")
    check_lengths(model, lengths, f"{ways}, or take a model with a longer context", new_tokens)


def stream_of(examples: Sequence[Any], training: TrainingConfig, seed: int = 0) -> tuple[Stream, int]:
    """Examples in the run's order, and its number of steps; the last batch of the last epoch may be smaller."""
    epochs = training.epochs if training.max_steps is None else None
    stream = Stream(examples, training.batch_size, training.seed + seed, epochs)
    return stream, training.max_steps or stream.steps()


def load_policy(source: str, adapter: AdapterSpec | None, output: str) -> Policy:
    """The language model to train, from a model or an adapter directory.

    Raises:
        UserError: it is no decoder.
    """
    _refuse_unless_decoder(source, "a policy is a decoder; start from one")
    return _fitting(_start(source, adapter, output, load_language_model), source)


def load_scalar(
    source: str, adapter: AdapterSpec | None, output: str | None, *, head: Literal["normal", "zero"] | None
) -> Policy:
    """A reward model or critic to train; `head` makes a new score head, None keeps the checkpoint's.

    Raises:
        UserError: it is no decoder.
    """
    advice = "a reward model is trained on a decoder's last token; start from a decoder"
    _refuse_unless_decoder(
        source, "a critic needs a value at every token; set critic=policy" if output is None else advice
    )
    directory = find_directory(source)
    brings_head = head is None and is_adapter(directory) and is_scalar_adapter(directory)  # its base may have none
    loader = partial(load_scalar_model, new_head="zero" if brings_head else head)
    return _fitting(_start(source, adapter, output, loader, with_head=head is None), source)


def _refuse_unless_decoder(source: str, advice: str) -> None:
    kind = architecture_of(source)
    if kind != "decoder":
        raise UserError(
            f"{source}: this model is an {kind}, and {advice} (`alignment pretrain` and `alignment finetune` train "
            f"{kind}s)"
        )


def _fitting(policy: Policy, source: str) -> Policy:
    """The same, if the checkpoint's tokenizer gives no id that its model has no row for."""
    check_vocabulary(load_tokenizer(source), policy.model.spec.vocabulary)
    return policy


def _start(
    source: str, adapter: AdapterSpec | None, output: str | None, loader: Callable[..., Any], *, with_head: bool = True
) -> Policy:
    """Load, put an earlier adapter into the weights, attach the new one.

    A new adapter sits on the *starting* policy, so that switching it off gives that policy and not its base. A prefix
    is no change of weights: a start that has one goes on training it. The merged start is written to `output/base`,
    where the new adapter's file finds it; an `output` of None is for a model that is never saved.
    """
    directory = find_directory(source)
    if not is_adapter(directory):
        model, (base, revision) = loader(directory), _named(source, directory)
    elif isinstance(earlier := read_spec(directory), PrefixSpec):
        if adapter not in (None, earlier):
            raise UserError(
                f"{source}: ends in a prefix adapter, which cannot lie under another one; leave `adapter` out"
            )
        model = load_adapter(loader(find_base(directory)), directory, with_head=with_head)
        return Policy(model, earlier, read_base(directory), read_revision(directory), source)
    else:
        model = loader(find_base(directory))
        model = merge_adapter(load_adapter(model, directory, with_head=with_head))
        base, revision = None if output is None else str((Path(output) / "base").resolve()), None
        if adapter is not None and base is not None and launched_rank() == 0:
            set_special_tokens(model, load_tokenizer(source))
            with atomic_directory(Path(base)) as folder:
                save_model(model, folder)
    if adapter is None:
        return Policy(model, source=source)
    return Policy(attach(model, adapter), adapter, base, revision, source, disabled_is_start=True)


def _named(source: str, directory: Path) -> tuple[str, str | None]:
    """How an adapter names its base: a local directory, or a Hub name and the commit that was fetched."""
    if Path(source).expanduser().is_dir():
        return str(directory.resolve()), None
    return source, directory.name if directory.parent.name == "snapshots" else None


def note_dropout_off(policy: Policy, run: Run) -> None:
    """Say that a model's own dropout does nothing in a stage that trains in eval mode."""
    rates = {
        key: rate
        for key, rate in policy.model.config.items()
        if "drop" in key and not key.startswith(("classifier", "summary")) and isinstance(rate, float) and rate > 0
    }
    if rates:
        named = ", ".join(f"{key}={rate:g}" for key, rate in sorted(rates.items()))
        run.note(f"dropout: off, so that policy and reference start equal; {policy.source} has {named}")


def reference_model(policy: Policy, source: str | None, engine: Engine) -> Callable[..., Any]:
    """The reference as a function of a batch, without gradients: `reference(batch=..., temperature=...)`.

    Args:
        policy: how the policy was loaded.
        source: checkpoint of the reference; None: the policy's own start, which is the policy with its adapter off
            where it has a fresh one. Everything else is a frozen copy, read again from its named directory.
        engine: the policy's.
    """
    if source is None and policy.disabled_is_start:

        def adapter_off(**arguments: Any) -> Any:
            with torch.no_grad(), disabled(engine.backend.unwrapped), engine.backend.autocast():
                return engine.model(**arguments)

        return adapter_off
    frozen = load_model(source or policy.source or "", device=str(engine.process_group.device)).requires_grad_(False)

    def copy(**arguments: Any) -> Any:
        with torch.no_grad(), engine.backend.autocast():
            return frozen(**arguments)

    return copy


def save_policy(engine: Engine, policy: Policy, tokenizer: Any, output: str) -> Path:
    """Write `output/model` in Hugging Face layout (or peft's, for an adapter) and return it."""
    directory = Path(output) / "model"
    state = engine.backend.full_state()
    if engine.process_group.is_main:
        model = engine.backend.unwrapped
        set_special_tokens(model, tokenizer)
        with atomic_directory(directory) as folder:
            if policy.adapter is None:
                save_model(model, folder, state=state)
            else:
                save_adapter(model, folder, base=policy.base, revision=policy.revision, state=state)
            save_tokenizer(tokenizer, folder)
    engine.process_group.barrier()
    return directory


def fit_language_model(
    policy: Policy,
    train: list[Example],
    held_out: list[Example],
    optim: OptimConfig,
    training: TrainingConfig,
    run: Run,
    *,
    save: Callable[[Engine], Any],
) -> None:
    """Train on the next-token loss of the examples' targets; `held_out_loss` is logged where there is held-out data.

    Args:
        save: writes the model of an engine, once it is trained.
    """
    stream, steps = stream_of(train, training)
    engine = Engine(policy.model.train(), optim, training, total_steps=steps)
    loss_fn = text_loss(engine.model)
    pack = partial(collate, micro_batch_tokens=training.micro_batch_tokens)
    evaluate = partial(mean_over, engine, pack(held_out), loss_fn) if held_out else None
    fit(engine, stream, pack, loss_fn, training, run, evaluate=evaluate, save=partial(save, engine))


def text_loss(model: Any) -> Callable[[Any], LossSum]:
    """-log p(token), summed over the batch's targets; mixtures of experts add their balance, times the targets."""

    def loss_fn(batch: Ragged | Seq2Seq) -> LossSum:
        output = model(batch=batch)
        total = -output.log_probs.sum()
        if output.balance is None:
            return LossSum(total, {})
        balance = output.balance * batch.weight
        return LossSum(total + balance, {"balance_loss": balance})

    return loss_fn


def sequence_log_probs(model: Callable[..., Any], batch: Ragged) -> Tensor:
    """Log-probability of each document's targets together, nats, [B]."""
    log_probs = model(batch=batch).log_probs  # [M]
    return log_probs.new_zeros(len(batch.lengths)).index_add(0, batch.target_rows, log_probs)


@torch.no_grad()
def mean_over(engine: Engine, batches: Sequence[Any], loss_fn: Callable[[Any], LossSum]) -> dict[str, float]:
    """Loss and metrics over held-out batches, in eval mode, keys prefixed `held_out_`; every rank sees all of them."""
    was_training = engine.backend.unwrapped.training  # DeepSpeed's wrapper only hands the mode on, and always says True
    engine.model.eval()
    sums: dict[str, Tensor] = {}
    with engine.backend.autocast():
        for batch in batches:
            result = loss_fn(batch.to(engine.process_group.device))
            for key, value in {"loss": result.total, **result.metrics}.items():
                sums[key] = sums.get(key, torch.zeros((), device=engine.process_group.device)) + value.float()
    engine.model.train(was_training)
    weight = sum(batch.weight for batch in batches)
    return {f"held_out_{key}": float(value) / weight for key, value in sums.items()}


def log_sample(run: Run, step: int, tokenizer: Any, rollout: Any, count: int = 2) -> None:
    """Keep a few of an iteration's responses as text."""
    for row in range(min(count, len(rollout.prompts))):
        run.sample(
            step,
            prompt=tokenizer.decode(rollout.prompts[row], skip_special_tokens=True),
            response=response_text(tokenizer, rollout.responses[row], bool(rollout.ended[row])),
            score=float(rollout.scores[row]),
        )
