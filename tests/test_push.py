"""`alignment push` speaks the Hub's protocol with a server on this machine, and refuses what others could not open."""

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from alignment.cli import main
from alignment.commands.push import push_model
from alignment.errors import UserError
from alignment.files import CARD


class Hub(ThreadingHTTPServer):
    """The part of the Hub that an upload asks, for files that go into the commit itself; `refusal` answers commits."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, str]] = []
        self.files: dict[str, dict[str, bytes]] = {}  # branch -> name -> content
        self.private, self.refusal, self.tokens = True, 0, set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        self.server.asked.append((self.command, path))
        if path.startswith("/api/models/me/polite") or path == "/api/repos/create":
            self.server.tokens.add(self.headers.get("Authorization"))
            if self.server.refusal:
                return self.answer({"error": "no"}, self.server.refusal)
        if path.endswith("/preupload/main") or path.endswith("/preupload/v2"):
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        if path.endswith("/settings"):
            assert not self.server.files, "made private before anything is there"
            self.server.private = json.loads(body)["visibility"] == "private"
        if "/commit/" in path:
            branch = self.server.files.setdefault(path.rpartition("/")[2], {})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    branch[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer(
                {"commitUrl": f"{self.server.url}/me/polite/commit/0", "commitOid": "0", "success": True}
            )
        if path == "/api/repos/create":
            return self.answer({"url": f"{self.server.url}/me/polite", "name": "me/polite"})
        self.answer(
            {"id": "me/polite", "private": self.server.private, "sha": "0" * 40, "siblings": [], "warnings": []}
        )

    do_GET = do_HEAD = do_PUT = do_POST

    def answer(self, content: object, status: int = 200):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(stage, tmp_path) -> Path:
    """A copy of a run."""
    return Path(shutil.copytree(stage("sft"), tmp_path / "polite"))


def files_of(model: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model.iterdir()}


def test_a_run_is_uploaded_whole_with_its_card(hub, run, capsys):
    assert main(["push", str(run), "me/polite", "--private"]) == 0
    assert capsys.readouterr().out == f"{hub.url}/me/polite\n"
    assert hub.files["main"] == files_of(run / "model") and b"# polite" in hub.files["main"][CARD]
    assert hub.tokens == {"Bearer hf_mine"}


def test_a_branch_is_made_and_gets_the_commit(hub, run):
    assert push_model(run / "model", "me/polite", revision="v2") == f"{hub.url}/me/polite/tree/v2"
    assert ("POST", "/api/models/me/polite/branch/v2") in hub.asked
    assert set(hub.files) == {"v2"} and CARD in hub.files["v2"]


def test_what_no_model_needs_stays_here_and_is_named(hub, run):
    (run / "model" / ".env").write_text("A=1")
    (run / "model" / "old.bin").write_text("")
    named = push_model(run, "me/polite", dry_run=True).splitlines()
    assert ".env (not uploaded)" in named and "old.bin (not uploaded)" in named and "model.safetensors" in named
    assert not hub.asked
    push_model(run, "me/polite")
    assert set(hub.files["main"]) == {name for name in named if "(" not in name}


def test_a_private_model_goes_to_no_public_repository(hub, run):
    hub.private = False
    push_model(run, "me/polite", private=True)
    assert hub.private and hub.files["main"]


@pytest.mark.parametrize(("status", "why"), [(401, "hf auth login"), (403, "may not write there"), (500, "500")])
def test_a_refusal_is_one_message(hub, run, status, why, monkeypatch, capsys):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.refusal = status
    assert main(["push", str(run), "me/polite"]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and why in error and "me/polite" in error and "Traceback" not in error


def test_a_hub_that_cannot_be_reached_is_one_message(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 did not take it"):
        push_model(run, "me/polite")


SECRET = "hf_" + "a1B2" * 9
SECRETS = (
    "AIza" + "a1B-" * 9, "glpat-" + "a1B_" * 5, "npm_" + "a1B2" * 9, "-----BEGIN RSA PRIVATE KEY-----",
    "https://me:hunter22@example.com/x",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        (CARD, f"Run with {SECRET}.", "README.md: holds what looks like a token of a service"),
        ("extra.json", json.dumps({"login": {"api_key": "0123456789abcdef0123"}}), "login.api_key looks like a secret"),
        *((CARD, f"It was {text} here", "looks like a token") for text in SECRETS),
    ],
)
def test_a_secret_is_refused_and_not_shown(hub, run, name, text, why):
    (run / "model" / name).write_text(text)
    with pytest.raises(UserError, match=why) as error:
        push_model(run, "me/polite")
    assert SECRET not in str(error.value) and not hub.asked


def test_a_secret_in_the_metadata_of_weights_is_refused(hub, run):
    (weights,) = (run / "model").glob("*.safetensors")
    save_file(load_file(weights), weights, metadata={"format": "pt", "made_with": SECRET})
    with pytest.raises(UserError, match="looks like a token"):
        push_model(run, "me/polite")
    assert not hub.asked


def test_names_of_special_tokens_are_no_secrets(hub, run):
    tokens = {"image_token": "<image_soft_token>", "eos_token": "endoftextendoftext", "boi_token": "<start_of_image>"}
    (run / "model" / "extra.json").write_text(json.dumps(tokens))
    assert "extra.json" in push_model(run, "me/polite", dry_run=True)


def test_no_model_is_refused(hub, run, stage, tmp_path):
    with pytest.raises(UserError, match="no model directory"):
        push_model(tmp_path / "nowhere", "me/polite")
    with pytest.raises(UserError, match="no model directory"):
        push_model(run.parent, "me/polite")  # the directory of a recipe
    (run / "model" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        push_model(run, "me/polite")
    assert not hub.asked


def test_a_checkpoint_is_refused(hub, checkpoints, world, ran, tmp_path):
    from alignment.training import TrainingConfig

    training = TrainingConfig(batch_size=8, max_steps=1, save_every_steps=1)
    ran("sft", checkpoints["llama"], tmp_path / "run", training=training)
    with pytest.raises(UserError, match="a checkpoint has none"):
        push_model(tmp_path / "run" / "checkpoints" / "step-000001", "me/polite")


def test_an_adapter_goes_where_its_base_is_known(hub, stage, tmp_path):
    run = Path(shutil.copytree(stage("sft lora"), tmp_path / "polite"))
    with pytest.raises(UserError, match=r"its base is .*`alignment export`"):
        push_model(run, "me/polite")
    path = run / "model" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "owner/base"}))
    push_model(run, "me/polite")
    assert "adapter_model.safetensors" in hub.files["main"]
    (run / "model" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is missing"):
        push_model(run, "me/polite")


def test_an_edited_card_goes_up_as_it_is(hub, run):
    (run / "model" / CARD).write_text("Mine.\n")
    push_model(run, "me/polite")
    assert hub.files["main"][CARD] == b"Mine.\n"
