"""What the head comments of packaged configs for real bases promise: `alignment plan` finds that the run fits."""

import re
import shlex
from pathlib import Path

import pytest

from alignment.commands.plan import plan_config
from alignment.config.load import packaged_folder

PROMISE = re.compile(r"^#\s+alignment plan (\S+)(.*)$", re.MULTILINE)


def promises() -> list[tuple[str, list[str]]]:
    """Name of a config, and the options of the command in its head comment."""
    found = []
    for file in sorted(Path(str(packaged_folder("configs"))).glob("*/*.yaml")):
        for name, options in PROMISE.findall(file.read_text(encoding="utf-8")):
            assert name == f"{file.parent.name}/{file.stem}", f"{file} shows the plan of another config"
            found.append((name, shlex.split(options)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [pytest.param(*each, id=each[0]) for each in promises()])
def test_the_run_fits_the_gpu_that_the_config_is_for(name, options):
    given = dict(zip(options[::2], options[1::2], strict=True))
    plan = plan_config(
        name, [], gpus=int(given["--gpus"]) if "--gpus" in given else None, gpu_memory=float(given["--gpu-memory"]),
        launch=given.get("--launch"),
    )  # fmt: skip
    assert plan.fits, f"{plan.needed / 1e9:.1f} GB in {plan.peak.phase}: {plan.peak.parts}"
