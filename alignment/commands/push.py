"""The command `alignment push`: a model directory and its card as a repository of the Hugging Face Hub."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.utils import filter_repo_objects

from alignment.adapters.files import WEIGHTS, is_adapter, read_adapter_config, read_members
from alignment.errors import UserError, is_hidden, raise_all
from alignment.files import MAX_JSON_BYTES, read_json_object
from alignment.loading import MODEL_FILES
from alignment.models.safetensors_files import CONFIG, stored_tensors
from alignment.pipeline.stages import write_card_of
from alignment.settings import leaves

TOKEN = (
    re.compile(  # of the Hub, GitHub, npm, AWS, OpenAI's kin, Slack, GitLab and Google; keys; passwords in addresses
        r"\b((hf_|gh[pousr]_|npm_|AKIA)(?=[a-zA-Z]*\d)[a-zA-Z\d]{16,}"
        r"|(github_pat_|sk-|xox[abprs]-|glpat-|AIza)(?=[\w-]*\d)[\w-]{20,})"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY|://[\w.%+-]+:[^\s/:@\"]{6,}@"
    )
)
WAYS = {  # out of a refusal, by its status
    401: "it was given no token that it knows: run `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there: take one with the right to write, or another owner in REPO",
}
VALUE = re.compile(r"[\w./+=-]{16,}")  # of a secret; what a key such as image_token has looks like <image_token>


def push_model(
    directory: Path, repository: str, *, private: bool = False, revision: str | None = None, dry_run: bool = False
) -> str:
    """Upload the model of a run, or a model directory, as one more commit, and return its address.

    The card of a run's model is written anew before. `dry_run` returns the names of the files instead, and sends
    nothing.

    Raises:
        UserError: the directory is no model that others can open, or holds a secret; the Hub refuses or is not there.
    """
    model = directory / "model" if (directory / "model").is_dir() else directory
    raise_all(_problems(model))
    if model.name == "model" and (model.parent / "lineage.json").is_file():
        write_card_of(model.parent)
    names = [path.relative_to(model).as_posix() for path in sorted(model.rglob("*")) if path.is_file()]
    uploaded = list(filter_repo_objects(names, allow_patterns=MODEL_FILES))
    raise_all(_secrets(model / name for name in uploaded))
    if dry_run:
        return "\n".join(name if name in uploaded else f"{name} (not uploaded)" for name in names)
    try:
        api = HfApi()
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        if private:  # one that was there may have been public
            api.update_repo_settings(repository, private=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=model,
            revision=revision,
            allow_patterns=MODEL_FILES,
            commit_message=f"Upload of {directory.resolve().name}",
        )
    except Exception as error:  # the libraries below raise a dozen unrelated types
        why = WAYS.get(getattr(getattr(error, "response", None), "status_code", 0)) or " ".join(str(error).split())
        raise UserError(
            f"{repository}: {constants.ENDPOINT} did not take it ({type(error).__name__}): {why}"
        ) from error
    return f"{url}/tree/{revision}" if revision else str(url)


def _problems(model: Path) -> Iterator[str]:
    """The reasons why others could not open a directory as a model."""
    adapters = [model] if is_adapter(model) else read_members(model) or []
    if not adapters and not (model / CONFIG).is_file():
        yield (
            f"{model}: no model directory, which has {CONFIG} or an adapter (a checkpoint has none); give a training "
            "run's directory or its model/"
        )
    elif not adapters:
        stored_tensors(model)  # names what is missing
    for adapter in adapters:
        if not (adapter / WEIGHTS).is_file():
            yield f"{adapter}: {WEIGHTS} is missing"
        if Path(base := str(read_adapter_config(adapter).get("base_model_name_or_path"))).is_dir():
            yield (
                f"{adapter}: its base is {base}, which only this machine has; `alignment export` merges the two, or "
                "write the base's name on the Hub as base_model_name_or_path into adapter_config.json"
            )


def _secrets(files: Iterable[Path]) -> Iterator[str]:
    """The places of what looks like a key or token of a service."""
    for path in files:
        if match := TOKEN.search(_text(path)):
            yield f"{path}: holds what looks like a token of a service ({match[0][:5]}...); take it out"
        for key, value in leaves(read_json_object(path)) if path.suffix == ".json" else ():
            if is_hidden(key) and isinstance(value, str) and VALUE.fullmatch(value):
                yield f"{path}: {'.'.join(map(str, key))} looks like a secret; take it out"


def _text(path: Path) -> str:
    """The text of a file; of weights that of their header, which stands behind its length in 8 bytes."""
    with path.open("rb") as file:
        length = MAX_JSON_BYTES
        if path.suffix == ".safetensors":
            length = min(length, int.from_bytes(file.read(8), "little"))
        return file.read(length).decode("utf-8", errors="replace")
