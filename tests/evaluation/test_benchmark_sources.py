"""Packaged tasks and recipes' sets on folders that are laid out as the Hub's repositories, and on a mirror of the same rows.

Files, configs, columns and nesting of the folders are those of the sets' cards and of lm-eval's task files.
"""

import gzip
import io
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import datasets
import pytest
from datasets import ClassLabel, Dataset

from alignment.config.load import packaged_folder
from alignment.data.rows import hub
from alignment.data.rows.files import hub_source, read_whole
from alignment.data.rows.read import read_rows
from alignment.errors import UserError
from alignment.evaluation.benchmarks.tasks import read_task

BIASES = ["race-color", "socioeconomic", "gender", "disability", "nationality", "sexual-orientation",
          "physical-appearance", "religion", "age"]  # fmt: skip
BBQ = {
    "question_index": "1", "question_polarity": "neg", "context_condition": "ambig", "category": "Age",
    "answer_info": {"ans0": ["grandfather", "old"], "ans1": ["grandson", "nonOld"], "ans2": ["Unknown", "unknown"]},
    "additional_metadata": {"subcategory": "None", "stereotyped_groups": ["old"], "version": "a", "source": "s"},
    "context": "Two met.", "question": "Who forgot?", "ans0": "The old", "ans1": "The young", "ans2": "Unknown", "label": 2,
}  # fmt: skip
STATEMENT = {"question": "Would you?", "answer_matching_behavior": " Yes", "answer_not_matching_behavior": " No"}
PAIR = {"input": "Say a.", "output_1": "a", "output_2": "b", "label": 2}
LINES = [" \n", " = One = \n", " \n", " a b . \n", " \n", " = Two = \n", " \n", " c @-@ d \n"]


def mmlu_row(subject: str, answer: Any) -> dict[str, Any]:
    return {"question": f"Of {subject}? ", "subject": subject, "choices": ["1", "2", "3", "4"], "answer": answer}


def squad(answers: object) -> dict[str, Any]:
    return {"id": "x", "context": "c d", "question": "q?", "answers": answers}


# task -> files of the Hub's repository, with labels' names, and of the mirror
CARD, LABELS = "README.md", ClassLabel
LAYOUTS: dict[str, tuple[dict[str, tuple[list[dict[str, Any]], dict[str, ClassLabel]]], dict[str, list[Any]]]] = {
    "mmlu": (
        {f"cais/mmlu/all/{split}-00000-of-00001.parquet": (
            [mmlu_row(subject, number) for number, subject in enumerate(("anatomy", "virology"))],
            {"answer": LABELS(names=list("ABCD"))},
        ) for split in ("validation", "dev")},
        {f"mmlu_small/{name}.jsonl.gz": [mmlu_row("anatomy", "A"), mmlu_row("virology", "B")] for name in ("val", "dev_fewshot")},
    ),
    "truthfulqa": (
        {"truthfulqa/truthful_qa/generation/validation-00000-of-00001.parquet": ([{
            "type": "Adversarial", "category": "Law", "question": "Is it?", "best_answer": "No", "source": "s",
            "correct_answers": ["It is not.", "No"], "incorrect_answers": ["Yes", ""],
        }], {})},
        {"truthfulqa/questions.jsonl.gz": [{
            "Type": "Adversarial", "Category": "Law", "Question": "Is it?", "Best Answer": "No", "Source": "s",
            "Correct Answers": "It is not.; No", "Incorrect Answers": "Yes; ",
        }]},
    ),
    "gsm8k": (
        {f"openai/gsm8k/main/{split}-00000-of-00001.parquet": ([{"question": f"{split} 1+1?", "answer": "so\n#### 2"}], {})
         for split in ("test", "train")},
        {f"gsm8k/{split}.jsonl.gz": [{"question": f"{split} 1+1?", "answer": "so\n#### 2"}] for split in ("test", "train")},
    ),
    "lambada": (
        {"EleutherAI/lambada_openai/default/test-00000-of-00001.parquet": ([{"text": "He sat on the mat"}], {})},
        {"lambada/lambada_test.jsonl.gz": [{"text": "He sat on the mat"}]},
    ),
    "sst2": (
        {"nyu-mll/glue/sst2/validation-00000-of-00001.parquet": (
            [{"sentence": "a good film ", "label": 1, "idx": 0}], {"label": LABELS(names=["negative", "positive"])})},
        {"sst2/dev.jsonl.gz": [{"sentence": "a good film ", "label": 1}]},
    ),
    "cola": (
        {"nyu-mll/glue/cola/validation-00000-of-00001.parquet": (
            [{"sentence": f"It {word}.", "label": label, "idx": label} for label, word in enumerate(("do", "does"))],
            {"label": LABELS(names=["unacceptable", "acceptable"])})},
        {"cola/dev_in_domain.jsonl.gz": [{"source": "gj04", "sentence": "It do.", "label": 0}],
         "cola/dev_out_of_domain.jsonl.gz": [{"source": "m_02", "sentence": "It does.", "label": 1}]},
    ),
    "mrpc": (
        {"nyu-mll/glue/mrpc/test-00000-of-00001.parquet": (
            [{"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0}],
            {"label": LABELS(names=["not_equivalent", "equivalent"])})},
        {"mrpc/test.jsonl.gz": [{"label": 1, "id1": "1", "id2": "2", "sentence1": "a", "sentence2": "b"}]},
    ),
    "rte": (
        {"nyu-mll/glue/rte/validation-00000-of-00001.parquet": (
            [{"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0}],
            {"label": LABELS(names=["entailment", "not_entailment"])})},
        {"rte/dev.jsonl.gz": [{"sentence1": "a", "sentence2": "b", "label": "1", "idx": "0"}]},
    ),
    "squad": (
        {"google/xquad/xquad.en/validation-00000-of-00001.parquet": ([squad({"text": ["d"], "answer_start": [2]})], {})},
        {"xquad_en/xquad_en.jsonl.gz": [squad([{"text": "d", "answer_start": 2}])]},
    ),
    **dict.fromkeys(("wikitext", "wikitext_detokenized"), (
        {"Salesforce/wikitext/wikitext-2-v1/test-00000-of-00001.parquet": (
            [{"text": line if line.strip() else ""} for line in LINES], {})},
        {"wikitext2/test_part.txt.gz": LINES},
    )),
    "hhh": (
        {f"HuggingFaceH4/hhh_alignment/{config}/test/0000.parquet": (
            [{"input": f"{config}?", "targets": {"choices": ["yes", "no"], "labels": [1, 0]}}], {})
         for config in ("harmless", "helpful", "honest", "other")},
        {"hhh_alignment/hhh.jsonl.gz": [
            {"source": source, "prompt": f"{source}?", "chosen": "yes", "rejected": "no"}
            for source in ("harmless", "helpful", "honest", "other")]},
    ),
    "crows_pairs": (
        {"nyu-mll/crows_pairs/crows_pairs/test/0000.parquet": (
            [{"id": 0, "sent_more": "a b", "sent_less": "a c", "stereo_antistereo": 1, "bias_type": 2}],
            {"stereo_antistereo": LABELS(names=["stereo", "antistereo"]), "bias_type": LABELS(names=BIASES)})},
        {"crows_pairs/crows_pairs.jsonl.gz": [
            {"sent_more": "a b", "sent_less": "a c", "stereo_antistereo": "antistereo", "bias_type": "gender"}]},
    ),
}  # fmt: skip


TREE = {"message_tree_id": "t", "tree_state": "ready_for_export", "prompt": {
    "message_id": "t", "text": "Hi?", "role": "prompter", "emojis": {"+1": 2}, "replies": [
        {"message_id": "a", "text": "Yes.", "role": "assistant", "rank": 1, "replies": []},
        {"message_id": "b", "text": "No.", "role": "assistant", "rank": 0, "replies": [
            {"message_id": "c", "text": "Why?", "role": "prompter", "replies": []}]}]}}  # fmt: skip
REWRITE = {"instruction": "Say a.", "input": "", "output": "a", "chosen": "a, please", "rejected": "a!"}
ALPACA = {"instruction": "Say a.", "input": "", "output": "a"}
DOLLY = {"instruction": "Say a.", "context": "", "response": "a"}
POLARITY = {"label": LABELS(names=["neg", "pos"])}
# what recipes read -> file of its repository, its rows, labels' names; file of the mirror, its rows
OF_RECIPES: dict[str, tuple[str, list[Any], dict[str, ClassLabel], str, list[Any]]] = {
    "cornell-movie-review-data/rotten_tomatoes[train]": (
        "train.parquet", [{"text": "good .", "label": 1}, {"text": "bad .", "label": 0}], POLARITY,
        "sentiment_pang_lee/sentence_polarity.jsonl.gz", [{"label": "pos", "text": "good ."}, {"label": "neg", "text": "bad ."}],
    ),
    "eraser-benchmark/movie_rationales[train]": (
        "default/train/0000.parquet", [{"review": "a film .\nno .", "label": 0, "evidences": ["no ."]}],
        {"label": LABELS(names=["NEG", "POS"])},
        "sentiment_pang_lee/movie_reviews.jsonl.gz", [{"id": "cv0", "label": "neg", "text": "a film .\nno ."}],
    ),
    "LAION-AI/Open-Assistant[train]": (
        "model/model_eval/manual/data/en_100_tree.jsonl", [TREE], {}, "oasst_trees/trees.jsonl.gz", [TREE]),
    "rasbt/LLMs-from-scratch[train]": (
        "ch07/04_preference-tuning-with-dpo/instruction-data-with-preference.json", [REWRITE], {},
        "instruction_rasbt/instruction_preference.jsonl.gz", [REWRITE],
    ),
    "hiyouga/LLaMA-Factory:alpaca_en_demo.json[train]": (
        "data/alpaca_en_demo.json", [ALPACA], {}, "llamafactory_demo/alpaca_en.jsonl.gz", [ALPACA]),
    "hiyouga/LLaMA-Factory:c4_demo.jsonl[train]": (
        "data/c4_demo.jsonl", [{"text": "a"}], {}, "llamafactory_demo/c4_docs.jsonl.gz", [{"text": "a"}]),
    "databricks/databricks-dolly-15k[train[:150]]": (
        "databricks-dolly-15k.jsonl", [DOLLY | {"category": "open_qa"}], {}, "dolly_sample/dolly.jsonl.gz", [DOLLY]),
}  # fmt: skip


def write(path: Path, rows: list[Any], labels: dict[str, ClassLabel]) -> None:
    """Rows in the format that the path's suffix says: Parquet, a JSON list, or lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = Dataset.from_list(rows)
        for name, label in labels.items():
            table = table.cast_column(name, label)
        table.to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def write_card(root: Path, name: str) -> None:
    """A card with the configs of a repository whose files are named CONFIG/SPLIT-00000-of-00001.parquet."""
    files = sorted(file for file in (root / name).glob("*/*-of-*.parquet") if file.parent.name != "data")
    configs: dict[str, list[str]] = {}
    for file in files:
        split = file.name.partition("-")[0]
        configs.setdefault(file.parent.name, []).append(f"  - split: {split}\n    path: {file.parent.name}/{split}-*\n")
    lines = "".join(f"- config_name: {config}\n  data_files:\n{''.join(splits)}" for config, splits in configs.items())
    if configs:
        (root / name / CARD).write_text(f"---\nconfigs:\n{lines}---\n")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders for the Hub's layout and the mirror's; nothing else is near, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("ALIGNMENT_DATA", str(tmp_path / "nowhere"))
    return tmp_path / "hub", tmp_path / "mirror"


def build(folders: tuple[Path, Path], on_hub: dict[str, Any], mirror: dict[str, Any]) -> None:
    for name, (rows, labels) in on_hub.items():
        write(folders[0] / name, rows, labels)
    for name, rows in mirror.items():
        write(folders[1] / name, rows, {})
    for name in {"/".join(name.split("/")[:2]) for name in on_hub}:
        write_card(folders[0], name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_task_reads_the_hub_s_layout_and_the_mirror_alike(name, folders):
    build(folders, *LAYOUTS[name])
    one, other = (read_task(name, folder).items for folder in folders)
    assert one == other and len(one) >= 1


def test_every_config_of_a_set_is_read_in_order(folders, monkeypatch):
    """BBQ, LLMBar and the model-written questions, of which four here: a file of each config."""
    known = hub.hub_sources()
    persona, risks = (known[f"EleutherAI/{name}"]["configs"] for name in ("persona", "advanced_ai_risk"))
    assert (len(persona), len(risks)) == (135, 16) and persona == sorted(persona)
    for name, configs in (("persona", persona := persona[:4]), ("advanced_ai_risk", risks := risks[:4])):
        monkeypatch.setitem(known[f"EleutherAI/{name}"], "configs", configs)
    bbq, pairs = known["oskarvanderwal/bbq"]["configs"], known["princeton-nlp/LLMBar"]["configs"]
    on_hub = (
        {f"oskarvanderwal/bbq/data/{config}.jsonl": ([BBQ | {"category": config}], {}) for config in bbq}
        | {f"princeton-nlp/LLMBar/Dataset/{config}/dataset.json": ([PAIR], {}) for config in pairs}
        | {f"EleutherAI/persona/{config}/validation/0000.parquet": ([STATEMENT], {}) for config in persona}
        | {f"EleutherAI/advanced_ai_risk/{config}/validation/0000.parquet": ([STATEMENT], {}) for config in risks}
    )
    build(folders, on_hub, {
        "bbq/bbq.jsonl.gz": [BBQ | {"category": config} for config in bbq],
        "llmbar/llmbar.jsonl.gz": [PAIR | {"subset": config.replace("Adversarial/", "")} for config in pairs],
        "anthropic_evals/persona.jsonl.gz": [STATEMENT | {"behaviour": config} for config in persona],
        "anthropic_evals/advanced_ai_risk_human.jsonl.gz": [
            STATEMENT | {"behaviour": config.removeprefix("human-")} for config in risks
        ],
    })  # fmt: skip
    for name, count in (("bbq", 6), ("llmbar", 8), ("persona", 4), ("advanced_ai_risk", 4)):
        one, other = (read_task(name, folder).items for folder in folders)
        assert one == other and len(one) == count
    assert [item.subsets for item in read_task("llmbar", folders[0]).items][1] == ("LLMBar/Neighbor",)


def given(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what Arrow adds, and the columns that a mirror does not have."""
    return {name: value for name, value in row.items() if value is not None and name not in ("evidences", "category")}


@pytest.mark.parametrize("source", OF_RECIPES)
def test_a_recipe_s_set_reads_the_hub_s_layout_and_the_mirror_alike(source, folders, monkeypatch):
    file, rows, labels, copy, copied = OF_RECIPES[source]
    name = hub_source(source, "")[0]
    build(folders, {f"{name}/{file}": (rows, labels)}, {copy: copied})
    read = []
    for folder in folders:
        monkeypatch.setenv("ALIGNMENT_DATA", str(folder))
        read.append([given(row) for row in hub.load_hub(*hub_source(source, ""))])
    assert read[0] == read[1] and len(read[0]) == len(rows)


def test_stories_are_the_first_of_the_set_and_of_the_mirror_s_text(folders, monkeypatch):
    stories = ["Once there was a cat.\n\nIt sat.", "One day, a dog came.", "Once upon a time, it rained.\nOn and on."]
    name = "roneneldan/TinyStories/data/train-00000-of-00004-2d5a1467fff1081b.parquet"
    more = [{"text": f"One day, a {number}."} for number in range(200)]
    lines = [line + "\n" for line in "\n\n".join(stories).split("\n")]
    build(
        folders, {name: ([{"text": story} for story in stories] + more, {})}, {"tinystories_text/train.txt.gz": lines}
    )
    monkeypatch.setenv("ALIGNMENT_DATA", str(folders[0]))
    assert len(hub.load_hub("roneneldan/TinyStories", None, "train[:180]")) == 180
    whole = read_whole("roneneldan/TinyStories[train[:3]]")[0].values["text"]
    monkeypatch.setenv("ALIGNMENT_DATA", str(folders[1]))
    assert (
        whole.strip()
        == read_whole("roneneldan/TinyStories[train[:180]]")[0].values["text"].strip()
        == "\n\n".join(stories)
    )


def test_templates_of_p3_are_files_of_which_the_first_rows_are_read(folders, monkeypatch):
    configs = hub.hub_sources()["yizhongw/self-instruct"]["configs"]
    assert len(configs) == 125 and configs == sorted(configs)
    monkeypatch.setitem(hub.hub_sources()["yizhongw/self-instruct"], "configs", configs[:2])
    rows = {
        config: [{"prompt": f"{config} {n}?", "completion": "a"} for n in range(31 - k)]
        for k, config in enumerate(configs[:2])
    }
    folder = "yizhongw/self-instruct/data/finetuning/t0_train_50k/data_per_template"
    build(folders, {f"{folder}/{config}.jsonl": (rows[config], {}) for config in rows}, {
        "t0_p3_sample/p3.jsonl.gz": [{"template": config, **row} for config in rows for row in rows[config][:30]],
    })  # fmt: skip
    read = []
    for folder in folders:
        monkeypatch.setenv("ALIGNMENT_DATA", str(folder))
        read.append([dict(row) for row in hub.load_hub("yizhongw/self-instruct", "*", "train[:30]")])
    assert read[0] == read[1] and len(read[0]) == 60 and read[0][0]["config"] == configs[0]


def test_files_of_another_address_are_fetched_once(folders, monkeypatch):
    """`datasets` has no reader of such addresses unless further packages are there."""
    asked = []

    def answer(url, timeout):
        asked.append(unquote(url))
        return io.BytesIO(json.dumps([PAIR]).encode())

    monkeypatch.setattr(hub, "urlopen", answer)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    rows = [list(hub.load_hub("princeton-nlp/LLMBar", "*", "test")) for _ in range(2)]
    known = hub.hub_sources()["princeton-nlp/LLMBar"]
    assert asked == [f"{known['home']}Dataset/{config}/dataset.json" for config in known["configs"]]
    assert rows[0] == rows[1] and [row["config"] for row in rows[0]] == known["configs"]


@pytest.fixture
def tries(folders, monkeypatch):
    """Attempts at a connection, each of which fails; the Hub's client is not told that it is offline."""
    made = []

    def refuse(host, *rest, **options):
        made.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return made


TASKS = sorted(path.stem for path in (packaged_folder("configs") / "evaluate/benchmarks").glob("*.yaml"))


@pytest.mark.parametrize("name", [name for name in TASKS if not name.startswith("tiny_")])
def test_without_a_network_a_task_ends_in_one_line_at_once(name, tries, tmp_path):
    with pytest.raises(UserError) as caught:
        read_task(name, tmp_path)
    message = str(caught.value)
    assert "\n" not in message and "ALIGNMENT_DATA" in message and "put a copy" in message
    assert len(tries) == 1  # its own client would try six times, with pauses
    name = hub_source(message.split(": ")[0], "")[0]
    assert name in hub.hub_sources() and f"{name}" in message.split("(")[1] and "[" in message


def test_prompts_of_toxicity_are_read_from_the_set_s_own_file(folders):
    row = {
        "filename": "f",
        "begin": 0,
        "end": 3,
        "prompt": {"text": "So I", "toxicity": 0.1},
        "continuation": {"text": "x"},
    }
    build(folders, {"allenai/real-toxicity-prompts/prompts.jsonl": ([row], {})}, {})
    assert [item.prompt for item in read_task("real_toxicity_prompts", folders[0]).items] == ["So I"]


def test_what_is_on_no_machine_is_named_with_the_way_to_a_copy(folders, tmp_path):
    with pytest.raises(UserError) as caught:
        read_task("hhh", tmp_path)
    message = str(caught.value)
    assert "\n" not in message and "HuggingFaceH4/hhh_alignment:*[test]" in message and "ALIGNMENT_DATA" in message
    assert "hf download HuggingFaceH4/hhh_alignment --repo-type dataset --revision refs/convert/parquet" in message
    with pytest.raises(UserError, match="githubusercontent"):
        read_task("llmbar", tmp_path)


def test_a_copy_below_the_folder_of_data_is_taken_by_every_stage(folders, monkeypatch):
    """The mirror's file and the Hub's give the same rows; a config without a file there goes to the Hub."""
    rows = [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}]
    build(
        folders, {"Anthropic/hh-rlhf/helpful-base/test.jsonl.gz": (rows, {})}, {"hh_rlhf/helpful-base.jsonl.gz": rows}
    )
    found = []
    for folder in folders:
        monkeypatch.setenv("ALIGNMENT_DATA", str(folder))
        found.append(read_rows("Anthropic/hh-rlhf:helpful-base[test]", "comparisons")[0])
    assert found[0] == found[1] and found[0][0].row_id == "Anthropic/hh-rlhf:helpful-base[test]:1"
    with pytest.raises(UserError, match="helpful-online"):
        read_rows("Anthropic/hh-rlhf:helpful-online[test]", "comparisons")


def test_one_config_of_a_mirror_of_all_is_read_alone(folders, monkeypatch):
    build(folders, *LAYOUTS["hhh"])
    monkeypatch.setenv("ALIGNMENT_DATA", str(folders[1]))
    found = list(hub.load_hub("HuggingFaceH4/hhh_alignment", "honest", "test"))
    monkeypatch.setenv("ALIGNMENT_DATA", str(folders[0]))
    assert found == list(hub.load_hub("HuggingFaceH4/hhh_alignment", "honest", "test")) and len(found) == 1


def test_packaged_tasks_name_data_sets_of_the_hub():
    """Each with a licence."""
    for name in TASKS:
        text = (packaged_folder("configs") / f"evaluate/benchmarks/{name}.yaml").read_text()
        source = text.split("source: ")[1].split("\n")[0]
        assert name.startswith("tiny_") or source.partition("[")[0].partition(":")[0] in hub.hub_sources(), name
    known = hub.hub_sources().values()
    assert all(one["licence"] and ("columns" in one or "directories" in one) for one in known)
