"""Reward models from a directory or the Hub: texts in, scores out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.adapters import is_adapter, is_scalar_adapter, load_adapter
from alignment.data.rows.records import Messages
from alignment.data.text.chat import prompt_ids, response_ids, text_ids
from alignment.data.text.special_tokens import EncodedText, special_token_template, tokenize_with_offsets
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import find_base, find_directory, load_tokenizer, same_vocabulary, torch_dtype
from alignment.models.classifiers import ScalarModel, SequenceClassifier
from alignment.models.external.models import ExternalScalarModel
from alignment.models.families import FAMILIES
from alignment.models.frozen_weights import store_frozen
from alignment.models.huggingface.checkpoint import load_pretrained, load_scalar_model
from alignment.models.outputs import ValueOutput
from alignment.models.quantization import quantize_blocks, require_bitsandbytes
from alignment.models.safetensors_files import HFConfig, read_config
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import Quantization
from alignment.ragged import Ragged, group_by_length


@dataclass(frozen=True)
class RewardModel:
    """A scalar model, or an encoder with one class, and its tokenizer."""

    model: ScalarModel | ExternalScalarModel | SequenceClassifier
    tokenizer: Tokenizer

    def shares_token_ids(self, tokenizer: Tokenizer) -> bool:
        """Whether a policy's token ids can be scored as they are.

        Both need the same vocabulary and the same chat template (a reward model without a template uses the policy's).
        An encoder never shares ids, because it puts its own special tokens around prompt and response.
        """
        own = self.tokenizer
        same_template = not own.chat_template or own.chat_template == tokenizer.chat_template
        return same_vocabulary(own, tokenizer) and same_template and not isinstance(self.model, SequenceClassifier)

    def score(
        self,
        texts: Sequence[str | tuple[str | Messages, str]],
        micro_batch_tokens: int = 16_384,
        ended: Sequence[bool] | None = None,
    ) -> Tensor:
        """Score whole texts, or prompts with their responses; a score does not depend on the batch around it.

        Args:
            texts: a plain text is tokenized as it is and the end token added; a (prompt, response) pair is tokenized as
                in training, its prompt a text or a list of messages. An encoder's tokenizer adds its special tokens
                around one text or two.
            micro_batch_tokens: tokens per forward.
            ended: False where a pair's response was cut off, so that no end token follows it; None: all of them ended.
                The special tokens of an encoder do not depend on it.

        Returns:
            Scores, float32 on the CPU, [n].

        Raises:
            UserError: a prompt is a list of messages and the reward model is an encoder, which reads no dialogues.
        """
        if isinstance(self.model, SequenceClassifier):
            encoded = self._encoded(texts)
            return self.score_ids([one.ids for one in encoded], micro_batch_tokens, [one.segments for one in encoded])
        whole = [True] * len(texts) if ended is None else ended
        return self.score_ids([self._ids(*row) for row in zip(texts, whole, strict=True)], micro_batch_tokens)

    def _ids(self, text: str | tuple[str | Messages, str], ended: bool) -> list[int]:
        if isinstance(text, str):
            return text_ids(self.tokenizer, text)
        prompt, response = text
        return prompt_ids(self.tokenizer, prompt) + response_ids(self.tokenizer, response, prompt, ended=ended)

    def _encoded(self, texts: Sequence[str | tuple[str | Messages, str]]) -> list[EncodedText]:
        """Texts and pairs of texts with the special tokens of an encoder."""
        parts = [(text,) if isinstance(text, str) else text for text in texts]
        plain = [part for text in parts for part in text if isinstance(part, str)]
        if len(plain) < sum(map(len, parts)):
            raise UserError("this reward model is an encoder and reads texts; give each prompt as one text")
        template = special_token_template(self.tokenizer)
        tokenized = iter(tokenize_with_offsets(self.tokenizer, plain))
        ids = [[next(tokenized).ids for _ in text] for text in parts]
        return [template.single(*text) if len(text) == 1 else template.pair(*text) for text in ids]

    @torch.no_grad()
    def score_ids(
        self,
        documents: Sequence[Sequence[int]],
        micro_batch_tokens: int = 16_384,
        segments: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Score token ids as they are, [n].

        Args:
            documents: token ids of each document.
            micro_batch_tokens: tokens per forward.
            segments: sentence of each token, 0 or 1, for encoders.
        """
        scores = torch.zeros(len(documents))
        device = next(self.model.parameters()).device
        for group in group_by_length([len(document) for document in documents], micro_batch_tokens):
            batch = Ragged.build([documents[i] for i in group])
            if segments is not None:
                batch = replace(batch, segments=torch.tensor([part for i in group for part in segments[i]]))
            output, last = self.model(batch=batch.to(device)), batch.last.to(device)
            found = output.values[last] if isinstance(output, ValueOutput) else output.logits[:, 0]
            scores[group] = found.float().cpu()
        return scores


def load_reward_model(
    source: str,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    quantize: Quantization | None = None,
) -> RewardModel:
    """Load a reward model in eval mode with its tokenizer.

    Args:
        source: directory or Hub name of a reward model, or of the adapter of one.
        dtype, device, quantize: as for `load_model`.

    Raises:
        UserError: something in the directory is missing, unknown or unsafe, or there is no trained score head.
    """
    directory = find_directory(source)
    if not is_adapter(directory) and _scores_whole_texts(read_config(directory)):
        require_bitsandbytes(quantize)
        model = load_pretrained(directory, "scalar", torch_dtype(dtype), "cpu" if quantize else device)
        model = model if quantize is None else quantize_blocks(model, quantize).to(device)
        return RewardModel(model, load_tokenizer(source))
    return RewardModel(load_reward_network(source, dtype, device, quantize=quantize), load_tokenizer(source))


def load_frozen_reward_model(source: str, bases: SharedWeights, device: str | torch.device = "cpu") -> RewardModel:
    """Load a reward model that does not train in eval mode, with its tokenizer; its head is float32.

    Args:
        source: directory or Hub name.
        bases: gives its weights, which other networks may share.
        device: device of the weights.

    Raises:
        UserError: as for `load_reward_model`.
    """
    directory = find_directory(source)
    if not is_adapter(directory) and _scores_whole_texts(read_config(directory)):
        return RewardModel(
            store_frozen(load_pretrained(directory, "scalar", None), bases.weights).to(device), load_tokenizer(source)
        )
    base = _load_reward_base(source, directory, bases.scalar_model).to(device)
    model = load_adapter(base, directory).requires_grad_(False) if is_adapter(directory) else base
    return RewardModel(model.eval(), load_tokenizer(source))


def _scores_whole_texts(config: HFConfig) -> bool:
    """Whether a config is that of an encoder, which has one score for the text and none per token."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and "scalar" in family.tasks and family.tasks["scalar"].head is not None


def load_reward_network(
    source: str,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    quantize: Quantization | None = None,
) -> Any:
    """Load the scalar model of a reward model's directory or adapter in eval mode, without its tokenizer.

    Raises:
        UserError: something in the directory is missing, unknown or unsafe, or there is no trained score head.
    """
    require_bitsandbytes(quantize)
    directory = find_directory(source)
    load = partial(load_scalar_model, dtype=torch_dtype(dtype), device="cpu" if quantize else device)
    model = _load_reward_base(source, directory, load)
    model = model if quantize is None else quantize_blocks(model, quantize).to(device)
    return (load_adapter(model, directory) if is_adapter(directory) else model).eval()


def _load_reward_base(source: str, directory: Path, load: Callable[..., Any]) -> Any:
    """The scalar model of a reward model's directory, or of the base of its adapter, which is still to be loaded.

    Args:
        load: (directory, new_head=) -> a scalar model.
    """
    if not is_adapter(directory):
        _refuse_language_model(source, directory)
        return load(directory)
    if not is_scalar_adapter(directory):
        raise UserError(
            f"{source}: this adapter belongs to a policy and has no score head; give a reward model's directory"
        )
    return load(find_base(directory), new_head="zero")


def _refuse_language_model(source: str, directory: Path) -> None:
    """Refuse a language model by its class, before the error about a missing head tensor would come."""
    architecture = (read_config(directory).get("architectures") or [""])[0]
    if str(architecture).endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise UserError(
            f"{source}: this is no reward model but a language model ({architecture}) without a score head; train one "
            f"from it with `alignment reward CONFIG policy={source}`"
        )
