"""Base of all models, ours and transformers': one `forward`, and trained vectors in front of every document."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.outputs import Padded, from_padded
from alignment.models.safetensors_files import HFConfig
from alignment.ragged import DeviceBatch


class Model(nn.Module):
    """A network that reads documents.

    Attributes:
        config: the Hugging Face config.json it was built from and is saved with.
        task: name of its head, as in `build_model`.
        spec: the architecture; at least `vocabulary` and `max_positions`.
        outputs: (batch, ...) -> the outputs of a batch.
        new_cache: (rows, capacity) -> an empty cache for documents of up to `capacity` tokens; of models that generate,
            as are the next two.
        prefill: (batch, cache) -> logits [B, V] after each document's last token; the documents now fill the cache.
        decode: (tokens [B], cache) -> logits [B, V] after one more token for every cache row.
        source: "native", or "transformers" where it runs as transformers' own class.
        generation_config: content of generation_config.json, if the model generates and the file is there.
        prefix: module whose call gives keys and values in front of every document, [layers, 2, P, K, head_dim].
        prefix_enabled: False: `prefix` does not act.
        soft_prompt: module whose call gives the vectors that are read as the first tokens of every document, [P, E].
        soft_prompt_enabled: False: `soft_prompt` does not act.
        known_tokens: ids from here on have no token, and `outputs` leaves their logits out, in stages that learn from
            their own samples; None: all of the vocabulary count.
        row_adapters: `RowAdapters`, of which each document has its own, see `load_adapters`; None: there are none.
    """

    source: str
    spec: Any
    outputs: Callable[..., Any]
    new_cache: Callable[..., Any]
    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]
    generation_config: dict[str, Any] | None = None
    known_tokens: int | None = None
    row_adapters: Any = None

    def __init__(self, config: HFConfig, task: str):
        super().__init__()
        self.config = config
        self.task = task
        self.prefix: nn.Module | None = None
        self.soft_prompt: nn.Module | None = None
        self.prefix_enabled = self.soft_prompt_enabled = True

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        global_attention_mask: Tensor | None = None,
        batch: DeviceBatch | None = None,
        **options: object,
    ) -> Any:
        """The outputs of a batch of documents end to end, or of rows padded on either side.

        Args:
            input_ids, attention_mask, token_type_ids: [B, T]; positions are counted from each row's first token. The
                mask is 1 or True at real tokens, None: all are; the types are the sentences of a pair, for encoders.
            global_attention_mask: 1 or True at a Longformer's global tokens, [B, T]; None: as transformers' class
                chooses.
            options: further arguments of the class's `outputs` or `padded_outputs`.
        """
        if batch is not None:
            return self.outputs(batch, **options)
        return self.padded_outputs(
            from_padded(input_ids, attention_mask, token_type_ids, global_attention_mask), **options
        )

    def padded_outputs(self, padded: Padded) -> Any:
        """Outputs of padded rows: logits of documents [B, C] as they are, of tokens as [B, T, C], zeros at padding."""
        output = self.outputs(padded.batch)
        return output if self.task == "sequence" else output._replace(logits=padded.restore(output.logits))

    def active_prefix(self) -> Tensor | None:
        """The prefix's keys and values, [layers, 2, P, K, head_dim]; None where there is none or it is disabled."""
        return self.prefix() if self.prefix is not None and self.prefix_enabled else None

    def active_soft_prompt(self) -> Tensor | None:
        """The soft prompt's vectors, [P, E]; None where there is none or it is disabled."""
        return self.soft_prompt() if self.soft_prompt is not None and self.soft_prompt_enabled else None

    def virtual_tokens(self) -> int:
        """Positions that a prefix or soft prompt takes before every document; reads no weight, as it may be sharded."""
        active = ((self.prefix, self.prefix_enabled), (self.soft_prompt, self.soft_prompt_enabled))
        return sum(
            int(cast(Any, adapter).spec.tokens) for adapter, enabled in active if adapter is not None and enabled
        )

    def using_adapters(self, names: Sequence[str | None]) -> AbstractContextManager[None]:
        """Within the block, document or cache row i is read with adapter `names[i]` of `row_adapters`, None: none."""
        list(map(self.adapter_tokens, names))  # refuses unknown names
        return nullcontext() if self.row_adapters is None else self.row_adapters.using(names)

    def adapter_tokens(self, name: str | None) -> int:
        """Virtual tokens that an adapter of `row_adapters` puts before a document; UserError for an unknown name."""
        adapters = {} if self.row_adapters is None else self.row_adapters.weights
        if name is not None and name not in adapters:
            raise UserError(
                f"there is no adapter {name!r}; {', '.join(adapters) or 'none'} is loaded (see load_adapters)"
            )
        return 0 if name is None else adapters[name].virtual_tokens


def start_token_of(model: Model) -> int | None:
    """Token that begins an encoder-decoder's responses: that of its spec, else of its config; None for a decoder."""
    start = getattr(model.spec, "start_token", None)
    if start is not None or not model.config.get("is_encoder_decoder", False):
        return start
    if (start := model.config.get("decoder_start_token_id")) is None:
        raise UserError(
            f"the {model.config.get('model_type')} model's config.json names no decoder_start_token_id, so its decoder "
            "cannot begin; T5 takes its padding token, BART its end token"
        )
    return start


def check_capacity(capacity: int, positions: int) -> None:
    """UserError where `capacity` tokens are more than the model's `positions`."""
    if capacity > positions:
        raise UserError(
            f"{capacity} tokens (prompt, prefix and new tokens) do not fit the model's {positions} positions; lower "
            "max_new_tokens or shorten the prompts"
        )


def check_lengths(model: Any, lengths: Sequence[tuple[str, int]], way_out: str, new_tokens: int = 0) -> None:
    """Refuse documents (name, tokens) that do not fit the model's positions before `new_tokens` new ones.

    Raises:
        UserError: naming how many do not fit, the longest, and the user's `way_out`.
    """
    tokens = np.array([tokens for _, tokens in lengths], np.int64)
    check_row_lengths(model, tokens, lambda row: lengths[row][0], way_out, new_tokens)


def check_row_lengths(
    model: Any, lengths: np.ndarray, name_of: Callable[[int], str], way_out: str, new_tokens: int = 0
) -> None:
    """`check_lengths` of the tokens of many documents; `name_of` gives the name of a document by its number."""
    taken = model.virtual_tokens()
    positions = model.spec.max_positions
    long = np.flatnonzero(lengths > positions - taken - new_tokens)
    if not len(long):
        return
    longest = int(long[lengths[long].argmax()])
    follow = f", {new_tokens} new ones" if new_tokens else ""
    before = f", a prefix or soft prompt of {taken}" if taken else ""
    raise UserError(
        f"{len(long)} of {len(lengths)} documents do not fit the model's {positions} positions; the longest is "
        f"{name_of(longest)} ({int(lengths[longest])} tokens{follow}{before}): {way_out}"
    )


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Switch to eval mode inside the block, then restore the mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
