"""The command `alignment serve`: a model behind OpenAI's protocol, on loopback unless `--allow-remote` is given."""

import ipaddress
import os
import queue
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

from alignment.adapters import check_adapters, load_adapter, load_adapters
from alignment.data.rows.records import Messages
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary, known_tokens
from alignment.errors import UserError, install_advice
from alignment.generation.engine import DecodingEngine
from alignment.generation.generate import read_prompts
from alignment.loading import best_device, describe_stop_tokens, find_directory, load_model, load_tokenizer
from alignment.models.model import start_token_of
from alignment.models.weights_config import DEFAULT_WEIGHTS, WeightsConfig
from alignment.serving.app import ModelThread, ServedModel, build_app


@dataclass(frozen=True)
class ServeConfig:
    """Settings of `alignment serve`.

    Attributes:
        model: directory or Hub name; also its name in requests, where `name` is None.
        adapter: directory of an adapter for it.
        chat_template: a built-in one's name or a Jinja file; None: the tokenizer's own.
        weights: type that the model is held and computes in, and whether it is quantized.
        name: of the model in requests.
        max_batch: responses decoded side by side; further ones wait.
        max_tokens: longest chat response where a request names none.
        adapters: name in requests -> directory, of adapters that are served beside the model and over its weights.
    """

    model: str
    adapter: str | None = None
    chat_template: str | None = None
    weights: WeightsConfig = DEFAULT_WEIGHTS
    name: str | None = None
    max_batch: int = 32
    max_tokens: int = 512
    adapters: Mapping[str, str] = field(default_factory=dict)


def serve_model(
    config: ServeConfig, host: str, port: int, *, allow_remote: bool = False, key_variable: str | None = None
) -> None:
    """Serve a model until a signal comes.

    Args:
        port: 0 takes a free one, which is printed.
        allow_remote: `host` may be an address that other machines reach.
        key_variable: environment variable with the key that clients have to send as a bearer token; None: no key.
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"alignment serve needs {' and '.join(missing)}: {install_advice('serve')}")
    if key_variable is not None and not os.environ.get(key_variable):
        raise UserError(
            f"--api-key-env {key_variable}: the environment has no such variable; set it, or leave the option out"
        )
    key = os.environ[key_variable] if key_variable is not None else None
    remote = not is_loopback(host)
    if remote and not allow_remote:
        raise UserError(
            f"--host {host}: other machines can reach it, and whoever does can use the model; add --allow-remote if "
            "that is wanted (--api-key-env NAME asks for a key), or leave --host out"
        )
    import uvicorn

    with listen(host, port) as listener, load_served(config) as (served, thread):
        app = build_app(served, thread, key=key, remote=remote)
        address = f"[{host}]" if ":" in host else host
        print(
            f"{served.name} is served at http://{address}:{listener.getsockname()[1]}/v1 in OpenAI's protocol",
            file=sys.stderr,
            flush=True,
        )
        settings = uvicorn.Config(
            app, log_level="warning", lifespan="off", server_header=False, timeout_graceful_shutdown=5
        )
        uvicorn.Server(settings).run(sockets=[listener])


@contextmanager
def load_served(config: ServeConfig) -> Iterator[tuple[ServedModel, ModelThread]]:
    """The model for the routes, and the thread that runs it."""
    # A tokenizer must not be used by two threads at once: two encode prompts, so that a long one does not hold up the
    # others, one names tokens in answers, one decodes.
    tokenizer, other, naming, decoding = (load_tokenizer(config.model, config.chat_template) for _ in range(4))
    encoders: queue.SimpleQueue[Tokenizer] = queue.SimpleQueue()
    encoders.put(tokenizer)
    encoders.put(other)
    adapters = {name: find_directory(directory) for name, directory in config.adapters.items()}
    check_adapters(adapters)
    if (config.name or config.model) in config.adapters:
        raise UserError(
            f"--adapters: {config.name or config.model} is the model's own name in requests; choose another"
        )
    model = load_model(config.model, config.weights.dtype, best_device(), quantize=config.weights.quantize)
    if config.adapter is not None:
        model = load_adapter(model, find_directory(config.adapter)).eval()
    if adapters:
        model = load_adapters(model, adapters)
    check_vocabulary(tokenizer, model.spec.vocabulary)
    start = start_token_of(model)
    print(describe_stop_tokens(config.model, tokenizer), file=sys.stderr)
    if tokenizer.chat_template is None and start is None:
        print(
            "the model has no chat template: it answers /v1/completions only (--chat-template sets one)",
            file=sys.stderr,
        )

    def encode(prompt: str | Messages) -> list[int]:
        encoder = encoders.get()
        try:
            return read_prompts(encoder, [prompt], start)[0]
        finally:
            encoders.put(encoder)

    served = ServedModel(
        config.name or config.model,
        naming,
        encode,
        tuple(sorted(stop_token_ids(tokenizer))),
        vocabulary=model.spec.vocabulary,
        positions=model.spec.max_positions - model.virtual_tokens(),
        reads_apart=start is not None,
        max_tokens=config.max_tokens,
        adapters={name: model.adapter_tokens(name) for name in adapters},
    )

    def make_engine() -> DecodingEngine:
        known = known_tokens(decoding)
        return DecodingEngine(model, max_rows=config.max_batch, start_token=start, tokenizer=decoding, vocabulary=known)

    with ModelThread(make_engine) as thread:
        yield served, thread


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; UserError where the port is in use or the address is not this machine's."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port}: {error}; --port 0 takes a free port") from error
