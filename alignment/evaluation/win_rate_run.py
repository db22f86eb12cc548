"""Win rates of models against a baseline (`alignment evaluate winrate`): sample, measure and judge their responses."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch

from alignment.data.rows.records import Comparison, Prompt, Text
from alignment.errors import UserError
from alignment.evaluation.language_loss import compare_pairs, loss_on_rows, masked_log_probs, pair_log_probs
from alignment.files import write_figures
from alignment.generation import Generation
from alignment.judging.config import BestOfConfig, WinRateConfig
from alignment.judging.faults import (
    comparison_figures,
    judgment_figures,
    judgment_warnings,
    parent_warnings,
    rate_over_seeds,
)
from alignment.judging.inputs import check_hotel_prompts, print_tally, read_records
from alignment.judging.judges import build_judge, compare, gold_scores, score_judge
from alignment.judging.logged_judge import LoggedJudge
from alignment.judging.people_judge import PeopleJudge, corrected_by_people, write_annotation_form
from alignment.judging.responses import Responses, ResponseScorer, note_form, sample_or_read
from alignment.loading import (
    Checkpoint,
    find_directory,
    load_on_best_device,
    load_tokenizer,
    preparation_for,
    same_vocabulary,
)
from alignment.models.outputs import check_numbers
from alignment.rewards.selection import kl_bound
from alignment.statistics.agreement import Figures
from alignment.statistics.corrected import MIN_LABELS
from alignment.statistics.winrate import holm, mean_interval
from alignment.training.loop import ENDED
from alignment.training.run.directory import locked
from alignment.training.run.lineage import parent_hashes

__all__ = ["BestOfConfig", "FormWritten", "WinRateConfig", "run"]

GOLD_PARTS = ("helpful", "honest", "harmless", "brief", "total")


class FormWritten(UserError):
    """A form for people's verdicts was written: the evaluation goes on when it is filled in."""


@locked
def run(config: WinRateConfig) -> Path:
    """Judge every contestant's responses against the baseline's, and write `results.json`.

    Three steps, each kept on disk and read again by the next start in the same directory: the responses (responses.py),
    the judgments (judges.py), the results.
    """
    plan = config
    config = plan.by_checkpoint()
    prompts: list[Prompt] = read_records(config.data, "prompts")
    if config.judge == "gold":
        check_hotel_prompts(
            prompts,
            "judge=gold",
            "; take judge=reward_model with reward_model=DIR, or judge=verdicts with verdicts=FILE",
        )
    form = Path(config.verdicts) if config.judge == "verdicts" and config.verdicts else None
    texts = None if config.text is None else read_records(config.text, "text")
    pairs = None if config.comparisons is None else read_records(config.comparisons, "comparisons")
    hashes = check_models(config)
    # Loaded on the CPU first: a wrong checkpoint is reported early, and the GPU holds one model at a time.
    scorers = {
        source: ResponseScorer(source, config.weights, config.data.max_length) for source in config.scoring_models
    }
    is_new = form is not None and not form.exists()
    judge = None if is_new else build_judge(config, Path(config.output), scorers=scorers, hashes=hashes)

    prompts, responses = sample_or_read(config, prompts, hashes)
    if judge is None:
        write_form(plan, Path(str(form)), prompts, responses)
    sides = [(config.policy_of(name), generation) for name, generation in responses.items()]
    for source in config.scoring_models:
        scorers[source].add(prompts, sides, config.chat_template)
    proxy = None if config.reward_model is None else scorers[config.reward_model]
    log_probs = {} if pairs is None else log_probs_of_pairs(config, pairs)
    models = {}
    for name in plan.contestants:
        measured = [
            measure_responses(meeting, model, responses, prompts, scorer=proxy, texts=texts, log_probs=log_probs)
            for model, meeting in seed_rounds(plan, name)
        ]
        models[name] = measured[0] if len(measured) == 1 else means_over_seeds(measured) | {"seeds": measured}
    judging, warnings = judge_responses(plan, prompts, responses, judge, scorers)
    warnings = [*parent_warnings(config, hashes), *cut_warnings(config, models), *warnings]
    for name, figures in judging["models"].items():
        models[name] |= figures

    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    results = {
        "judge": config.judge,
        "judging": judging["calls"],
        "baseline": config.baseline,
        "prompts": len(prompts),
        "warnings": warnings,
        "models": models,
        "samples": _sample_rows(plan, prompts, responses),
    }
    return write_figures(Path(config.output) / "results.json", results)


def seed_rounds(plan: WinRateConfig, name: str) -> list[tuple[str, WinRateConfig]]:
    """Names of a contestant's checkpoints, each with the comparison in which it meets the baseline's checkpoint."""
    models = plan.names_of(name)
    count = max(len(models), len(plan.names_of(plan.baseline)))
    return [(models[seed % len(models)], plan.by_checkpoint(seed)) for seed in range(count)]


def check_models(config: WinRateConfig) -> dict[str, str | None]:
    """Hash of every model's files by its name in the config; a missing model and a KL that there is not are refused."""
    choosers = [settings.reward_model for settings in config.best_of.values()]
    sources = [*map(config.checkpoint, config.models), *config.scoring_models, *config.judging_models, *choosers]
    for source in sources:
        find_directory(source)
    files = [*config.response_files.values(), *filter(None, [config.labels])]
    if absent := [path for path in files if not Path(path).is_file()]:
        raise UserError(f"response_files, labels: {', '.join(absent)}: no such file")
    measured = config.models if config.measured_from is not None else {}
    others = [name for name in measured if not _shares_vocabulary(config, name)]
    if others and config.reference is not None:
        raise UserError(
            f"reference: {config.reference} has another vocabulary than {', '.join(others)}, so there is no KL between "
            "them; leave `reference` out, or name a model with the same tokenizer"
        )
    if others:
        print(f"no KL from {config.measured_from} for {', '.join(others)}: another vocabulary", file=sys.stderr)
    return parent_hashes(sources)


def _shares_vocabulary(config: WinRateConfig, name: str) -> bool:
    """True where a model and the reference give log-probabilities of each other's tokens."""
    return same_vocabulary(*(load_tokenizer(config.checkpoint(model)) for model in (name, str(config.measured_from))))


# 2. Measurements that need no judge


def measure_responses(
    config: WinRateConfig,
    name: str,
    responses: Responses,
    prompts: list[Prompt],
    *,
    scorer: ResponseScorer | None,
    texts: Sequence[Text] | None,
    log_probs: Mapping[str, torch.Tensor],
) -> Figures:
    """A contestant's lengths, gold parts, proxy score, KL from the reference and text loss, with intervals of means."""
    generation = responses[name]
    count = len(prompts)
    clusters = [str(prompt.prompt) for prompt in prompts]
    result: Figures = {"response_characters": sum(map(len, generation.texts)) / count}
    if config.policy_of(name) is not None:
        result["response_tokens"] = sum(map(len, generation.token_ids)) / count
        result["ended_share"] = sum(generation.ended) / count
    if config.judge == "gold":
        golds = gold_scores(prompts, generation.texts)
        result["gold"] = {part: sum(getattr(gold, part) for gold in golds) / len(golds) for part in GOLD_PARTS}
        result["gold_interval"] = mean_interval([gold.total for gold in golds], clusters)
    if scorer is not None:
        proxies = scorer(prompts, generation.texts)
        result["proxy"] = sum(proxies) / count
        result["proxy_interval"] = mean_interval(proxies, clusters)
    as_it_is = config.temperature == 1 and config.top_p == 1 and config.measured_from is not None
    if config.policy_of(name) is None:
        return result
    if name in config.best_of:
        bound = as_it_is and config.best_of[name].policy == config.measured_from
        return result | ({"kl": kl_bound(config.best_of[name].samples)} if bound else {})
    if name != config.measured_from and as_it_is and _shares_vocabulary(config, name):
        ratios = log_ratios(config, generation, prompts)
        result["kl"] = fmean(ratios)
        result["kl_interval"] = mean_interval(ratios, clusters)
    if texts is not None and config.text is not None:
        loss = loss_on_rows(config.checkpoint(name), texts, config.text.max_length, config.weights)
        result["language_loss"] = loss.loss
        result["bits_per_byte"] = loss.bits_per_byte
    if name in log_probs:
        result["pairs"] = compare_pairs(log_probs[name], log_probs[str(config.measured_from)])
    return result


def means_over_seeds(seeds: Sequence[Mapping[str, object]]) -> Figures:
    """Means over the seeds of the numbers that all have; intervals, which are over prompts alone, are left out."""
    means: Figures = {}
    for key, value in seeds[0].items():
        values: list[Any] = [figures[key] for figures in seeds if key in figures]
        if isinstance(value, dict):
            means[key] = means_over_seeds(values)
        elif isinstance(value, int | float) and len(values) == len(seeds):
            means[key] = fmean(values)
    return means


def cut_warnings(config: WinRateConfig, models: Mapping[str, Mapping[str, float]]) -> list[str]:
    """In words: contestants many of whose responses were cut at `max_new_tokens`, so that beginnings are judged."""
    return [
        f"{name}: {1 - figures['ended_share']:.0%} of the responses are cut at max_new_tokens={config.max_new_tokens} "
        "and judged so; raise it"
        for name, figures in models.items()
        if figures.get("ended_share", 1) < ENDED
    ]


def log_ratios(config: WinRateConfig, generation: Generation, prompts: list[Prompt]) -> list[float]:
    """log p - log p_ref per whole response, nats; its mean over the model's own samples is KL from the reference."""
    source = Checkpoint(config.checkpoint(str(config.measured_from)))
    responses = generation.token_ids
    tokenizer = load_tokenizer(source, config.chat_template)
    tokenize = preparation_for(source, "prompts").tokenize
    heads = [example.ids for example in tokenize(prompts, tokenizer, config.data.max_length)[0]]
    documents = [[*head, *response] for head, response in zip(heads, responses, strict=True)]
    masks = [[False] * len(head) + [True] * len(response) for head, response in zip(heads, responses, strict=True)]
    policy_log_probs = torch.tensor([sum(values) for values in generation.log_probs], dtype=torch.float64)
    ratios = policy_log_probs - masked_log_probs(load_on_best_device(source, config.weights), documents, masks)
    check_numbers(ratios, lambda i: prompts[i].row_id, f"the log-probability by {source.source}")
    return ratios.tolist()


def log_probs_of_pairs(config: WinRateConfig, rows: Sequence[Comparison]) -> dict[str, torch.Tensor]:
    """Log-probabilities of held-out pairs by model, [n, 2], for those with the reference's vocabulary."""
    assert config.comparisons is not None
    source = Checkpoint(config.checkpoint(str(config.measured_from)))
    tokenizer = load_tokenizer(source, config.chat_template)
    tokenize = preparation_for(source, "comparisons").tokenize
    pairs, tally = tokenize(list(rows), tokenizer, config.comparisons.max_length)
    print_tally("comparisons", tally)
    sources = {name: config.checkpoint(name) for name in config.models if _shares_vocabulary(config, name)}
    return {name: pair_log_probs(load_on_best_device(one, config.weights), pairs) for name, one in sources.items()}


# 3. The judgments


def judge_responses(
    config: WinRateConfig,
    prompts: list[Prompt],
    responses: Responses,
    judge: LoggedJudge | PeopleJudge,
    scorers: Mapping[str, ResponseScorer],
) -> tuple[Figures, list[str]]:
    """Figures of every contestant against the baseline and of the judge's calls, and warnings of the judge's faults."""
    figures: dict[str, Figures] = {}
    warnings: list[str] = []
    for name in [name for name in config.contestants if name != config.baseline]:
        pairs, models = paired_responses(config, [name], prompts, responses)
        compared = compare(*pairs, judge, max_failed_share=config.max_failed_share, models=models)
        figures[name] = judgment_figures(compared) | comparison_figures(*pairs, compared)
        figures[name]["win_rate"] = rate_over_seeds(compared, prompts)
        if config.labels is not None:
            corrected = corrected_by_people(Path(config.labels), *pairs, compared.verdicts)
            figures[name]["by_people"] = corrected
            few = (
                f"{name}: fewer than {MIN_LABELS} labels in {config.labels} are on these responses, or of fewer prompts"
            )
            warnings += [] if corrected else [f"{few}: no corrected rate"]
        warnings += judgment_warnings(config, name, compared)
        if config.reward_models:
            members = {source: score_judge(scorers[source], config.tie_margin) for source in config.reward_models}
            rates = {
                source: rate_over_seeds(compare(*pairs, member, max_failed_share=config.max_failed_share), prompts)
                for source, member in members.items()
            }
            win_rates = [rate["rate"] for rate in rates.values()]
            figures[name] |= {"by_judge": rates, "judge_spread": max(win_rates) - min(win_rates)}
    tests = [model_figures["sign_test"] for model_figures in figures.values()]
    for test, adjusted in zip(tests, holm([test["p"] for test in tests]), strict=True):
        test["holm"] = adjusted
    return {"models": figures, "calls": judge.usage()}, warnings + judge.faults()


def paired_responses(
    config: WinRateConfig, names: Sequence[str], prompts: list[Prompt], responses: Responses
) -> tuple[tuple[list[Prompt], list[str], list[str]], list[tuple[str, str]]]:
    """The prompts, the contestants' responses and the baseline's that each meets, and the names of both models.

    Of each checkpoint of each contestant, one after another.
    """
    models = [(model, meeting.baseline) for name in names for model, meeting in seed_rounds(config, name)]
    ours = [text for model, _ in models for text in responses[model].texts]
    theirs = [text for _, baseline in models for text in responses[baseline].texts]
    return (prompts * len(models), ours, theirs), [pair for pair in models for _ in prompts]


def write_form(config: WinRateConfig, path: Path, prompts: list[Prompt], responses: Responses) -> NoReturn:
    """Write every comparison as a form for people, and end there by raising `FormWritten`."""
    others = [name for name in config.contestants if name != config.baseline]
    pairs, _ = paired_responses(config, others, prompts, responses)
    note_form(Path(config.output), path)
    write_annotation_form(path, *pairs)
    raise FormWritten(
        f"{path}: a form for {len(prompts)} prompts: fill in `verdict`, 1, 0.5 or 0 for the first response; or let "
        f"`alignment label {path}` serve it as a page, and go on with verdicts=labels.jsonl"
    )


def _sample_rows(config: WinRateConfig, prompts: list[Prompt], responses: Responses) -> list[Figures]:
    """Some prompts with every model's response, of seeds the first, and the gold score where the judge is gold."""
    texts = {name: responses[config.names_of(name)[0]].texts for name in config.contestants}

    def shown(i: int, text: str) -> Figures:
        return {"text": text, "score": gold_scores([prompts[i]], [text])[0].total if config.judge == "gold" else None}

    rows = []
    for i, prompt in enumerate(prompts[: config.samples]):
        drawn = {name: shown(i, model_texts[i]) for name, model_texts in texts.items()}
        rows.append({"prompt": str(prompt.prompt), "responses": drawn})
    return rows
