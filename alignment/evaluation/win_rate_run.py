"""Win rates of models: sample the responses of each and judge them against a baseline's (`alignment evaluate winrate`)."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NoReturn

import torch

from alignment.data.batches import collate
from alignment.data.config import DataConfig
from alignment.data.rows.records import Comparison, Prompt, Text
from alignment.data.text.chat import response_ids, stop_token_ids
from alignment.data.tokenize import tokenize_comparisons, tokenize_prompts, tokenize_texts
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.evaluation.inputs import print_tally, read_records
from alignment.evaluation.judges import (
    Judge,
    JudgeResult,
    compare,
    file_judge,
    longer_judge,
    score_judge,
    write_annotation_form,
)
from alignment.evaluation.language_loss import language_loss
from alignment.evaluation.pair_log_probs import PairLogProbs, compare_pairs, pair_log_probs
from alignment.evaluation.sampled_responses import Responses, note_form, read_responses, write_responses
from alignment.evaluation.winrate import TIE, mean_interval
from alignment.files import hash_of, read_json_object, sha256, write_json
from alignment.generation import Generation, SamplingConfig, decode_responses, response_text
from alignment.loading import best_device, find_directory, load_model, load_tokenizer, same_vocabulary
from alignment.models.classifiers import SequenceClassifier
from alignment.models.model import check_lengths
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Ragged, group_by_length
from alignment.reward_model import RewardModel, load_reward_model
from alignment.rewards.selection import kl_bound
from alignment.training.run.lineage import parent_hashes


@dataclass(frozen=True)
class BestOfConfig:
    """A policy's best of n as one more contestant: of its n responses to each prompt the one that a reward model scores highest.

    Attributes:
        policy: name among `models`.
        reward_model: directory of the reward model that chooses; of equal scores the first response is taken.
        samples: n.
    """

    policy: str
    reward_model: str
    samples: int = 16

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2, got {self.samples}; the best of one is the policy itself")


@dataclass(frozen=True)
class WinRateConfig:
    """Settings of a comparison of policies.

    Attributes:
        models: name -> directory or Hub name.
        baseline: the name among `models` that the others are compared with.
        data: prompts; those longer than `data.max_length` tokens are truncated on the left.
        output: directory of the results, and of the responses, which a later start reads again.
        judge: required. reward_model (given as `reward_model`), verdicts (a file filled in by people or another
            program), longer (the longer response: a baseline for judges), gold (the true reward of the hotel data
            set, for its prompts only).
        reward_model: directory of the judging reward model; with another judge it gives each model's mean proxy score.
        verdicts: file of verdicts for judge=verdicts; if it does not exist, it is written as a form to fill in. The
            next start reads the responses that were shown, whatever its seed and weights.
        reference: name among `models` to measure the KL from; None: the baseline. KL is measured only between models
            with the same vocabulary.
        text: held-out running text for each model's language-model loss.
        comparisons: held-out comparisons, on which the log-probability of the chosen and of the rejected response is
            measured, and its change since the reference; for models with the reference's vocabulary.
        best_of: name -> best of n responses of one of the models, judged beside them. Its `kl` is the bound
            log n - (n - 1) / n, given where its policy is the reference; it has no language-model loss of its own.
        tie_margin: largest difference of scores that is a tie.
        max_failed_share: largest share of items that the judge may fail on; the others are then judged alone.
        max_new_tokens, temperature, top_p, seed: of the sampling.
        batch_size: responses sampled at the same time.
        samples: prompts kept with every model's response.
        chat_template: of the models, a built-in one's name or a Jinja file; None: each tokenizer's own.
        weights: type that models are held and compute in; auto: each checkpoint's.
    """

    models: dict[str, str]
    baseline: str
    data: DataConfig
    output: str
    judge: Literal["gold", "reward_model", "longer", "verdicts"] | None = None
    reward_model: str | None = None
    verdicts: str | None = None
    reference: str | None = None
    text: DataConfig | None = None
    comparisons: DataConfig | None = None
    best_of: dict[str, BestOfConfig] = field(default_factory=dict)
    tie_margin: float = 0.0
    max_failed_share: float = 0.1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    batch_size: int = 256
    seed: int = 0
    samples: int = 8
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    def __post_init__(self) -> None:
        for name, value in (("baseline", self.baseline), ("reference", self.reference)):
            if value is not None and value not in self.models:
                raise ValueError(f"{name} {value!r} is not among the models: {', '.join(self.models)}")
        SamplingConfig(self.max_new_tokens, self.temperature, top_p=self.top_p, seed=self.seed)  # checks their ranges
        for name, least in (("batch_size", 1), ("samples", 0), ("tie_margin", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share must lie between 0 and 1, got {self.max_failed_share}")
        for name, own in self.best_of.items():
            if name in self.models:
                raise ValueError(f"best_of: {name!r} is the name of a model too; take another one")
            if own.policy not in self.models:
                raise ValueError(
                    f"best_of: policy {own.policy!r} of {name} is not among the models: {', '.join(self.models)}"
                )
        if self.best_of and self.temperature == 0:
            raise ValueError("best_of needs a temperature above 0: the n responses to a prompt would all be the same")
        if self.judge is None:
            raise ValueError(
                "say who judges: judge=reward_model with reward_model=DIR (one that no policy was trained against), "
                "judge=verdicts with verdicts=FILE (filled in by people), or judge=longer (the longer response wins); "
                "judge=gold is for prompts of the generated hotel world alone"
            )
        if self.judge == "reward_model" and self.reward_model is None:
            raise ValueError("judge=reward_model needs `reward_model`, a directory")
        if self.judge == "verdicts" and self.verdicts is None:
            raise ValueError("judge=verdicts needs `verdicts`, a file")

    def policy_of(self, name: str) -> str:
        """Directory or Hub name of the model whose responses a contestant gives."""
        return self.models[self.best_of[name].policy if name in self.best_of else name]


class FormWritten(UserError):
    """A form for people's verdicts was written: the evaluation goes on when it is filled in."""


def run(config: WinRateConfig) -> Path:
    """Judge every model's responses against the baseline's, and write `results.json`.

    The responses are sampled and written, or read from an earlier start in the same directory, see sampled_responses.py.

    Raises:
        UserError: bad prompts, prompts that the judge cannot judge, a missing model, no verdicts, or responses that
            people judge and that this start would replace.
        FormWritten: the verdicts are still to be filled in.
    """
    output = Path(config.output)
    prompts: list[Prompt] = read_records(config.data, "prompts")
    if config.judge == "gold":
        _check_prompts(prompts)
    form = Path(config.verdicts) if config.judge == "verdicts" and config.verdicts else None
    judge = file_judge(form) if form is not None and form.exists() else None
    texts = None if config.text is None else read_records(config.text, "text")
    pairs = None if config.comparisons is None else read_records(config.comparisons, "comparisons")
    hashes = _check_models(config)
    # Loaded on the CPU first: a wrong checkpoint is reported early, and the GPU holds one model at a time.
    proxy = None
    if config.reward_model is not None:
        proxy = _load_reward_model(config, config.reward_model)
    prompts, responses = _sample_or_read(config, prompts, hashes)
    sides = [(config.policy_of(name), generation) for name, generation in responses.items()]
    scores = None if proxy is None else _proxy_scores(config, proxy, prompts, sides)
    del proxy
    if judge is None and form is not None:
        _write_form(config, form, prompts, responses)
    judge = judge or _judge(config, scores, prompts)
    models = {name: _measurements(config, name, responses, prompts, scores=scores, texts=texts) for name in responses}
    for name, measured in ({} if pairs is None else _pair_measurements(config, pairs)).items():
        models[name]["pairs"] = asdict(measured)
    warnings = _warnings_of_training(config, hashes)
    for name in [name for name in models if name != config.baseline]:
        compared = compare(
            prompts, responses[name].texts, responses[config.baseline].texts, judge,
            max_failed_share=config.max_failed_share,
        )  # fmt: skip
        models[name] |= _judgment_figures(compared)
        warnings += _position_warning(name, compared)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    results = {
        "judge": config.judge,
        "baseline": config.baseline,
        "prompts": len(prompts),
        "warnings": warnings,
        "models": models,
        "samples": _sample_rows(config, prompts, responses),
    }
    write_json(output / "results.json", results)
    return output / "results.json"


def _check_models(config: WinRateConfig) -> dict[str, str | None]:
    """Hash of every model's files by its name in the config; a missing model and a KL that there is not are refused."""
    choosers = {own.reward_model for own in config.best_of.values()}
    sources = [*config.models.values(), *filter(None, [config.reward_model]), *choosers]
    for source in sources:
        find_directory(source)
    others = [name for name in config.models if not _same_vocabulary(config, name, config.reference or config.baseline)]
    if others and config.reference is not None:
        raise UserError(
            f"reference: {config.reference} has another vocabulary than {', '.join(others)}, so there is no KL between "
            "them; leave `reference` out, or name a model with the same tokenizer"
        )
    if others:
        print(f"no KL from {config.baseline} for {', '.join(others)}: another vocabulary", file=sys.stderr)
    return parent_hashes(sources)


def _sample_or_read(
    config: WinRateConfig, prompts: list[Prompt], hashes: Mapping[str, str | None]
) -> tuple[list[Prompt], Responses]:
    """The prompts, under the names that their rows had when they were sampled, and every contestant's responses."""
    output, template = Path(config.output), config.chat_template
    source = {
        "prompts": hash_of([[prompt.prompt, prompt.tools] for prompt in prompts]),
        "models": {name: hashes[directory] for name, directory in config.models.items()},
        "best_of": {
            name: {**asdict(own), "reward_model": hashes[own.reward_model]} for name, own in config.best_of.items()
        },
        "chat_template": sha256(Path(template)) if template and Path(template).is_file() else template,
        "data.max_length": config.data.max_length,
        "weights": asdict(config.weights),
        **{key: getattr(config, key) for key in ("max_new_tokens", "temperature", "top_p", "seed")},
    }
    if stored := read_responses(output, source, by_people=config.judge == "verdicts"):
        return [replace(prompt, row_id=name) for prompt, name in zip(prompts, stored[0], strict=True)], stored[1]
    loaded = {own.reward_model: _load_reward_model(config, own.reward_model) for own in config.best_of.values()}
    own = load_tokenizer(config.models[config.baseline], template)
    print_tally("prompts", tokenize_prompts(prompts, own, config.data.max_length)[1])
    responses = {name: _generate(config, directory, prompts) for name, directory in config.models.items()}
    for name, best in config.best_of.items():
        responses[name] = _choose_best(config, best, loaded[best.reward_model], prompts)
    write_responses(output, prompts, responses, source)
    return prompts, responses


def _warnings_of_training(config: WinRateConfig, hashes: Mapping[str, str | None]) -> list[str]:
    """A warning that names the contestants that were trained against the judging reward model, or chosen by it."""
    judge = hashes[config.reward_model] if config.judge == "reward_model" and config.reward_model else None
    if judge is None:
        return []
    against = []
    for name in [*config.models, *config.best_of]:
        lineage = Path(config.policy_of(name)).expanduser().parent / "lineage.json"
        parents = read_json_object(lineage).get("parents") if lineage.is_file() else None
        chosen_by = hashes[config.best_of[name].reward_model] if name in config.best_of else None
        if judge == chosen_by or (isinstance(parents, dict) and judge in parents.values()):
            against.append(name)
    if not against:
        return []
    return [
        f"the judge {config.reward_model} is the reward model that {', '.join(against)} was trained against or chosen by: "
        "its verdicts show what it was optimized for, not what people prefer; judge with a reward model of other comparisons"
    ]


def _judgment_figures(result: JudgeResult) -> dict[str, Any]:
    """Figures of one comparison for `results.json`."""
    n, count = result.win_rate.n, result.inconsistent
    inconsistent, bias = (
        dict(zip(("low", "high"), interval, strict=True))
        for interval in (result.inconsistent_interval, result.position_bias_interval)
    )
    return {
        "win_rate": asdict(result.win_rate),
        "inconsistent": {"count": count, "rate": count / n, **inconsistent, "n": n},
        "position_bias": {"rate": result.position_bias, **bias, "n": n},
        "failures": result.failures,
    }


def _position_warning(name: str, result: JudgeResult) -> list[str]:
    """A warning where the judge prefers a position and not a response."""
    if not result.follows_position:
        return []
    low, high = result.position_bias_interval
    position, share = (
        ("first", result.position_bias) if result.position_bias > TIE else ("second", 1 - result.position_bias)
    )
    low, high = (low, high) if position == "first" else (1 - high, 1 - low)
    return [
        f"{name}: the judge prefers the response shown {position}, whichever it is: {share:.1%} [{low:.1%}, {high:.1%}] "
        f"where 50% is no bias, and its two orders contradict each other on {result.inconsistent} of "
        f"{result.win_rate.n} items, which decide nothing"
    ]


def _check_prompts(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that are not of the hotel data set, which the gold reward cannot score."""
    from alignment.hotel_world.grammar import is_prompt

    others = [prompt.row_id for prompt in prompts if not is_prompt(prompt.prompt)]
    if others:
        raise UserError(
            f"{others[0]}: judge=gold judges only prompts of the generated hotel world, and {len(others)} of "
            f"{len(prompts)} are none; take judge=reward_model with reward_model=DIR, or judge=verdicts with verdicts=FILE"
        )


def _gold_scores(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Any]:
    """The hotel data set's gold score of each response: four parts and their `total`."""
    from alignment.hotel_world.gold import score

    return [score(str(prompt.prompt), response) for prompt, response in zip(prompts, responses, strict=True)]


Scores = dict[tuple[int, str], float]  # (index of the prompt, response) -> the reward model's score


def _judge(config: WinRateConfig, scores: Scores | None, prompts: list[Prompt]) -> Judge:
    """The judge of a config that needs no people."""
    if config.judge == "gold":
        return score_judge(lambda p, r: [gold.total for gold in _gold_scores(p, r)], config.tie_margin)
    if config.judge == "longer" or scores is None:
        return longer_judge
    index = {id(prompt): i for i, prompt in enumerate(prompts)}
    return score_judge(
        lambda p, r: [scores[index[id(prompt)], text] for prompt, text in zip(p, r, strict=True)], config.tie_margin
    )


def _write_form(config: WinRateConfig, path: Path, prompts: list[Prompt], responses: Responses) -> NoReturn:
    """Write every comparison as a form for people, and end there."""
    baseline = responses[config.baseline].texts
    others = [generation.texts for name, generation in responses.items() if name != config.baseline]
    note_form(Path(config.output), path)
    write_annotation_form(
        path, prompts * len(others), [text for texts in others for text in texts], baseline * len(others)
    )
    raise FormWritten(
        f"{path}: a form for {len(prompts)} prompts: fill in `verdict`, 1, 0.5 or 0 for the first response"
    )


def _proxy_scores(
    config: WinRateConfig, model: RewardModel, prompts: Sequence[Prompt], sides: Sequence[tuple[str, Generation]]
) -> Scores:
    """The reward model's score of every distinct response; it sees as much of a prompt as the policies saw.

    Where its tokenizer is the policy's it reads the sampled ids, else the text, without an end token if the response was
    cut off. An encoder reads prompt and response as a pair of texts.

    Args:
        sides: (policy, one response to each prompt), each.
    """
    model.model.to(best_device())
    if isinstance(model.model, SequenceClassifier):
        pairs = list(dict.fromkeys((i, text) for _, generation in sides for i, text in enumerate(generation.texts)))
        scores = model.score([(prompts[i].prompt, text) for i, text in pairs])
        return dict(zip(pairs, scores.tolist(), strict=True))
    ids = _prompt_ids(config, model.tokenizer, prompts)
    sequences: dict[tuple[int, str], list[int]] = {}
    for source, generation in sides:
        same_ids = model.shares_token_ids(load_tokenizer(source, config.chat_template))
        for i, (text, sampled, ended) in enumerate(
            zip(generation.texts, generation.token_ids, generation.ended, strict=True)
        ):
            read = sampled if same_ids else response_ids(model.tokenizer, text, prompts[i].prompt, ended=ended)
            sequences.setdefault((i, text), [*ids[i], *read])
    return dict(zip(sequences, model.score_ids(list(sequences.values())).tolist(), strict=True))


def _load(config: WinRateConfig, source: str) -> Any:
    return load_model(source, config.weights.dtype, best_device(), quantize=config.weights.quantize)


def _load_reward_model(config: WinRateConfig, source: str) -> RewardModel:
    return load_reward_model(source, config.weights.dtype, quantize=config.weights.quantize)


def _choose_best(
    config: WinRateConfig, own: BestOfConfig, chooser: RewardModel, prompts: Sequence[Prompt]
) -> Generation:
    """For each prompt the one of n responses that a reward model scores highest; no draw is one of the policy's own response."""
    n, source = own.samples, config.models[own.policy]
    drawn = _generate(config, source, [prompt for prompt in prompts for _ in range(n)], first_row=len(prompts))
    scores = _proxy_scores(
        config, chooser, prompts, [(source, _at(drawn, range(k, len(drawn.texts), n))) for k in range(n)]
    )
    chooser.model.to("cpu")
    groups = [range(i * n, (i + 1) * n) for i in range(len(prompts))]
    return _at(drawn, [max(group, key=lambda row: scores[i, drawn.texts[row]]) for i, group in enumerate(groups)])


def _at(drawn: Generation, rows: Sequence[int]) -> Generation:
    """The responses at these rows."""
    return Generation(*([column[row] for row in rows] for column in vars(drawn).values()))


def _generate(config: WinRateConfig, source: str, prompts: list[Prompt], first_row: int = 0) -> Generation:
    """One model's responses, drawn as rows `first_row` on. The model is loaded for this call only."""
    model, tokenizer = _load(config, source), load_tokenizer(source, config.chat_template)
    sampling = SamplingConfig(config.max_new_tokens, config.temperature, top_p=config.top_p, seed=config.seed)
    stop_ids = sorted(stop_token_ids(tokenizer))
    ids = _prompt_ids(config, tokenizer, prompts)
    lengths = [(prompt.row_id, len(tokens)) for prompt, tokens in zip(prompts, ids, strict=True)]
    check_lengths(
        model, lengths, "lower max_new_tokens or shorten the prompts (data.max_length)", config.max_new_tokens
    )
    rows = range(first_row, first_row + len(ids))
    sampled = decode_responses(model, ids, sampling, stop_ids, rows=rows, batch_size=config.batch_size)
    texts = [
        response_text(tokenizer, tokens, ended) for tokens, ended in zip(sampled.token_ids, sampled.ended, strict=True)
    ]
    return Generation(texts, sampled.token_ids, sampled.log_probs, sampled.ended)


def _prompt_ids(config: WinRateConfig, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of prompts, truncated to `data.max_length`; equal for policies, reference and judge."""
    return [example.ids for example in tokenize_prompts(prompts, tokenizer, config.data.max_length)[0]]


def _measurements(
    config: WinRateConfig,
    name: str,
    responses: Responses,
    prompts: list[Prompt],
    *,
    scores: Scores | None,
    texts: Sequence[Text] | None,
) -> dict[str, Any]:
    """Measurements of one model that need no judge: gold parts, proxy score, KL from the reference, text loss, lengths.

    `gold_interval` is that of the total.
    """
    generation, reference = responses[name], config.reference or config.baseline
    result: dict[str, Any] = {
        "response_tokens": sum(map(len, generation.token_ids)) / len(prompts),
        "ended_share": sum(generation.ended) / len(prompts),
    }
    if config.judge == "gold":
        golds = _gold_scores(prompts, generation.texts)
        parts = ("helpful", "honest", "harmless", "brief", "total")
        result["gold"] = {part: sum(getattr(gold, part) for gold in golds) / len(golds) for part in parts}
        result["gold_interval"] = mean_interval([gold.total for gold in golds])
    if scores is not None:
        proxies = [scores[i, text] for i, text in enumerate(generation.texts)]
        result["proxy"], result["proxy_interval"] = sum(proxies) / len(prompts), mean_interval(proxies)
    as_it_is = config.temperature == 1 and config.top_p == 1
    if name in config.best_of:
        if as_it_is and config.best_of[name].policy == reference:
            result["kl"] = kl_bound(config.best_of[name].samples)
        return result
    if name != reference and as_it_is and _same_vocabulary(config, name, reference):
        ratios = _log_ratios(config, reference, generation, prompts)
        result["kl"], result["kl_interval"] = fmean(ratios), mean_interval(ratios)
    if texts is not None and config.text is not None:
        source = config.models[name]
        examples, _ = tokenize_texts(texts, load_tokenizer(source), config.text.max_length)
        size = sum(len(row.text.encode()) for row in texts)
        loss = language_loss(_load(config, source), collate(examples, 16_384), text_bytes=size)
        result["language_loss"], result["bits_per_byte"] = loss.loss, loss.bits_per_byte
    return result


def _same_vocabulary(config: WinRateConfig, name: str, reference: str) -> bool:
    """Whether two models share a vocabulary, so that one gives log-probabilities of the other's tokens."""
    return same_vocabulary(*(load_tokenizer(config.models[model]) for model in (name, reference)))


@torch.no_grad()
def _log_ratios(config: WinRateConfig, reference: str, generation: Generation, prompts: list[Prompt]) -> list[float]:
    """log p - log p_ref of each whole response, nats; the mean over the model's own samples is the KL from the reference."""
    source = config.models[reference]
    model, tokenizer = _load(config, source), load_tokenizer(source, config.chat_template)
    ids = _prompt_ids(config, tokenizer, prompts)
    found = torch.tensor([sum(values) for values in generation.log_probs], dtype=torch.float64)
    for group in group_by_length([len(p) + len(r) for p, r in zip(ids, generation.token_ids, strict=True)], 16_384):
        sequences = [[*ids[i], *generation.token_ids[i]] for i in group]
        masks = [[False] * len(ids[i]) + [True] * len(generation.token_ids[i]) for i in group]
        batch = Ragged.build(sequences, masks)
        log_probs = model(batch=batch.to(best_device())).log_probs.double().cpu()
        found.index_add_(0, torch.tensor(group)[batch.target_rows], -log_probs)
    return found.tolist()


def _pair_measurements(config: WinRateConfig, rows: Sequence[Comparison]) -> dict[str, PairLogProbs]:
    """Log-probabilities of held-out pairs by model, for those with the reference's vocabulary."""
    reference = config.reference or config.baseline
    assert config.comparisons is not None
    tokenizer = load_tokenizer(config.models[reference], config.chat_template)
    pairs, tally = tokenize_comparisons(rows, tokenizer, config.comparisons.max_length)
    print_tally("comparisons", tally)
    names = [name for name in config.models if _same_vocabulary(config, name, reference)]
    found = {name: pair_log_probs(_load(config, config.models[name]), pairs) for name in names}
    return {name: compare_pairs(values, found[reference]) for name, values in found.items()}


def _sample_rows(config: WinRateConfig, prompts: list[Prompt], responses: Responses) -> list[dict[str, Any]]:
    """Some prompts with every model's response, and the gold score where the judge is gold."""
    count = min(config.samples, len(prompts))
    rows = [{"prompt": str(prompt.prompt), "responses": {}} for prompt in prompts[:count]]
    for name, generation in responses.items():
        texts = generation.texts[:count]
        golds = (
            [gold.total for gold in _gold_scores(prompts[:count], texts)] if config.judge == "gold" else [None] * count
        )
        for row, text, gold in zip(rows, texts, golds, strict=True):
            row["responses"][name] = {"text": text, "score": gold}
    return rows
