"""Networks about to be trained: a policy or value model is loaded, gets its reference, is saved; memory is noted."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from alignment.adapters.files import is_scalar_adapter, read_base, read_revision, score_rows
from alignment.adapters.specs import UNMERGEABLE, AdapterSpec, DoRASpec, PromptSpec
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary, save_tokenizer
from alignment.errors import UserError
from alignment.files import CARD, atomic_directory
from alignment.loading import (
    Checkpoint,
    load_frozen_model,
    load_tokenizer,
    set_special_tokens,
)
from alignment.models.external.models import ExternalModel
from alignment.models.families import is_external_type
from alignment.models.families.family import Architecture
from alignment.models.frozen_weights import store_frozen, train_in_float32
from alignment.models.huggingface.checkpoint import (
    MAX_SHARD_SIZE,
    load_language_model,
    load_pretrained,
    load_scalar_model,
    save_model,
    saved_names,
)
from alignment.models.model import Model
from alignment.models.native_model import NativeModel
from alignment.models.new_weights import OWN_FAMILIES_ONLY, grow_vocabulary
from alignment.models.outputs import LanguageOutput, LogitsOutput
from alignment.models.quantization import write_quantization
from alignment.models.safetensors_files import read_config
from alignment.models.shared_weights import SharedWeights, refuse_trained
from alignment.models.weight_bytes import held_bytes, written
from alignment.models.weights_config import DEFAULT_WEIGHTS, WeightsConfig
from alignment.ragged import Ragged, Seq2Seq
from alignment.training import Engine, Run
from alignment.training.distributed import launched_kind, launched_rank
from alignment.training.optim import hidden_matrices, optimizer_bytes, trainable_parameters

GENERATORS: tuple[Architecture, ...] = ("decoder", "encoder-decoder")


@dataclass(frozen=True)
class Policy:
    """A network about to be trained, and what is needed to save it."""

    model: Any  # language model or value model, its adapter attached
    tokenizer: Tokenizer  # saved beside the model
    adapter: AdapterSpec | None = None  # None where every weight trains
    base: str | None = None  # directory or Hub name of the frozen weights under the adapter
    revision: str | None = None  # their commit, where they come from the Hub
    source: str | None = None  # the checkpoint it started from
    disabled_is_start: bool = False  # whether switching the adapter off gives the starting checkpoint back


def load_policy(
    start: Checkpoint,
    adapter: AdapterSpec | None,
    tokenizer: Tokenizer,
    output: str,
    *,
    bases: SharedWeights | None = None,
    new_tokens: Sequence[str] = (),
    architectures: Sequence[Architecture] = ("decoder",),
) -> Policy:
    """Load the language model to train, from a model or an adapter directory.

    Args:
        start: what it is loaded from.
        adapter: attached to the model; None trains every weight.
        tokenizer: the checkpoint's.
        output: the run's directory; see `_load_start` for what may be written there.
        bases: gives the frozen weights under an adapter, which other networks may share.
        new_tokens: of `tokenizer`, for which the model gets rows.
        architectures: that the stage trains.

    Raises:
        UserError: the model is none of these, or its tokenizer has ids that the model has no row for.
    """
    bases = bases or SharedWeights()
    advice = f"a policy of this stage is a {' or an '.join(architectures)}; start from one"
    _refuse_unless(start, advice, architectures)
    reader = _Reader(load_language_model, bases.language_model, bases.weights)
    if not new_tokens:
        return _load_start(start, adapter, tokenizer, output, reader)
    check_new_tokens(start)
    return with_new_tokens(_load_start(start, adapter, load_tokenizer(start), output, reader), tokenizer, new_tokens)


def load_value_model(
    start: Checkpoint,
    adapter: AdapterSpec | None,
    tokenizer: Tokenizer,
    output: str | None,
    *,
    head: Literal["normal", "zero"] | None,
    members: int = 1,
    bases: SharedWeights | None = None,
) -> Policy:
    """Load a model with one number per token to train: a reward model or PPO's value model."""
    bases = bases or SharedWeights()
    of_reward = "a reward model is trained on a decoder's last token; start from a decoder"
    of_value = "a value model needs a value at every token; set value_model=policy"
    _refuse_unless(start, of_value if output is None else of_reward)
    if head is None and start.is_adapter and is_scalar_adapter(start.directory):  # the head is the adapter's
        new_head = "zero"
        members = score_rows(start.directory)
    else:
        new_head = head
    reader = _Reader(
        partial(load_scalar_model, new_head=new_head, members=members),
        partial(bases.scalar_model, new_head=new_head, members=members),
        bases.weights,
        with_head=head is None,
    )
    return _load_start(start, adapter, tokenizer, output, reader)


def load_pretraining_start(
    start: Checkpoint,
    adapter: AdapterSpec | None,
    tokenizer: Tokenizer,
    output: str,
    *,
    task: str,
    weights: WeightsConfig = DEFAULT_WEIGHTS,
) -> Policy:
    """Load a language model of any architecture to train further on text."""

    def frozen(directory: Path, device: str) -> nn.Module:
        return store_frozen(load_pretrained(directory, task, None, device), weights)

    reader = _Reader(partial(load_pretrained, task=task), frozen, weights)
    return _load_start(start, adapter, tokenizer, output, reader)


def check_new_tokens(start: Checkpoint) -> None:
    """Refuse a start to whose vocabulary no tokens can be added, before it is loaded."""
    if start.is_adapter:
        raise UserError(
            f"add_tokens: {start.source} is an adapter; `alignment export --model {start.source} --add-token ... "
            "--output DIR` merges it and adds the tokens; start from DIR"
        )
    if is_external_type(read_config(start.directory)):
        raise UserError(f"add_tokens: {start.source}: {OWN_FAMILIES_ONLY}")
    _refuse_unless(start, "tokens are added to decoders")


def with_new_tokens(policy: Policy, tokenizer: Tokenizer, tokens: Sequence[str]) -> Policy:
    """The policy with a tokenizer that has these new tokens; its model gets rows for them, the mean of the others."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    grow_vocabulary(policy.model, min(ids), max(ids) + 1)
    return replace(policy, tokenizer=tokenizer)


def _refuse_unless(start: Checkpoint, advice: str, architectures: Sequence[Architecture] = ("decoder",)) -> None:
    kind = start.architecture
    if kind not in architectures:
        others = "pretrain, finetune, sft, dpo and reward" if kind == "encoder-decoder" else "pretrain and finetune"
        raise UserError(
            f"{start.source}: this model is an {kind}, and {advice} (of `alignment`, {others} train {kind}s)"
        )


@dataclass(frozen=True)
class _Reader:
    """Functions that read a model of one kind from a directory.

    Attributes:
        own: (directory, dtype=, device=) -> a model with weights of its own.
        frozen: (directory, device=) -> a model whose weights are frozen, and perhaps shared with other networks.
        weights: how frozen weights are held.
        with_head: whether an adapter's score head is taken over.
    """

    own: Callable[..., Any]
    frozen: Callable[..., Any]
    weights: WeightsConfig
    with_head: bool = True


def _load_start(
    start: Checkpoint, adapter: AdapterSpec | None, tokenizer: Tokenizer, output: str | None, reader: _Reader
) -> Policy:
    """Load the starting checkpoint and attach the new adapter to it.

    A new adapter is attached to the *starting* policy, so that disabling it gives that policy and not its base. A LoRA
    of the start stays beneath a new one, frozen, and both are saved as one over the same base. Some kinds
    (`UNMERGEABLE`) cannot be merged into weights: a start that has one goes on training it. Any other adapter of the
    start is merged into the weights, which are written to `output/base`; the new adapter's files name that as their
    base.
    """
    from alignment.adapters.attach import attach, load_adapter, merge_adapter, read_spec

    model: Any
    device = start_device(adapter, reader.weights)
    attaches = adapter is not None
    base = revision = None
    if not start.is_adapter and adapter is None:
        model = reader.own(start.directory, device=start_device())
    elif not start.is_adapter:
        model = reader.frozen(start.directory, device=device)
        base, revision = _name_and_revision(start)
    else:
        from alignment.adapters.lora import can_stack, keep_as_start

        earlier = read_spec(start.directory)
        read = partial(load_adapter, with_head=reader.with_head)
        base = read_base(start.directory)
        revision = read_revision(start.directory)
        if isinstance(earlier, UNMERGEABLE):
            if adapter not in (None, earlier):
                raise UserError(
                    f"{start.source}: ends in a {earlier.kind} adapter, which cannot lie under another one; leave "
                    "`adapter` out"
                )
            model = reader.frozen(start.base, device=start_device(earlier, reader.weights))
            model = train_in_float32(read(model, start.directory))
            adapter = earlier
            attaches = False
        elif adapter is None:
            model = merge_adapter(read(reader.own(start.base), start.directory))
            base = None
            revision = None
        elif can_stack(earlier, adapter):
            model = keep_as_start(read(reader.frozen(start.base, device=device), start.directory))
        else:
            model = merge_adapter(read(reader.own(start.base, dtype=None), start.directory))  # in the checkpoint's type
            base = _write_base(model, tokenizer, output)
            revision = None
            model = store_frozen(model, reader.weights)
    check_vocabulary(tokenizer, model.spec.vocabulary)
    if adapter is not None and attaches:
        train_in_float32(attach(model, adapter, tokenizer=tokenizer))
    return Policy(model, tokenizer, adapter, base, revision, start.source, disabled_is_start=attaches)


def _write_base(model: NativeModel | ExternalModel, tokenizer: Tokenizer, output: str | None) -> str | None:
    """Write the weights of a start with its adapter merged to `output/base`, and return it; None without an output."""
    base = None if output is None else str((Path(output) / "base").resolve())
    if base is not None and launched_rank() == 0:
        set_special_tokens(model, tokenizer)
        with atomic_directory(Path(base)) as folder:
            save_model(model, folder)
    return base


def start_device(adapter: AdapterSpec | None = None, weights: WeightsConfig = DEFAULT_WEIGHTS) -> str:
    """Device to load a starting checkpoint to: "meta" where ranks read their own slices later, else "cpu".

    DoRA, PiSSA, prompts and quantization start from the values of the weights, which every rank then reads whole.
    """
    from_values = (
        isinstance(adapter, DoRASpec | PromptSpec)
        or getattr(adapter, "init", "").startswith("pissa")
        or weights.quantize
    )
    return "meta" if launched_kind() in ("fsdp2", "deepspeed") and not from_values else "cpu"


def _name_and_revision(start: Checkpoint) -> tuple[str, str | None]:
    """The name by which an adapter's files find its base: a local directory, or a Hub name and the fetched commit."""
    directory = start.directory
    if Path(os.path.expanduser(start.source)).is_dir():
        return str(directory.resolve()), None
    return start.source, directory.name if directory.parent.name == "snapshots" else None


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The keys of a fresh model's config.json that its tokenizer decides."""
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def note_dropout_off(policy: Policy, run: Run) -> None:
    """Note in the run that the model's own dropout is off, in a stage that trains in eval mode."""
    rates = {
        key: rate
        for key, rate in policy.model.config.items()
        if "drop" in key and not key.startswith(("classifier", "summary")) and isinstance(rate, float) and rate > 0
    }
    if rates:
        named = ", ".join(f"{key}={rate:g}" for key, rate in sorted(rates.items()))
        run.note(f"dropout: off, so that policy and reference start equal; {policy.source} has {named}")


def note_balance(run: Run, model: Model, *, added: bool = False) -> None:
    """Note what becomes of the load-balancing loss that a mixture of experts asks for; `added`: the stage adds it."""
    if not (model.config.get("output_router_logits") and model.config.get("router_aux_loss_coef", 1.0)):
        return
    if added and model.source == "native":
        run.note(
            "balance_loss: of a mixture of experts, is computed from each micro-batch on each process: it changes a "
            "little with training.micro_batch_tokens and with the number of processes, which change nothing else"
        )
    else:
        run.note(
            "balance_loss: config.json asks for it (output_router_logits), and it is not added in this stage: only sft "
            "and pretrain add it, to models of our own families"
        )


class Reference:
    """A reference, called on a batch for log-probabilities, or for the logits behind its targets, without gradients.

    Attributes:
        model: the frozen network; None where it is the policy with its adapter off.
    """

    def __init__(self, engine: Engine, model: nn.Module | None):
        self.model = model
        self._engine = engine

    @overload
    def __call__(self, *, batch: Ragged | Seq2Seq, temperature: float = 1.0) -> LanguageOutput: ...
    @overload
    def __call__(self, *, batch: Ragged | Seq2Seq, return_logits: Literal[True]) -> LogitsOutput: ...
    def __call__(self, *, batch: Ragged | Seq2Seq, **asked: float) -> LanguageOutput | LogitsOutput:
        backend = self._engine.backend
        model = self.model
        without_adapter = nullcontext()
        if model is None:
            from alignment.adapters.attach import disabled

            assert isinstance(backend.unwrapped, NativeModel | ExternalModel)
            model = self._engine.model
            without_adapter = disabled(backend.unwrapped)
        with torch.no_grad(), without_adapter, backend.autocast():
            return model(batch=batch, **asked)

    @property
    def role(self) -> "Role":
        """The reference in a note on memory."""
        return Role("reference", self.model, remark="the policy with its new adapter off")


def reference_of(
    policy: Policy, source: str | None, engine: Engine, *, bases: SharedWeights | None = None
) -> Reference:
    """The reference of a policy."""
    if source is None and policy.disabled_is_start:
        return Reference(engine, None)
    device = engine.process_group.device
    model = load_frozen_model(Checkpoint(source or policy.source or ""), bases or SharedWeights(), device)
    model.known_tokens = policy.model.known_tokens
    return Reference(engine, model)


def save_policy(
    engine: Engine,
    policy: Policy,
    output: str | Path,
    *,
    max_shard_size: str = MAX_SHARD_SIZE,
    extra_files: Callable[[Path], None] | None = None,
) -> Path:
    """Write `output/model` in Hugging Face layout (or peft's, for an adapter) and return it."""
    from alignment.adapters.attach import adapter_state, save_adapter

    model = engine.backend.unwrapped
    assert isinstance(model, NativeModel | ExternalModel)

    def write(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        set_special_tokens(model, policy.tokenizer)
        if policy.adapter is None:
            save_model(model, folder, tensors=tensors, max_shard_size=max_shard_size)
        else:
            save_adapter(model, folder, base=policy.base, revision=policy.revision, state=dict(tensors))
            write_quantization(model, folder)
        if extra_files is not None:
            extra_files(folder)

    names = saved_names(model) if policy.adapter is None else list(adapter_state(model))
    return save_output(engine, output, policy.tokenizer, names, write)


def save_output(
    engine: Engine,
    output: str | Path,
    tokenizer: Tokenizer,
    names: Sequence[str],
    write: Callable[[Path, Iterator[tuple[str, Tensor]]], None],
) -> Path:
    """Write `output/model` with its tokenizer on rank 0 and return it; every rank must call it."""
    directory = Path(output) / "model"
    tensors = engine.backend.gather(names)
    if engine.process_group.is_main:
        with atomic_directory(directory) as folder:
            write(folder, tensors)
            save_tokenizer(tokenizer, folder)
            if (card := directory / CARD).is_file():  # a user may have edited it
                shutil.copyfile(card, folder / CARD)
    else:
        for _ in tensors:  # the other ranks send their parts
            pass
    engine.process_group.barrier()
    return directory


# What the networks of a run hold in memory


@dataclass(frozen=True)
class Role:
    """A network of a run."""

    name: str  # policy, value model, reward model or reference
    model: nn.Module | None  # its modules; None where it has none of its own
    engine: Engine | None = None  # of one that trains
    remark: str = ""  # what it is, where it has no modules of its own


def note_memory(run: Run, roles: Sequence[Role]) -> None:
    """Note a line per role, and one for all: bytes of weights on this process, of gradients and of optimizer state.

    Gradients and optimizer state are those after the first update, of all processes that divide them together.
    Activations and caches are not counted.
    """
    models = {role.name: role.model for role in roles if role.model is not None}
    refuse_trained(models)
    held = {name: held_bytes(model) for name, model in models.items()}
    gradients = optimizers = 0
    for role in roles:
        if role.model is None:
            run.note(f"memory: {role.name}: {role.remark}, no weights of its own")
            continue
        sizes = held[role.name]
        others = [name for name, part in held.items() if name != role.name and sizes.keys() & part.keys()]
        sharing = f" (some shared with {' and '.join(others)})" if others else ""
        trains = "nothing of it trains"
        if role.engine is not None:
            trained = trainable_parameters(role.model)
            shapes = {name: tuple(parameter.shape) for name, parameter in trained.items()}
            optimizer = optimizer_bytes(shapes, role.engine.config, hidden=hidden_matrices(role.model))
            count = sum(parameter.numel() for parameter in trained.values())
            gradients = gradients + 4 * count
            optimizers = optimizers + optimizer
            trains = (
                f"trains {count:,} numbers: {written(4 * count)} of gradients, {written(optimizer)} of optimizer state"
            )
        run.note(f"memory: {role.name}: {written(sum(sizes.values()))} of weights{sharing}; {trains}")
    together = {key: size for part in held.values() for key, size in part.items()}
    run.note(
        f"memory: together {written(sum(together.values()))} of weights, {written(gradients)} of gradients, "
        f"{written(optimizers)} of optimizer state"
    )
