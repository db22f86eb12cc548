"""Win rates of models against a baseline (`alignment evaluate winrate`): sample their responses, measure them, judge them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval

from alignment.data.config import DataConfig
from alignment.data.rows.records import Comparison, Prompt, Text
from alignment.data.tokenize import tokenize_comparisons
from alignment.errors import UserError
from alignment.evaluation.inputs import check_hotel_prompts, print_tally, read_records
from alignment.evaluation.judges import (
    Judge,
    JudgeResult,
    compare,
    file_judge,
    longer_judge,
    score_judge,
    write_annotation_form,
)
from alignment.evaluation.language_loss import add_log_probs, compare_pairs, loss_on_rows, pair_log_probs
from alignment.evaluation.responses import (
    Responses,
    Scored,
    note_form,
    prompt_tokens,
    read_responses,
    sample_responses,
    score_responses,
    write_responses,
)
from alignment.evaluation.winrate import TIE, mean_interval
from alignment.files import hash_of, read_json_object, sha256, write_json
from alignment.generation import Generation, SamplingConfig
from alignment.loading import best_device, find_directory, load_model, load_tokenizer, same_vocabulary
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import RewardModel, load_reward_model
from alignment.rewards.selection import kl_bound
from alignment.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Rule, Settings, Share
from alignment.training.run.lineage import parent_hashes

GOLD_PARTS = ("helpful", "honest", "harmless", "brief", "total")


@dataclass(frozen=True)
class BestOfConfig(Settings):
    """A policy's best of n as one more contestant: of its n responses to each prompt the one that a reward model scores highest.

    Attributes:
        policy: name among `models`.
        reward_model: directory of the reward model that chooses; of equal scores the first response is taken.
        samples: n, at least 2: the best of one is the policy itself.
    """

    policy: str
    reward_model: str
    samples: Annotated[int, Interval(ge=2)] = 16


@dataclass(frozen=True)
class WinRateConfig(Settings):
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
    tie_margin: NonNegativeFloat = 0.0
    max_failed_share: Share = 0.1
    max_new_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    batch_size: PositiveInt = 256
    seed: NonNegativeInt = 0
    samples: NonNegativeInt = 8
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    RULES = (
        Rule("baseline", lambda c: c.baseline not in c.models, "{self.baseline!r} is not among the models"),
        Rule("reference", lambda c: c.measured_from not in c.models, "{self.reference!r} is not among the models"),
        Rule("best_of", lambda c: [name for name in c.best_of if name in c.models],
             "has names of models too, {found}; take others"),
        Rule("best_of", lambda c: [own.policy for own in c.best_of.values() if own.policy not in c.models],
             "names policies that are not among the models: {found}"),
        Rule("best_of", lambda c: c.best_of and c.temperature == 0,
             "needs a temperature above 0: the n responses to a prompt would all be the same"),
        Rule("judge", lambda c: c.judge is None,
             "is missing; say who judges: judge=reward_model with reward_model=DIR (one that no policy was trained against), "
             "judge=verdicts with verdicts=FILE (filled in by people), or judge=longer (the longer response wins); "
             "judge=gold is for prompts of the generated hotel world alone"),
        Rule("reward_model", lambda c: c.judge == "reward_model" and c.reward_model is None,
             "must be a directory, the judge's"),
        Rule("verdicts", lambda c: c.judge == "verdicts" and c.verdicts is None, "must be a file, of the verdicts"),
    )  # fmt: skip

    @property
    def measured_from(self) -> str:
        """The name of the model that KL and log-probabilities are measured from."""
        return self.baseline if self.reference is None else self.reference

    def policy_of(self, name: str) -> str:
        """Directory or Hub name of the model whose responses a contestant gives."""
        return self.models[self.best_of[name].policy if name in self.best_of else name]


class FormWritten(UserError):
    """A form for people's verdicts was written: the evaluation goes on when it is filled in."""


def run(config: WinRateConfig) -> Path:
    """Judge every model's responses against the baseline's, and write `results.json`.

    The responses are sampled, or read from an earlier start in the same directory, see responses.py.
    """
    prompts: list[Prompt] = read_records(config.data, "prompts")
    if config.judge == "gold":
        advice = "; take judge=reward_model with reward_model=DIR, or judge=verdicts with verdicts=FILE"
        check_hotel_prompts(prompts, "judge=gold", advice)
    form = Path(config.verdicts) if config.judge == "verdicts" and config.verdicts else None
    judge = file_judge(form) if form is not None and form.exists() else None
    texts = None if config.text is None else read_records(config.text, "text")
    pairs = None if config.comparisons is None else read_records(config.comparisons, "comparisons")
    hashes = check_models(config)
    # Loaded on the CPU first: a wrong checkpoint is reported early, and the GPU holds one model at a time.
    proxy = None if config.reward_model is None else _load_reward_model(config, config.reward_model)

    prompts, responses = sample_or_read(config, prompts, hashes)
    sides = [(config.policy_of(name), generation) for name, generation in responses.items()]
    scores = None if proxy is None else proxy_scores(config, proxy, prompts, sides)
    del proxy
    if form is not None and judge is None:
        write_form(config, form, prompts, responses)
    models = {
        name: measure_responses(config, name, responses, prompts, scores=scores, texts=texts) for name in responses
    }
    for name, measured in ({} if pairs is None else pair_measurements(config, pairs)).items():
        models[name]["pairs"] = measured
    judge, warnings = judge or _judge(config, scores, prompts), trained_against(config, hashes)
    for name in [name for name in models if name != config.baseline]:
        ours, theirs = responses[name].texts, responses[config.baseline].texts
        compared = compare(prompts, ours, theirs, judge, max_failed_share=config.max_failed_share)
        models[name] |= _judgment_figures(compared)
        warnings += position_warnings(name, compared)

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
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"


def check_models(config: WinRateConfig) -> dict[str, str | None]:
    """Hash of every model's files by its name in the config; a missing model and a KL that there is not are refused."""
    choosers = {own.reward_model for own in config.best_of.values()}
    sources = [*config.models.values(), *filter(None, [config.reward_model]), *choosers]
    for source in sources:
        find_directory(source)
    others = [name for name in config.models if not _shares_vocabulary(config, name)]
    if others and config.reference is not None:
        raise UserError(
            f"reference: {config.reference} has another vocabulary than {', '.join(others)}, so there is no KL between "
            "them; leave `reference` out, or name a model with the same tokenizer"
        )
    if others:
        print(f"no KL from {config.baseline} for {', '.join(others)}: another vocabulary", file=sys.stderr)
    return parent_hashes(sources)


def _shares_vocabulary(config: WinRateConfig, name: str) -> bool:
    """True where a model and the reference give log-probabilities of each other's tokens."""
    return same_vocabulary(*(load_tokenizer(config.models[model]) for model in (name, config.measured_from)))


def _load_reward_model(config: WinRateConfig, source: str) -> RewardModel:
    return load_reward_model(source, config.weights.dtype, quantize=config.weights.quantize)


# 1. The responses


def sample_or_read(
    config: WinRateConfig, prompts: list[Prompt], hashes: Mapping[str, str | None]
) -> tuple[list[Prompt], Responses]:
    """The prompts, under their rows' names when they were sampled, and every contestant's responses."""
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
    choosers = {own.reward_model: _load_reward_model(config, own.reward_model) for own in config.best_of.values()}
    responses = {name: _sample(config, name, prompts) for name in config.models}
    for name, own in config.best_of.items():
        responses[name] = _best_of(config, own, choosers[own.reward_model], prompts)
    write_responses(output, prompts, responses, source)
    return prompts, responses


def _sample(config: WinRateConfig, name: str, prompts: Sequence[Prompt], first_row: int = 0) -> Generation:
    """One model's responses, drawn as rows `first_row` on."""
    [found] = sample_responses(
        config.models[name],
        prompts,
        [SamplingConfig(config.max_new_tokens, config.temperature, top_p=config.top_p, seed=config.seed)],
        max_length=config.data.max_length,
        weights=config.weights,
        chat_template=config.chat_template,
        batch_size=config.batch_size,
        first_row=first_row,
        counts_of="prompts" if name == config.baseline and not first_row else "",
    )
    return found


def _best_of(config: WinRateConfig, own: BestOfConfig, chooser: RewardModel, prompts: Sequence[Prompt]) -> Generation:
    """For each prompt the one of n responses that a reward model scores highest; no draw is one of the policy's own response."""
    n, source = own.samples, config.models[own.policy]
    drawn = _sample(config, own.policy, [prompt for prompt in prompts for _ in range(n)], first_row=len(prompts))
    draws = [(source, _rows(drawn, range(k, len(drawn.texts), n))) for k in range(n)]
    scores = proxy_scores(config, chooser, prompts, draws)
    chooser.model.to("cpu")
    groups = [range(i * n, (i + 1) * n) for i in range(len(prompts))]
    return _rows(drawn, [max(group, key=lambda row: scores[i, drawn.texts[row]]) for i, group in enumerate(groups)])


def _rows(drawn: Generation, rows: Sequence[int]) -> Generation:
    """The responses at these rows."""
    return Generation(*([column[row] for row in rows] for column in vars(drawn).values()))


# 2. Measurements that need no judge

Scores = dict[tuple[int, str], float]  # (index of the prompt, response) -> the reward model's score


def proxy_scores(
    config: WinRateConfig, model: RewardModel, prompts: Sequence[Prompt], sides: Sequence[tuple[str, Generation]]
) -> Scores:
    """The score of every distinct response of each (policy, responses): of the sampled ids where the tokenizers are the same."""
    model.model.to(best_device())
    distinct: dict[tuple[int, str], Scored] = {}
    for source, own in sides:
        shared = not model.is_encoder and model.shares_token_ids(load_tokenizer(source, config.chat_template))
        for i, (text, ids, ended) in enumerate(zip(own.texts, own.token_ids, own.ended, strict=True)):
            distinct.setdefault((i, text), (i, text, ids if shared else None, ended))
    scores = score_responses(model, prompts, list(distinct.values()), config.data.max_length)
    return dict(zip(distinct, scores, strict=True))


def gold_scores(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Any]:
    """The hotel data set's gold score of each response: four parts and their `total`."""
    from alignment.hotel_world.gold import score

    return [score(str(prompt.prompt), response) for prompt, response in zip(prompts, responses, strict=True)]


def measure_responses(
    config: WinRateConfig,
    name: str,
    responses: Responses,
    prompts: list[Prompt],
    *,
    scores: Scores | None,
    texts: Sequence[Text] | None,
) -> dict[str, Any]:
    """Lengths, gold parts, proxy score, KL from the reference and text loss of a contestant, with intervals of means."""
    generation, count = responses[name], len(prompts)
    result: dict[str, Any] = {
        "response_tokens": sum(map(len, generation.token_ids)) / count, "ended_share": sum(generation.ended) / count
    }  # fmt: skip
    if config.judge == "gold":
        golds = gold_scores(prompts, generation.texts)
        result["gold"] = {part: sum(getattr(gold, part) for gold in golds) / len(golds) for part in GOLD_PARTS}
        result["gold_interval"] = mean_interval([gold.total for gold in golds])
    if scores is not None:
        proxies = [scores[i, text] for i, text in enumerate(generation.texts)]
        result["proxy"], result["proxy_interval"] = sum(proxies) / count, mean_interval(proxies)
    as_it_is = config.temperature == 1 and config.top_p == 1
    if name in config.best_of:
        bound = as_it_is and config.best_of[name].policy == config.measured_from
        return result | ({"kl": kl_bound(config.best_of[name].samples)} if bound else {})
    if name != config.measured_from and as_it_is and _shares_vocabulary(config, name):
        ratios = log_ratios(config, generation, prompts)
        result["kl"], result["kl_interval"] = fmean(ratios), mean_interval(ratios)
    if texts is not None and config.text is not None:
        loss = loss_on_rows(config.models[name], texts, config.text.max_length, config.weights)
        result["language_loss"], result["bits_per_byte"] = loss.loss, loss.bits_per_byte
    return result


def log_ratios(config: WinRateConfig, generation: Generation, prompts: list[Prompt]) -> list[float]:
    """log p - log p_ref of each whole response, nats; the mean over the model's own samples is the KL from the reference."""
    source, responses = config.models[config.measured_from], generation.token_ids
    heads = prompt_tokens(load_tokenizer(source, config.chat_template), prompts, config.data.max_length)
    documents = [[*head, *response] for head, response in zip(heads, responses, strict=True)]
    masks = [[False] * len(head) + [True] * len(own) for head, own in zip(heads, responses, strict=True)]
    own = torch.tensor([sum(values) for values in generation.log_probs], dtype=torch.float64)
    return (-add_log_probs(_load(config, config.measured_from), documents, masks, -own)).tolist()


def pair_measurements(config: WinRateConfig, rows: Sequence[Comparison]) -> dict[str, dict[str, float]]:
    """Log-probabilities of held-out pairs by model, for those with the reference's vocabulary."""
    assert config.comparisons is not None
    tokenizer = load_tokenizer(config.models[config.measured_from], config.chat_template)
    pairs, tally = tokenize_comparisons(rows, tokenizer, config.comparisons.max_length)
    print_tally("comparisons", tally)
    names = [name for name in config.models if _shares_vocabulary(config, name)]
    found = {name: pair_log_probs(_load(config, name), pairs) for name in names}
    return {name: compare_pairs(values, found[config.measured_from]) for name, values in found.items()}


def _load(config: WinRateConfig, name: str) -> Any:
    return load_model(config.models[name], config.weights.dtype, best_device(), quantize=config.weights.quantize)


# 3. The judge


def _judge(config: WinRateConfig, scores: Scores | None, prompts: list[Prompt]) -> Judge:
    """The judge of a config that needs no people."""
    if config.judge == "gold":
        return score_judge(lambda p, r: [gold.total for gold in gold_scores(p, r)], config.tie_margin)
    if config.judge == "longer" or scores is None:
        return longer_judge
    index = {id(prompt): i for i, prompt in enumerate(prompts)}
    return score_judge(
        lambda p, r: [scores[index[id(prompt)], text] for prompt, text in zip(p, r, strict=True)], config.tie_margin
    )


def write_form(config: WinRateConfig, path: Path, prompts: list[Prompt], responses: Responses) -> None:
    """Write every comparison as a form for people, and end there by raising `FormWritten`."""
    others = [text for name, own in responses.items() if name != config.baseline for text in own.texts]
    contests = len(responses) - 1
    note_form(Path(config.output), path)
    write_annotation_form(path, prompts * contests, others, responses[config.baseline].texts * contests)
    raise FormWritten(
        f"{path}: a form for {len(prompts)} prompts: fill in `verdict`, 1, 0.5 or 0 for the first response"
    )


def _judgment_figures(result: JudgeResult) -> dict[str, Any]:
    """Figures of one comparison for `results.json`."""
    n, count = result.win_rate.n, result.inconsistent

    def share(rate: float, interval: tuple[float, float]) -> dict[str, float]:
        return {"rate": rate, "low": interval[0], "high": interval[1], "n": n}

    return {
        "win_rate": asdict(result.win_rate),
        "inconsistent": {"count": count, **share(count / n, result.inconsistent_interval)},
        "position_bias": share(result.position_bias, result.position_bias_interval),
        "failures": result.failures,
    }


def position_warnings(name: str, result: JudgeResult) -> list[str]:
    """A warning where the judge prefers a position and not a response."""
    share, (low, high) = result.position_bias, result.position_bias_interval
    if low <= TIE <= high:
        return []
    return [
        f"{name}: the judge prefers the response shown {'first' if share > TIE else 'second'}, whichever it is: the first in "
        f"{share:.1%} [{low:.1%}, {high:.1%}] where 50% is no bias, and its two orders contradict each other on "
        f"{result.inconsistent} of {result.win_rate.n} items, which decide nothing"
    ]


def trained_against(config: WinRateConfig, hashes: Mapping[str, str | None]) -> list[str]:
    """A warning that names the contestants that were trained against the judging reward model, or chosen by it."""
    judge = hashes[config.reward_model] if config.judge == "reward_model" and config.reward_model else None
    against = []
    for name in [*config.models, *config.best_of]:
        lineage = Path(config.policy_of(name)).expanduser().parent / "lineage.json"
        optimized = list(read_json_object(lineage)["parents"].values()) if lineage.is_file() else []
        optimized += [hashes[config.best_of[name].reward_model]] if name in config.best_of else []
        against += [name] if judge in optimized else []
    if judge is None or not against:
        return []
    return [
        f"the judge {config.reward_model} is the reward model that {', '.join(against)} was trained against or chosen by: "
        "its verdicts show what it was optimized for, not what people prefer; judge with a reward model of other comparisons"
    ]


def _sample_rows(config: WinRateConfig, prompts: list[Prompt], responses: Responses) -> list[dict[str, Any]]:
    """Some prompts with every model's response, and the gold score where the judge is gold."""

    def shown(i: int, text: str) -> dict[str, Any]:
        return {"text": text, "score": gold_scores([prompts[i]], [text])[0].total if config.judge == "gold" else None}

    return [
        {"prompt": str(prompt.prompt), "responses": {name: shown(i, own.texts[i]) for name, own in responses.items()}}
        for i, prompt in enumerate(prompts[: config.samples])
    ]
