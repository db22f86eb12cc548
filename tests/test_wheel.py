"""The wheel, installed into an empty environment, works in an empty folder: commands, packaged files, and no trl."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = ("*.jinja", "*.yaml", "*.sh", "*.jsonl", "*.html", "py.typed")
pytestmark = pytest.mark.slow


def call(*arguments: str | Path, cwd: Path = ROOT) -> str:
    """Output of a command without this checkout's own settings; an error shows what it wrote."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "ALIGNMENT_DATA")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    done = subprocess.run([*map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the wheel, is not installed: make setup")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", folder, ROOT], check=True)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory) -> Path:
    """The folder of commands of an environment with the wheel alone; dependencies, but trl, come from this one."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)}))
    (packages / "present.pth").write_text(
        "\n".join(dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib")))) + "\n"
    )
    (packages / "trl.py").write_text(
        "raise ImportError('trl is for tests')\n"
    )  # found before the one of this environment
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", root / "bin" / "python", "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel], check=True)
    return root / "bin"


def test_the_wheel_has_every_file_of_the_package_its_configs_and_recipes(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        "alignment": [*(ROOT / "alignment").rglob("*.py")],
        "configs": [],
        "recipes": [*(ROOT / "recipes").rglob("*.py")],
    }
    for folder, found in files.items():
        found += [path for pattern in DATA for path in (ROOT / folder).rglob(pattern)]
        place = "" if folder == "alignment" else "alignment/_packaged/"
        assert found and {place + path.relative_to(ROOT).as_posix() for path in found} <= names
    assert not [name for name in names if name.startswith(("tests", "scripts")) or "__pycache__" in name]


def test_commands_work_in_an_empty_folder(bin_folder, tmp_path):
    command = bin_folder / "alignment"
    where = call(bin_folder / "python", "-c", "import alignment; print(alignment.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(bin_folder.parent)
    assert "push" in call(command, "--help", cwd=tmp_path)
    assert '"learning_rate"' in call(command, "schema", "sft", cwd=tmp_path)
    lines = call(command, "doctor", cwd=tmp_path).splitlines()
    [script] = [line.split()[1] for line in lines if line.startswith("launch/slurm.sh ")]
    assert Path(script).is_relative_to(bin_folder.parent) and Path(script).is_file()
    less = ["training.max_steps=2", "data.max_rows=40"]
    call(command, "pretrain", "pretrain/tiny", *less, cwd=tmp_path)
    assert call(command, "sft", "sft/tiny", *less, cwd=tmp_path).strip() == "runs/tiny/sft/model"
    model = tmp_path / "runs" / "tiny" / "sft" / "model"
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= {path.name for path in model.iterdir()}
    rows = tmp_path / "pairs.jsonl"
    rows.write_text(
        '{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],'
        ' "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}\n'
    )
    assert "1 of 1 rows kept" in call(command, "data", "check", rows, "--kind", "comparisons", cwd=tmp_path)


def test_every_packaged_recipe_is_found_and_planned(bin_folder, tmp_path):
    """Configs are filled and checked; what needs the real data folder says so."""
    lines = [
        "from pathlib import Path", "from alignment.config.load import packaged_folder",
        "from alignment.pipeline.run import plan",
        "for file in sorted(packaged_folder('recipes').glob('*/recipe.yaml')):",
        "    try: print(file.parent.name, len(plan(file.parent.name, Path('out'))[1]))",
        "    except ValueError as error: print(file.parent.name, 'data' if 'ALIGNMENT_DATA' in str(error) else error)",
    ]  # fmt: skip
    found = dict(
        line.split(" ", 1) for line in call(bin_folder / "python", "-c", "\n".join(lines), cwd=tmp_path).splitlines()
    )
    assert set(found) == {path.parent.name for path in (ROOT / "recipes").glob("*/recipe.yaml")}
    assert all(each == "data" or each.isdigit() for each in found.values()), found
