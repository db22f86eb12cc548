"""The notebooks: each runs from the first cell to the last, on tiny settings; none is committed with outputs."""

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import BASES, DATA

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
TINY = {  # in place of the cell with the tag `parameters`
    "1_rlhf_in_ten_minutes": """
        STEPS = {"pretrain": 4, "sft": 2, "reward": 2, "ppo": 1, "dpo": 2}
        COUNTS = RowCounts(pretrain=200, pretrain_heldout=2, demonstrations=64, comparisons=64, comparisons_heldout=16,
                           prompts=64, prompts_eval=10)
    """,
    "2_your_own_reward": """
        STEPS = {"pretrain": 4, "sft": 2, "rl": 1, "cheat": 1}
        COUNTS = RowCounts(pretrain=200, pretrain_heldout=2, demonstrations=64, comparisons=2, comparisons_heldout=2,
                           prompts=80, prompts_eval=10)
    """,
    "3_judge_two_models": """
        STEPS = {"pretrain": 4, "sft": 2, "dpo": 2, "reward": 2}
        COUNTS = RowCounts(pretrain=200, pretrain_heldout=2, demonstrations=64, comparisons=128, comparisons_heldout=16,
                           prompts=2, prompts_eval=60)
        LABELS = 30
    """,
    "4_a_real_model": """
        STEPS = {"reward": 1, "dpo": 1}
        COUNTS = {"train": 32, "held_out": 8, "prompts": 4, "samples": 3}
    """,
}
REAL = (pytest.mark.real_base, pytest.mark.real_data)
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.fixture(params=[pytest.param(name, marks=REAL) if name == "4_a_real_model" else name for name in NAMES])
def notebook(request):
    """A notebook, with its name in `metadata`."""
    found = nbformat.read(FOLDER / f"{request.param}.ipynb", as_version=4)
    found.metadata["name"] = request.param
    return found


def names_set(source: str) -> set[str]:
    """The names that a cell assigns."""
    return {
        node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and type(node.ctx) is ast.Store
    }


@pytest.mark.slow
def test_a_notebook_runs_on_tiny_settings(notebook, tmp_path):
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    tiny = "\n".join(line.strip() for line in TINY[notebook.metadata.name].splitlines())
    tiny = f"SEED = 0\nRUNS = Path('runs')\n{tiny}"
    assert names_set(tiny) == names_set(cell.source)
    cell.source = tiny
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    folders = {"PYTHONPATH": str(FOLDER.parent), "ALIGNMENT_BASES": str(BASES), "ALIGNMENT_DATA": str(DATA)}
    client.execute(cwd=str(tmp_path), env={**os.environ, **folders, "OMP_NUM_THREADS": "1"})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.execution_count, cell.source
            assert not [output for output in cell.outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


def test_a_notebook_is_committed_without_outputs_and_is_valid(notebook):
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


def test_each_cell_of_code_follows_a_sentence(notebook):
    for before, cell in zip([None, *notebook.cells], notebook.cells, strict=False):
        if cell.cell_type == "code":
            assert before is not None and before.cell_type == "markdown", cell.source
            assert re.search(r"[a-z)`*][.:?!]", before.source), cell.source


def test_a_notebook_names_no_local_path_and_links_exist(notebook):
    for cell in notebook.cells:
        assert not re.search(r"""["'(=\s]~?/\w|[A-Z]:\\""", cell.source), cell.source
        for link in re.findall(r"\]\((?!https://)([^)]+)\)", cell.source):
            assert (FOLDER / link).is_file(), link


def test_each_notebook_has_tiny_settings():
    assert sorted(TINY) == NAMES
