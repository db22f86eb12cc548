"""Directories and files appear whole or not at all, whatever kills the writer; nothing of dead writers stays."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alignment import files
from alignment.errors import UserError
from alignment.files import atomic_directory, write_text
from tests.killing import run_killed

ROOT = Path(__file__).resolve().parent.parent


def write(path: Path, text: str) -> None:
    """A directory of two files with this text."""
    with atomic_directory(path) as folder:
        for name in ("a", "b"):
            (folder / name).write_text(text)


def content(path: Path) -> str:
    """The text of a whole directory."""
    texts = [(path / name).read_text() for name in ("a", "b")]
    assert texts[0] == texts[1] and sorted(os.listdir(path)) == ["a", "b"]
    return texts[0]


def killed(path: Path, after: int, *, can_exchange: bool) -> int:
    """Replace `path` in a forked child that kills itself after `after` operations on names; its exit code."""

    def replace() -> None:
        if not can_exchange and hasattr(files, "exchange"):
            files.exchange = lambda one, other: False
        write(path, "new")

    return run_killed(replace, after, ("replace", "rename", "fsync", "unlink", "rmdir"))


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_is_whole_after_a_kill_at_any_operation(tmp_path, can_exchange):
    found = []
    for after in range(40):
        path = tmp_path / str(after) / "model"
        write(path, "old")
        code = killed(path, after, can_exchange=can_exchange)
        if can_exchange:
            found.append(content(path))
        write(path.with_name("other"), "neighbor")  # others have nothing to do with it
        write(path, "newest")
        assert content(path) == "newest" and sorted(os.listdir(path.parent)) == ["model", "other"]
        if code == 0:
            break
    assert code == 0 and after > 5
    assert found == sorted(found, reverse=True), "old until one moment, new from then on"


def test_a_directory_without_its_name_is_put_back_first(tmp_path):
    path = tmp_path / "model"
    write(path, "old")
    path.rename(tmp_path / ".model.old-12ab")
    with pytest.raises(RuntimeError), atomic_directory(path):
        assert content(path) == "old"
        raise RuntimeError("no new one comes")
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_dead_process_of_the_same_number_left_is_no_obstacle(tmp_path):
    path = tmp_path / "model"
    write(path, "old")
    for kind in ("old", "partial"):
        left = tmp_path / f".model.{kind}-{os.getpid()}"
        left.mkdir()
        (left / "a").write_text("half deleted")
    write(path, "new")
    assert content(path) == "new" and os.listdir(tmp_path) == ["model"]


def test_what_a_living_process_is_writing_is_left_alone(tmp_path):
    path = tmp_path / "model"
    code = (
        "import sys; from pathlib import Path; from alignment.files import atomic_directory\n"
        "with atomic_directory(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'a').write_text('theirs'); (folder / 'b').write_text('theirs')\n"
        "    print('writing', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert other.stdout is not None and other.stdout.readline() == "writing\n"
    write(path, "ours")
    assert content(path) == "ours" and len(os.listdir(tmp_path)) == 2
    other.communicate("")
    assert other.returncode == 0 and content(path) == "theirs" and os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError(errno.EDQUOT, "Disk quota exceeded"),
     RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
     OSError("11101 requested and 4096 written")],
)  # fmt: skip
def test_a_full_disk_is_named_with_path_and_bytes_and_changes_nothing(tmp_path, monkeypatch, error):
    path = tmp_path / "model"
    write(path, "old")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("usage", (), {"free": 17}))
    message = r"model: the disk is full: 5 bytes of it are written.*and 17 are free"
    with pytest.raises(UserError, match=message), atomic_directory(path) as folder:
        (folder / "a").write_text("12345")
        raise error
    assert content(path) == "old" and os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "error", [OSError(errno.EROFS, os.strerror(errno.EROFS)), RuntimeError("I/O error: Read-only file system")]
)
def test_a_place_that_may_not_be_written_is_named(tmp_path, monkeypatch, error):
    path = tmp_path / "model"
    with pytest.raises(UserError, match=r"model: cannot be written .*Read-only"), atomic_directory(path):
        raise error
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"results\.json: cannot be written"):
        write_text(tmp_path / "file/results.json", "{}")
    with pytest.raises(UserError, match="cannot be written"):
        files.check_output(tmp_path / "file/run/results.json")
    with pytest.raises(UserError, match="is a directory"):
        files.check_output(tmp_path)
    files.check_output(tmp_path / "new/run/results.json")
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_under_a_file_names_the_directory_s_place(tmp_path, monkeypatch):
    def fails(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(UserError, match=r"/model: the disk is full"), atomic_directory(tmp_path / "model") as folder:
        write_text(folder / "config.json", "{}")
