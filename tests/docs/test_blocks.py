"""Each block of code in the pages runs, or at least names what exists."""

import sys

import pytest

from tests.docs.blocks import WrongBlock, run_blocks
from tests.docs.pages import Block, pages, read_blocks

SLOW: set[str] = set()  # pages whose blocks take more than 15 seconds


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in pages()]
)
def test_the_blocks_of_a_page_run(page, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    try:
        run_blocks(read_blocks(page), folder)
    finally:
        for name in set(sys.modules) - before:  # another page's module of the same name is another one
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]


# The runner finds what it is for


def block(language: str, text: str, reason: str = "") -> Block:
    return Block("page.md", 7, language, text, reason)


SFT = "# sft.yaml\npolicy: base\noutput: out\ndata: {train: demonstrations.jsonl, max_length: 128}\n"
RUN = "alignment sft sft.yaml training.max_steps=1 training.batch_size=4"


def test_a_config_is_written_and_run_and_python_goes_on_with_it(folder):
    run_blocks(
        [
            block("yaml", SFT),
            block("bash", f"# a comment\n{RUN} \\\n  data.max_rows=8   # another\n"),
            block("python", "from pathlib import Path\nmodel = Path('out/model')"),
            block("python", "assert model.is_dir()"),
            block("bash", "ls out/model | wc -l > count\nalignment --help > help"),
        ],
        folder,
    )
    assert int((folder / "count").read_text()) > 2


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        ("bash", "alignment sft missing.yaml", "exit code 2"),
        ("bash", "alignment sft sft.yaml training.max_stepz=1", "exit code 2"),
        ("bash", "ls missing | wc -l", "bash ended with exit code"),
        ("bash", "alignment chat base", "not run"),
        ("bash", "alignment sft sft.yaml --gpus 8", "not run"),
        ("python", "import alignment.missing", "ModuleNotFoundError"),
        ("", "text", "the language ''"),
        ("yaml", "# mine.yaml\npolicy: base\noutput: out\ndata: {train: a, max_len: 3}\n", "max_len: unknown key"),
        ("yaml", "polizy: base\n", "no stage has the key 'polizy'"),
        ("yaml", "adapter: {kind: lora, rnk: 8}\n", "adapter.rnk: unknown key"),
        ("yaml", "advantages: rloo\nadvantages: gpro\n", "must be 'gae'"),
    ],
)
def test_a_planted_fault_is_found(folder, language, text, problem):
    with pytest.raises(WrongBlock, match=problem) as error:
        run_blocks([block("yaml", SFT), block(language, text)], folder)
    assert str(error.value).startswith("page.md:7: ")


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        ("bash", "alignment sfd sft.yaml", "there is no command"),
        ("bash", "alignment evaluate winrat sft.yaml", "there is no command"),
        ("bash", "alignment sft sft.yaml --gpu 8", "No such option"),
        ("bash", "torchrun --nproc_per_node 8 -m alignment sft sft.yaml optim.lr=1", "here it is called"),
        ("bash", "alignment dpo sft.yaml beta=-1", "beta"),
        ("bash", "alignment sft --help optimizer", "is refused"),
        ("bash", "alignment plan sft/lama", "no such file"),
        ("bash", "alignment run quickstart ppo.kl_coeff=1", "no key 'kl_coeff'"),
        ("bash", "make quick", "no target"),
        ("bash", "pip install -e '.[vlm]'", "no extra"),
        ("bash", "sbatch configs/launch/slurn.sh", "not in the checkout"),
        ("python", "def f(:", "SyntaxError"),
    ],
)
def test_a_planted_fault_is_found_in_a_block_that_does_not_run(folder, language, text, problem):
    with pytest.raises(WrongBlock, match=problem):
        run_blocks([block("yaml", SFT), block(language, text, "needs a card")], folder)


@pytest.mark.parametrize(
    "text",
    [
        "alignment sft sft.yaml --gpus 8 --launch launch/fsdp2",
        "accelerate launch --config_file configs/launch/fsdp2.yaml -m alignment sft sft.yaml",
        "alignment run quickstart ppo.kl_coef=1 --check && make test ARGS=x",
        "HF_HOME=/tmp alignment chat base --temperature 0 &",
        "alignment ppo --help rewards; alignment --help",
    ],
)
def test_commands_that_exist_are_not_refused(folder, text):
    run_blocks([block("yaml", SFT), block("bash", text, "needs a card")], folder)


def test_blocks_are_read_with_place_indent_and_reason_not_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    (tmp_path / "a.md").write_text("<!-- not run: a card -->\n```bash\nx\n```\n\n- a\n    ```yaml\n    b: 1\n    ```\n")
    assert read_blocks("a.md") == [Block("a.md", 2, "bash", "x\n", "a card"), Block("a.md", 7, "yaml", "b: 1\n", "")]
