"""Samples from servers: the same run as with our own engine, and every fault of a server ends in one message.

The stand-in answers what vLLM did, see scripts/vllm_answers.py, and refuses what is out of turn. It decodes by our engine
with the weights that it was given, and draws as this process would for the same seed and number.
"""

import copy
import dataclasses
import json
import re
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from alignment.adapters.specs import DoRASpec, LoRASpec
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.rollouts.config import ServersConfig
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses
from alignment.loading import load_model
from alignment.training import TrainingConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import vllm_answers

ANSWERS = vllm_answers.read_recorded()["answers"]
SAMPLED = ("score", "kl", "response_tokens", "ended_share", "policy_loss", "value_loss", "approx_kl")


def recorded(name: str, *, adapter: str = "one", **changes: object) -> tuple[int, str | None, object]:
    """Status, content type and a copy of a recorded answer, with some of its keys changed, or its adapter's name."""
    status, kind, answer = (copy.deepcopy(ANSWERS[name][key]) for key in ("status", "type", "answer"))
    return status, kind, answer.replace("'one'", f"'{adapter}'") if isinstance(answer, str) else answer | changes


class StandIn(ThreadingHTTPServer):
    """A server of `vllm serve`: its weights, its version, and what it was asked; it answers as vLLM did."""

    daemon_threads = True

    def __init__(self, base: str, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.url, self.base = f"http://127.0.0.1:{self.server_port}", base
        self.lock, self.calls, self.faults = threading.RLock(), [], {}
        self.start_anew()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def start_anew(self) -> None:
        """Be as after a start: the weights of the checkpoint, no adapters."""
        with self.lock:
            self.models = {"base": load_model(self.base)}
            self.version, self.state, self.cached = "default", "started", False

    def answer(self, method: str, path: str, body: dict | None) -> tuple[int, str | None, object]:
        path = path.partition("?")[0]
        self.calls.append(path)
        if (fault := self.faults.get(path)) and (found := fault(self)) is not None:
            return found if len(found) == 3 else (found[0], "application/json", found[1])
        with self.lock:
            if self.state == "failed":
                return recorded("response after a reload that failed")
            known = getattr(self, f"{method}_{path.strip('/').replace('/', '_')}", None)
            return known(body) if known else recorded("unknown route")

    def GET_health(self, body):
        return recorded("health")

    def GET_weight_info(self, body):
        return recorded("version of the weights", weight_version=self.version)

    def GET_v1_models(self, body):
        base, adapter = recorded("models with an adapter")[2]["data"]
        rest = [adapter | {"id": name} for name in self.models if name != "base"]
        return recorded("models", data=[base, *rest])

    def POST_pause(self, body):
        self.state = "paused"
        return recorded("pause")

    def POST_resume(self, body):
        self.state = "resumed"
        return recorded("resume")

    def POST_collective_rpc(self, body):
        folder = Path(body["kwargs"]["weights_path"])
        if body["method"] != "reload_weights" or not list(folder.glob("*.safetensors")):
            self.state = "failed"
            return recorded("reload of a folder that is not there")
        assert self.state == "paused"
        self.models["base"], self.cached = load_model(str(folder)), True
        return recorded("reload")

    def POST_update_weight_version(self, body):
        self.version = body["new_version"]
        return recorded("new version", new_version=self.version)

    def POST_reset_prefix_cache(self, body):
        self.cached = False
        return recorded("prefix cache")

    def POST_v1_load_lora_adapter(self, body):
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.models:
            return recorded("adapter there already")
        if not (folder / "adapter_config.json").exists():
            return recorded("adapter not in the folder")
        self.models[name] = load_model(str(folder))
        return recorded("adapter", adapter=name)

    def POST_v1_unload_lora_adapter(self, body):
        if self.models.pop(body["lora_name"], None) is None:
            return recorded("adapter not there")
        return recorded("adapter taken away", adapter=body["lora_name"])

    def POST_inference_v1_generate(self, body):
        params, model = body["sampling_params"], self.models.get(body.get("model", "base"))
        if model is None:
            return recorded("unknown model")
        if len(body["token_ids"]) >= vllm_answers.LONGEST:
            return recorded("prompt too long")
        assert self.state != "paused" and not self.cached
        assert params["ignore_eos"] and params["stop_token_ids"] and params["top_k"] == -1
        sampling = SamplingConfig(params["max_tokens"], params["temperature"], seed=params["seed"] >> 32)
        drawn = decode_responses(
            model, [body["token_ids"]], sampling, params["stop_token_ids"], rows=[params["seed"] % 2**32],
            vocabulary=min(map(int, params.get("logit_bias", ())), default=None),
        )  # fmt: skip
        [choice] = recorded("response")[2]["choices"]
        tokens, log_probs = drawn.token_ids[0], drawn.log_probs[0]
        [content, *_] = choice["logprobs"]["content"]
        choice |= {
            "token_ids": tokens, "finish_reason": "stop" if drawn.ended[0] else "length",
            "logprobs": {
                "content": [content | {"token_id": t, "logprob": p} for t, p in zip(tokens, log_probs, strict=True)]
            },
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
        }  # fmt: skip
        return recorded("response", choices=[choice])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply("GET", None)

    def do_POST(self):
        self.reply("POST", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, method, body):
        status, kind, found = self.server.answer(method, self.path, body)
        text = (found if isinstance(found, str) else json.dumps(found)).encode()
        try:
            self.send_response(status)
            if kind:
                self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text)
        except OSError:  # the trainer has hung up, as after a time-out
            pass

    def log_message(self, *arguments):
        pass


@contextmanager
def standing_in(base: str):
    server = StandIn(base)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def start(stage) -> dict[str, str]:
    return {"policy": str(stage("sft") / "model"), "reward_model": str(stage("reward") / "model")}


@pytest.fixture
def ppo(start, make_stage, tmp_path):
    """`ppo(name, **changes)` -> `run`, config of a small PPO run of three iterations."""

    def make(name, **changes):
        training = TrainingConfig(batch_size=8, max_steps=3, save_every_steps=1)
        given = {"reward_model": start["reward_model"], "training": training} | changes
        return make_stage("ppo", start["policy"], tmp_path / name, **given)

    return make


def servers_of(server: StandIn, tmp_path: Path, **changes) -> ServersConfig:
    return ServersConfig(
        urls=[server.url], weights_folder=str(tmp_path / "weights"), **{"requests": 4, "retries": 0} | changes
    )


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("adapter", [None, LoRASpec(rank=4)], ids=["whole", "lora"])
def test_a_run_is_that_of_our_own_engine(ppo, start, read_metrics, tmp_path, adapter, behind):
    changes = {"adapter": adapter, "rollouts_behind": behind}
    run, config = ppo("own", **changes)
    run(config)
    with standing_in(start["policy"]) as server:
        run, config = ppo("served", **changes, servers=servers_of(server, tmp_path))
        run(config)
        counts = {path: server.calls.count(path) for path in set(server.calls)}
    own, served = read_metrics(tmp_path / "own"), read_metrics(tmp_path / "served")
    assert len(own) == len(served) == 3
    for one, other in zip(own, served, strict=True):
        for name in SAMPLED:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
        assert other["sampling_error"] == pytest.approx(one["sampling_error"], rel=1e-3, abs=1e-4)
    assert counts["/inference/v1/generate"] == 3 * 8
    assert counts["/v1/load_lora_adapter" if adapter else "/collective_rpc"] == 3 - behind
    assert len(list((tmp_path / "weights").iterdir())) == 1  # the folders of earlier weights are gone


def test_the_stand_in_answers_as_vllm_did(start, tmp_path):
    with standing_in(start["policy"]) as server:
        answers = vllm_answers.ask(server.url, Path(start["policy"]), tmp_path)
    assert vllm_answers.differences(ANSWERS, answers) == []


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("pause", {"status": 503}, "pause .*: status 200 is now 503"),
        ("adapter", {"type": "application/json", "answer": {}}, "text is now an object"),
        ("version of the weights", {"answer": {"weight_version": None}}, "weight_version: text is now null"),
        ("new version", {"answer": {"success": True}}, "answer.new_version is no longer there"),
        ("resume", {"answer": {"status": "resumed", "now": 1}}, "answer.now is new"),
        ("models", {"answer": ANSWERS["models"]["answer"] | {"data": [{}]}}, r"data\[0\].id is no longer there"),
    ],
)
def test_a_changed_answer_of_another_vllm_is_told(name, change, said):
    changed = ANSWERS | {name: ANSWERS[name] | change}
    assert re.search(said, "\n".join(vllm_answers.differences(ANSWERS, changed)))
    others = ANSWERS | {
        "health": ANSWERS["health"] | {"request": "elsewhere"},
        "pause": copy.deepcopy(ANSWERS["pause"]),
    }
    assert vllm_answers.differences(ANSWERS, others) == []


def test_a_lora_over_whole_weights_of_another_run_is_refused(ppo, start, tmp_path):
    """[F] Its log-probabilities would be of the other run's base."""
    with standing_in(start["policy"]) as server:
        server.version = "of another run"
        run, config = ppo("served", adapter=LoRASpec(rank=4), servers=servers_of(server, tmp_path))
        with pytest.raises(UserError, match=r"of another run where default are due.* started anew for a LoRA"):
            run(config)


@pytest.mark.parametrize("adapter", [None, LoRASpec(rank=4)], ids=["whole", "lora"])
def test_a_server_that_does_not_see_the_weights_is_told_so(ppo, start, tmp_path, adapter):
    def unseen(server):
        shutil.rmtree(tmp_path / "weights")

    with standing_in(start["policy"]) as server:
        server.faults["/v1/load_lora_adapter" if adapter else "/collective_rpc"] = unseen
        run, config = ppo("served", adapter=adapter, servers=servers_of(server, tmp_path))
        with pytest.raises(UserError, match=r"status (404|500) .*; it must see servers.weights_folder") as refused:
            run(config)
    assert "enable-scale-out" not in str(refused.value)


def test_a_server_draws_no_id_without_a_token(write_checkpoint, tokenizer, ppo, start, read_metrics, tmp_path):
    """Of a padded vocabulary; the log-probabilities of training are of the others alone, and would have none for it."""
    policy = write_checkpoint(tmp_path / "padded", "llama", vocab_size=len(tokenizer) + 400)
    with standing_in(policy) as server:
        training = TrainingConfig(batch_size=4, max_steps=1)
        run, config = ppo("served", training=training, servers=servers_of(server, tmp_path), value_model="policy")
        run(dataclasses.replace(config, policy=policy))
    assert read_metrics(tmp_path / "served")[0]["sampling_error"] < 1e-3


def test_weights_that_were_not_asked_for_end_the_run(ppo, start, tmp_path):
    def updated_by_another(server):
        server.version = "of another run"

    with standing_in(start["policy"]) as server:
        server.faults["/inference/v1/generate"] = updated_by_another
        run, config = ppo("served", servers=servers_of(server, tmp_path))
        with pytest.raises(
            UserError, match=r"has the weights of another run where .* are due: another run updates it too"
        ):
            run(config)


def test_a_server_that_is_too_slow_ends_the_run_which_goes_on_later(ppo, start, read_metrics, tmp_path):
    calls = []

    def slow(server):
        calls.append(1)
        if 8 < len(calls) <= 16:
            time.sleep(1.0)

    run, config = ppo("own")
    run(config)
    with standing_in(start["policy"]) as server:
        server.faults["/inference/v1/generate"] = slow
        run, config = ppo("served", servers=servers_of(server, tmp_path, timeout_seconds=0.5))
        with pytest.raises(UserError, match="inference/v1/generate: TimeoutError; the run goes on from its newest"):
            run(config)
        assert len(read_metrics(tmp_path / "served")) == 1
        time.sleep(1.0)
        run(replace(config, servers=replace(config.servers, timeout_seconds=60.0)))
    own, served = read_metrics(tmp_path / "own"), read_metrics(tmp_path / "served")
    assert [line["score"] for line in served] == pytest.approx([line["score"] for line in own], rel=1e-4)


def test_a_server_that_was_started_anew_reads_the_weights_again(ppo, start, read_metrics, tmp_path):
    calls = []

    def restarted(server):
        calls.append(1)
        if len(calls) == 4:  # before the second iteration's update
            server.start_anew()

    run, config = ppo("own")
    run(config)
    with standing_in(start["policy"]) as server:
        server.faults["/weight_info"] = restarted
        run, config = ppo("served", servers=servers_of(server, tmp_path))
        run(config)
    own, served = read_metrics(tmp_path / "own"), read_metrics(tmp_path / "served")
    assert [line["score"] for line in served] == pytest.approx([line["score"] for line in own], rel=1e-4)


@pytest.mark.parametrize(
    ("path", "status", "body", "said"),
    [
        ("/weight_info", 404, {"detail": "Not Found"}, r"status 404 .*Not Found.*VLLM_SERVER_DEV_MODE=1"),
        (
            "/collective_rpc",
            500,
            {"error": {"message": "Worker failed"}},
            r"collective_rpc: status 500 .*Worker failed",
        ),
    ],
)
def test_a_refusal_of_a_server_is_shown(ppo, start, tmp_path, path, status, body, said):
    with standing_in(start["policy"]) as server:
        server.faults[path] = lambda server: (status, body)
        run, config = ppo("served", servers=servers_of(server, tmp_path))
        with pytest.raises(UserError, match=said):
            run(config)


def test_a_server_that_is_not_there_is_named_before_anything_is_sampled(ppo, tmp_path):
    servers = ServersConfig(urls=["http://127.0.0.1:9"], weights_folder=str(tmp_path / "weights"), retries=0)
    run, config = ppo("served", servers=servers)
    with pytest.raises(UserError, match=r"servers: http://127.0.0.1:9/weight_info: ConnectionRefused"):
        run(config)


@pytest.mark.parametrize("body", [{}, {"choices": [{"token_ids": [1], "finish_reason": "stop"}]}])
def test_an_answer_without_token_ids_or_log_probabilities_is_refused(ppo, start, tmp_path, body):
    with standing_in(start["policy"]) as server:
        server.faults["/inference/v1/generate"] = lambda server: (200, body)
        run, config = ppo("served", servers=servers_of(server, tmp_path))
        with pytest.raises(UserError, match="answers without token ids and their log-probabilities"):
            run(config)


def test_settings_that_servers_cannot_follow_are_refused():
    data, given = DataConfig(train="x"), {"reward_model": "r"}
    servers = ServersConfig(urls=["http://a:1"], weights_folder="w")
    with pytest.raises(ValueError, match="servers read the weights of whole models and of LoRA alone"):
        PPOConfig("p", data, "o", servers=servers, adapter=DoRASpec(rank=2), **given)
    for urls in ([], ["host:8000"], ["http://user:pass@host"]):
        with pytest.raises(ValueError, match="urls"):
            ServersConfig(urls=urls, weights_folder="w")
