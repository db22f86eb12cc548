"""Who scores the sampled responses of a stage: its reward models, and the other entries of `rewards`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.algorithms.policies import Role
from alignment.algorithms.runs import check_rows
from alignment.data.batches import Example
from alignment.data.config import DataConfig
from alignment.data.rows.records import Prompt
from alignment.data.table import column_of
from alignment.data.tokenize import encode_prompts
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import find_directory
from alignment.models.encoder_decoder import DocumentClassifier
from alignment.models.model import check_lengths
from alignment.models.shared_weights import SharedWeights
from alignment.reward_model import Combine, RewardModel, load_frozen_reward_model, member_count
from alignment.rewards.build import build_rewards, finite_scorer, prepare_rewards, response_scorer
from alignment.rewards.combine import ScoreFunction, Scores, TextReward
from alignment.rewards.specs import RewardSpec, names_of


@dataclass(frozen=True, kw_only=True)
class RewardSource:
    """The rewards of a stage, one reward model or a list of entries, and the samples that they are given for.

    Attributes:
        reward_model: the short form, whose scores are given as they are.
        rewards: entries, whose numbers are normalized, clipped, weighed and added.
        reward_combine, reward_std_coef: how the scores of an ensemble in `reward_model` become one.
        data: of the prompts.
        max_new_tokens: longest response.
        micro_batch_tokens: tokens that a reward model reads at once.
    """

    reward_model: str | None
    rewards: Sequence[RewardSpec]
    reward_combine: Combine = "mean"
    reward_std_coef: float = 1.0
    data: DataConfig
    max_new_tokens: int
    micro_batch_tokens: int

    @property
    def models(self) -> dict[str, RewardSpec]:
        """The entries that are reward models, by name; of the short form one, named reward_model."""
        if self.reward_model is not None:
            combine = self.reward_combine
            std_coef = self.reward_std_coef
            return {"reward_model": RewardSpec(self.reward_model, reward_combine=combine, reward_std_coef=std_coef)}
        named = zip(names_of(self.rewards), self.rewards, strict=True)
        return {name: spec for name, spec in named if spec.reward_model is not None}

    def prepare(self, prompts: Sequence[Example]) -> dict[str, TextReward]:
        """Return the rewards that read texts, by name, before any network is loaded."""
        texts = prepare_rewards(self.rewards, prompts)
        for spec in self.models.values():
            combine = spec.reward_combine
            source = spec.reward_model or ""
            if combine != "mean" and (members := member_count(find_directory(source))) == 1:
                raise UserError(
                    f"{source}: reward_combine={combine} combines the members of an ensemble, and this reward model "
                    f"has {members}; leave it out, or train one with `ensemble`"
                )
        return texts

    def load(
        self, prompts: Sequence[Example], tokenizer: Tokenizer, bases: SharedWeights, device: torch.device | str
    ) -> dict[str, RewardModel]:
        """Return the reward models by the name of their entry; each can read all prompts."""
        judges = {}
        for name, spec in self.models.items():
            source = spec.reward_model or ""
            judges[name] = load_frozen_reward_model(
                source, bases, device, combine=spec.reward_combine, std_coef=spec.reward_std_coef
            )
            self.check(prompts, judges[name], tokenizer, source)
        return judges

    def score_function(
        self,
        tokenizer: Tokenizer,
        texts: Mapping[str, TextReward],
        judges: Mapping[str, RewardModel],
        reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> ScoreFunction:
        """Return the function that scores responses, by the reward model or by all of `rewards`."""
        scorers = {name: response_scorer(judge, tokenizer, self.micro_batch_tokens) for name, judge in judges.items()}
        scaled = [name for name, judge in judges.items() if judge.calibration.fitted]
        if not self.rewards:
            score = finite_scorer(self.reward_model or "", scorers["reward_model"])
            return lambda *responses: Scores(score(*responses), fixed_deviation=1.0 if scaled else None)
        return build_rewards(self.rewards, texts, scorers, tokenizer=tokenizer, scaled=scaled, reduce=reduce)

    def roles(self, judges: Mapping[str, RewardModel], name: str = "reward model") -> list[Role]:
        """Return the reward models as networks of a run; that of the short form has no further name."""
        return [Role(f"{name} {key}" if self.rewards else name, judge.model) for key, judge in judges.items()]

    def check(self, prompts: Sequence[Example], reward_model: RewardModel, tokenizer: Tokenizer, name: str) -> None:
        """Refuse prompts that a reward model cannot read, or that one with its own tokenizer would see otherwise."""
        longest = self.data.max_length
        if reward_model.shares_token_ids(tokenizer):
            return check_rows(reward_model.model, prompts, longest, self.max_new_tokens)
        if cut := column_of(prompts, "cut").nonzero()[0].tolist():
            names = ", ".join(prompts[row].row_id for row in cut[:3])
            raise UserError(
                f"{name}: the reward model has a tokenizer or chat template of its own and reads whole prompts, "
                f"while the policy sees {len(cut)} of {len(prompts)} without their beginning ({names}); raise "
                f"data.max_length (it is {longest}), or leave the long prompts out"
            )
        if isinstance(reward_model.model, DocumentClassifier):
            messages = [prompt.row_id for prompt in prompts if not isinstance(prompt.prompt, str)]
            if messages:
                raise UserError(
                    f"{name}: the reward model is an encoder and reads texts, and {len(messages)} of {len(prompts)} "
                    f"prompts are messages ({', '.join(messages[:3])}); take a decoder as reward model, or prompts as "
                    "texts"
                )
            return
        records = [Prompt(prompt.prompt, prompt.extra, prompt.row_id) for prompt in prompts]
        ids = encode_prompts(reward_model.tokenizer, records)
        lengths = [(prompt.row_id, len(tokens)) for prompt, tokens in zip(prompts, ids, strict=True)]
        check_lengths(
            reward_model.model, lengths, "leave these prompts out, or take another reward model", new_tokens=1
        )
