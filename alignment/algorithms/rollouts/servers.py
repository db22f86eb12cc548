"""Responses from vLLM servers on other cards, while this process trains.

    VLLM_SERVER_DEV_MODE=1 vllm serve POLICY --enable-scale-out --logprobs-mode processed_logprobs   # where it samples
    alignment ppo CONFIG servers.urls='[http://10.0.0.2:8000]' servers.weights_folder=/shared/weights

Before an iteration samples, the policy's weights are written to a folder that both sides see, and every server reads
them while it is paused; a LoRA goes as an adapter of its base. Prompts are sent as token ids, and token ids come back
with their log-probabilities. A server is asked which weights it has before each iteration, and every response says
which weights drew it.

Source: the answers of vLLM 0.32, which scripts/real_servers.py asks again: `/collective_rpc` with `reload_weights` of
its development mode, its tokens-in tokens-out API, and LoRA at runtime.
"""

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from alignment.algorithms.policies import Policy, save_policy
from alignment.algorithms.rollouts.config import ServersConfig
from alignment.errors import UserError
from alignment.generation import Generation, SamplingConfig
from alignment.rewards.judge import RequestFailed, send_json
from alignment.rewards.specs import ServiceSpec
from alignment.training import Engine

WITHOUT_ROUTE = (
    "start vllm with --enable-scale-out, and with VLLM_SERVER_DEV_MODE=1, or for a LoRA with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; "
)
UNREAD = "it must see servers.weights_folder under the same path, and is to be started anew after a failed reload; "
READERS = ("collective_rpc", "v1/load_lora_adapter")
UNCHANGED = "default"  # version of the weights that a server started with, which an adapter is trained over
Drawn = tuple[list[int], list[float], bool]  # tokens of a response, their log-probabilities, and True where it ended


class ServerSampler:
    """The servers of one run; all ranks call `update` together, and each asks one server for its own prompts."""

    def __init__(self, config: ServersConfig, engine: Engine, policy: Policy):
        """Prepare the servers for new weights; UserError where one does not answer."""
        self.config = config
        self.engine = engine
        self.policy = policy
        # Versions of another run, or of this one before it was stopped, are not ours.
        self._run = engine.process_group.broadcast_object(uuid.uuid4().hex[:8])
        self._version = ""
        self._pool = ThreadPoolExecutor(config.requests)
        self._asked = list[Future[Any]]()
        engine.process_group.on_main(self._prepare)

    def update(self) -> None:
        """Give the servers the policy's present weights; a collective operation. Responses on their way come first."""
        wait(self._asked)
        self._asked.clear()
        old = self._version
        self._version = f"{self._run}-{self.engine.step}"
        if old != self._version:
            save_policy(self.engine, self.policy, self._folder(self._version))
        self.engine.process_group.on_main(lambda: [self._load(url, old) for url in self.config.urls])
        if old not in ("", self._version) and self.engine.process_group.is_main:
            shutil.rmtree(self._folder(old), ignore_errors=True)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        numbers: Sequence[int],
        stop_ids: Sequence[int],
    ) -> Future[Generation]:
        """Begin with responses to this rank's prompts by the weights of the last `update`; see `decode_responses`."""
        url = self.config.urls[self.engine.process_group.rank % len(self.config.urls)]
        asked = [
            self._pool.submit(self._respond, url, list(prompt), sampling, row_number, list(stop_ids))
            for prompt, row_number in zip(prompts, numbers, strict=True)
        ]
        together = self._pool.submit(_together, asked)  # waits in the pool only once all requests have left its queue
        self._asked.append(together)
        return together

    def _folder(self, version: str) -> Path:
        return Path(self.config.weights_folder).absolute() / version

    # One server

    def _prepare(self) -> None:
        for url in self.config.urls:
            self._call(url, "weight_info" if self.policy.adapter is None else "v1/models")

    def _load(self, url: str, old: str) -> None:
        """Let a server read the weights that it does not have: after an update, or after it was started anew."""
        version = self._version
        folder = str(self._folder(self._version) / "model")
        if self.policy.adapter is not None:
            there = {model["id"] for model in self._call(url, "v1/models")["data"]}
            if version not in there:
                self._call(url, "v1/load_lora_adapter", {"lora_name": version, "lora_path": folder})
            if old in there - {version}:
                self._call(url, "v1/unload_lora_adapter", {"lora_name": old})
        elif self._call(url, "weight_info")["weight_version"] != version:
            self._call(url, "pause?mode=wait", {})
            self._call(url, "collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            self._call(url, "update_weight_version", {"new_version": version})
            self._call(url, "reset_prefix_cache", {})  # its keys and values are of the weights before
            self._call(url, "resume", {})
            self._check_versions(url, {self._call(url, "weight_info")["weight_version"]})

    def _respond(
        self, url: str, prompt: list[int], sampling: SamplingConfig, number: int, stop_ids: list[int]
    ) -> Drawn:
        params = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": (sampling.seed << 32 | number) % 2**63,
            "stop_token_ids": stop_ids,
            "ignore_eos": True,
            "logprobs": 1,
            "skip_special_tokens": False,
        }
        model = self.policy.model
        if model.known_tokens is not None and model.known_tokens < model.spec.vocabulary:  # no token has the last ids
            params["logit_bias"] = {
                str(token_id): -100.0 for token_id in range(model.known_tokens, model.spec.vocabulary)
            }
        body: dict[str, object] = {"token_ids": prompt, "sampling_params": params}
        answer = self._call(
            url, "inference/v1/generate", body | ({"model": self._version} if self.policy.adapter else {})
        )
        try:
            [choice] = answer["choices"]
            tokens = choice["token_ids"]
            log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            versions = {span["version"] for span in choice.get("weight_versions") or []}
            complete = len(log_probs) == len(tokens) > 0 and choice["finish_reason"] in ("stop", "length")
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"servers: {url} answers without token ids and their log-probabilities") from error
        if not complete:
            raise UserError(
                f"servers: {url} ended a response by {choice['finish_reason']!r}, with {len(tokens)} tokens and "
                f"{len(log_probs)} log-probabilities"
            )
        self._check_versions(url, versions)
        return tokens, log_probs, choice["finish_reason"] == "stop"

    def _check_versions(self, url: str, found: set[str]) -> None:
        due = self._version if self.policy.adapter is None else UNCHANGED
        if found - {due}:
            raise UserError(
                f"servers: {url} has the weights {', '.join(map(str, found))} where {due} are due: another run "
                "updates it too or has before, or it was started anew; give each run servers of its own, started anew "
                "for a LoRA, and start this one again"
            )

    def _call(self, url: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        """The answer of a server to a body that is posted, or without one to a GET."""
        service = ServiceSpec(
            f"{url.rstrip('/')}/{path}",
            key_variable=self.config.key_variable,
            timeout_seconds=self.config.timeout_seconds,
            retries=self.config.retries,
        )
        try:
            return send_json(service, None if body is None else json.dumps(body).encode(), text_too=True)
        except RequestFailed as error:
            advice = UNREAD if path in READERS else ""
            if str(error) == "status 404" and '"error"' not in error.answer:  # of a route; a refusal has that key
                advice = WITHOUT_ROUTE
            raise UserError(
                f"servers: {service.url}: {error}{error.answer and f' ({error.answer})'}; {advice}the run goes on from "
                "its newest checkpoint when the server answers and the same command is given again"
            ) from error


def _together(asked: Sequence[Future[Drawn]]) -> Generation:
    """All responses; where one has failed the others are given up."""
    try:
        drawn = [future.result() for future in asked]
    except UserError:
        for future in asked:
            future.cancel()
        raise
    tokens, log_probs, ended = (list(column) for column in zip(*drawn, strict=True))
    return Generation([], tokens, log_probs, ended)
