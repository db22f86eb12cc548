"""The decoding engine: requests of all kinds decode side by side, and waiting ones enter as others finish.

    engine = DecodingEngine(model.eval(), max_rows=64, tokenizer=tokenizer)
    number = engine.add(DecodingRequest(prompt_ids, SamplingConfig(max_new_tokens=100, temperature=0.7, seed=1), row=0,
                                stop_ids=[eos], stop=["User:"]))
    while engine.unfinished:
        for event in engine.step():   # one forward pass: a `TokenEvent` for each request that got a token
            ...                       # event.request == number, event.token, .log_prob, .text, .finish

`step` prefills waiting prompts when enough cache rows are free, else it decodes one token for every running request;
requests may be added between steps, from one thread. A response depends on the fields of its request and
the weights only, up to rounding: neither on the requests beside it nor on the order in which they came. Equal prompts
are computed once as long as one of them waits, so n samples of a prompt are n requests that differ in `row`.

A cache with rows that can be filled one by one (our decoders) is filled continuously. Others (encoder-decoders, classes
of transformers) take a group of waiting requests at once, and the next group when the last row of it has finished.

`decode_responses` samples one response for each prompt of a fixed set. Where every forward is a collective operation,
as with sharded weights, all ranks run equally many of them: a rank that has finished goes on with one row whose tokens
are dropped, until no rank has a running row.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.generation.cuda_graphs import GraphedDecoder
from alignment.generation.filling import PromptFiller, PromptKey
from alignment.generation.requests import (
    DecodingRequest,
    IncrementalText,
    RunningRequest,
    SamplingConfig,
    TokenEvent,
    check_failed,
)
from alignment.generation.sampling import RowSampler, SampledTokens, TokenHistory
from alignment.models.decoding_weights import decoding_weights
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.norms import on_gpu
from alignment.models.model import Model

CHECK_STEPS = 8  # steps between two readings of the drawn tokens, where a reading waits for a GPU or for other ranks
FREE_SHARE = 0.125  # of the rows that are free before waiting prompts are prefilled into them
LIVE_SHARE = 0.75  # of the rows that still run when the others are dropped and nothing waits
GPU_LIVE_SHARE = 0.5  # on a GPU, where rows are cheap and new shapes are not
OUT_OF_MEMORY = (
    "out of memory while sampling {count} responses side by side, each with room for {longest} tokens in the cache: "
    "lower micro_rollout_batch_size (in ppo) or batch_size (in generate and evaluate winrate), which changes no "
    "response"
)


class DecodingEngine:
    """Decodes requests; how to use it is said above.

    Attributes:
        running: the request in each slot, a row of the cache; None: it is free.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_rows: int = 64,
        start_token: int | None = None,
        tokenizer: Tokenizer | None = None,
        cuda_graphs: bool = False,
        vocabulary: int | None = None,
    ):
        """An engine without requests, of which `max_rows` are decoded side by side.

        Args:
            model: in eval mode for exact log-probabilities; its weights must not change while requests run.
            start_token: begins each response of an encoder-decoder model and is no part of it; None: a decoder.
            tokenizer: for stop strings and `TokenEvent.text`; None: neither.
            cuda_graphs: start the kernels of a step by one call, see cuda_graphs.py; UserError where that cannot be.
            vocabulary: number of ids that have a token, see `known_tokens`; the others of a padded vocabulary have no
                probability. None: all ids have.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        self._model = model
        self._max_rows = max_rows
        self._tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._vocabulary = vocabulary
        self._graphs = GraphedDecoder(model) if cuda_graphs else None
        self._filler = PromptFiller(model, self._device, start_token)
        self._skip_special_tokens = start_token is not None
        self._start = None if start_token is None else [start_token]
        self._waiting: deque[RunningRequest] = deque()
        self._waiting_prompts: Counter[PromptKey] = Counter()
        self.running: list[RunningRequest | None] = []
        self._newest = torch.zeros(0, dtype=torch.long, device=self._device)  # last token of each row
        self._sampler: RowSampler | None = None  # of all rows; None: they have changed
        self._history: TokenHistory | None = None  # where a request has a logits processor
        self._unseen: list[SampledTokens] = []  # drawn since the last reading
        self._most_unseen = 1 if self._device.type == "cpu" else CHECK_STEPS
        self._numbers = self._room = 0
        self._equal_limits = True  # the rows of a group may all draw equally many tokens
        self._failed = False  # True after a request that has ended with an error

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + self._live()

    def add(self, request: DecodingRequest) -> int:
        """Let a request wait for a free row and return its number; UserError where it exceeds the model's positions."""
        if request.stop and self._tokenizer is None:
            raise ValueError("stop strings need an engine with a tokenizer")
        self.expect(request.prompt, request.sampling.max_new_tokens + self._model.adapter_tokens(request.adapter))
        text = None
        if self._tokenizer is not None:
            text = IncrementalText(self._tokenizer, request.stop, skip_special_tokens=self._skip_special_tokens)
        self._numbers += 1
        self._waiting.append(RunningRequest(self._numbers, request, text))
        self._waiting_prompts[_prompt_of(request)] += 1
        return self._numbers

    def expect(self, longest_prompt: Sequence[int], max_new_tokens: int) -> None:
        """Make rows that are built from now on long enough for such a request; UserError where it fits no positions."""
        room = len(self._start or longest_prompt) + max_new_tokens
        if room > self._room:
            self._model.new_cache(0, room)  # refuses what does not fit the positions
            self._room = room

    def step(self) -> list[TokenEvent]:
        """One forward pass: prefill waiting prompts where enough rows are free, else decode a token per request."""
        if self._may_admit():
            self._admit()
        elif self._live():
            self._decode()
        return self._collect(events=True)

    @torch.no_grad()
    def run(self, largest: Callable[[int], int] | None = None, *, idle_room: int = 1) -> dict[int, RunningRequest]:
        """Go on until all requests have finished, or one has failed; all that were unfinished before, by their numbers.

        `largest`: see `decode_responses`; `idle_room` tokens have room in a row that is decoded for other ranks' sake
        alone.
        """
        everyone = {row.number: row for row in [*self._waiting, *self.running] if row is not None}
        with decoding_weights(self._model):
            if largest is not None:
                self._run_with_others(largest, idle_room)
            while self.unfinished and not self._failed:
                if self._may_admit():
                    self._admit()
                else:
                    self._decode()
                self._collect_if_due()
        if self._graphs is not None:  # they read the decoding weights, which are gone
            self._graphs = GraphedDecoder(self._model)
        return everyone

    def _run_with_others(self, largest: Callable[[int], int], idle_room: int) -> None:
        """All ranks prefill at the same time and decode equally many steps, until none has a request."""
        while True:
            # Where rows are not filled one by one, all ranks begin their groups at the same time.
            others = self._live() if self._filler.continuous else largest(self._live())
            admits = self._may_admit() and (self._filler.continuous or others == 0)
            prefills = largest(int(admits))
            if prefills:
                forwards = self._filler.forwards
                if admits:
                    self._admit()
                if self._filler.forwards == forwards:
                    self._filler.idle(idle_room)
                    if not self.running or not self._filler.continuous:
                        self.running = [None]
                        self._sampler = None
                        self._newest = torch.zeros(1, dtype=torch.long, device=self._device)
            left = max((row.steps_left for row in self.running if row is not None), default=0)
            steps = largest(min(CHECK_STEPS, left))
            for _ in range(steps):
                self._decode()
                self._collect_if_due()  # a row at its limit must not outgrow the cache
            self._collect()
            if not prefills and not steps:
                return

    def _live(self) -> int:
        return sum(row is not None for row in self.running)

    def _may_admit(self) -> bool:
        """True where enough rows are free for waiting prompts; a prefill costs a step of all rows that already run."""
        live = self._live()
        if not self._waiting or (live and not self._filler.continuous):
            return False
        return self._max_rows - live >= min(len(self._waiting), max(1, int(FREE_SHARE * self._max_rows)))

    @torch.no_grad()
    def _admit(self) -> None:
        """Prefill waiting prompts into all free rows and draw the first token of each response."""
        self._collect()
        if not self._filler.continuous:
            self.running = []
        count = min(len(self._waiting), self._max_rows - self._live())
        admitted = [self._waiting.popleft() for _ in range(count)]
        prompts = [_prompt_of(row.request) for row in admitted]
        self._waiting_prompts -= Counter(prompts)
        free = sum(row is None for row in self.running)
        self.running += [None] * (count - free)
        slots = [slot for slot, row in enumerate(self.running) if row is None][:count]
        for slot, row in zip(slots, admitted, strict=True):
            self.running[slot] = row
        self._equal_limits = len({row.request.sampling.max_new_tokens for row in admitted}) == 1
        logits = self._filler.fill(
            prompts, slots, rows=len(self.running), room=self._room, waiting=self._waiting_prompts
        )
        self._remember(prompts, slots, admitted)
        self._sampler = None
        sampler = RowSampler(admitted, self._device, slots=slots, vocabulary=self._vocabulary)
        drawn = sampler.draw(logits, self._history)
        where = torch.tensor(slots, device=self._device)
        grown = self._newest.new_zeros(len(self.running))
        grown[: len(self._newest)] = self._newest[: len(grown)]
        self._newest = grown.index_copy(0, where, drawn.tokens)
        self._unseen.append(drawn)
        if self._history is not None:
            self._history.append(where, drawn.tokens)

    @torch.no_grad()
    def _decode(self) -> None:
        """One more token for every row."""
        if self._graphs is not None:
            assert isinstance(self._filler.cache, Cache)
            logits = self._graphs.decode(self._newest, self._filler.cache)
        else:
            with self._model.using_adapters([None if row is None else row.request.adapter for row in self.running]):
                logits = self._model.decode(self._newest, self._filler.cache)
        self._filler.advance()
        if self._sampler is None:
            steps = self._most_unseen
            self._sampler = RowSampler(self.running, self._device, steps=steps, vocabulary=self._vocabulary)
        drawn = self._sampler.draw(logits, self._history)
        self._newest = drawn.tokens
        self._unseen.append(drawn)
        if self._history is not None:
            self._history.append(torch.arange(len(drawn.tokens), device=self._device), drawn.tokens)

    def _collect_if_due(self) -> None:
        """Read the drawn tokens where that costs nothing, a row may draw no more, or `CHECK_STEPS` have gone by."""
        full = any(row is not None and row.steps_left == 0 for row in self.running)
        if full or len(self._unseen) >= self._most_unseen:
            self._collect()

    def _collect(self, *, events: bool = False) -> list[TokenEvent]:
        """Hand the drawn tokens to their requests, and with `events` return them; rows of ended requests are free."""
        token_events = [event for step in _read(self._unseen) for event in _hand_out(*step, with_events=events)]
        self._unseen.clear()
        for slot, row in enumerate(self.running):
            if row is not None and row.finish is not None:
                self._failed |= row.finish == "error"
                self.running[slot] = None
        if self._filler.cache is not None:
            if not self._waiting or not self._filler.continuous:
                self._compact()
            self._filler.release([slot for slot, row in enumerate(self.running) if row is None])
        return token_events

    def _compact(self) -> None:
        """Drop free rows where they are many, or at once where their documents would outgrow the cache."""
        live = self._live()
        share = GPU_LIVE_SHARE if on_gpu(self._newest) else LIVE_SHARE
        share = share if self._equal_limits or self._filler.continuous else 1.0
        if max(live, 1) > share * len(self.running) or live == len(self.running):
            return
        keep = [slot for slot, row in enumerate(self.running) if row is not None] or [0]
        self._filler.keep(keep)
        index = torch.tensor(keep, device=self._device)
        self.running = [self.running[slot] for slot in keep]
        self._newest = self._newest[index]
        self._sampler = None
        if self._history is not None:
            self._history.keep(index)

    def _remember(self, prompts: Sequence[PromptKey], slots: Sequence[int], rows: Sequence[RunningRequest]) -> None:
        """Note the tokens before the responses, where a logits processor needs them."""
        needed = [row.request.sampling.needs_history for row in rows]
        if self._history is None and any(needed):
            self._history = TokenHistory(self._device)
        if self._history is not None:
            self._history.reserve(len(self.running), self._room)
            for prompt, slot, wanted in zip(prompts, slots, needed, strict=True):
                if wanted:
                    self._history.put(slot, self._start or prompt.tokens)


def _prompt_of(request: DecodingRequest) -> PromptKey:
    return PromptKey(tuple(request.prompt), request.adapter)


def _read(steps: Sequence[SampledTokens]) -> Iterator[tuple[SampledTokens, list[int], list[float]]]:
    """The tokens and log-probabilities of each step, brought from the device in one piece."""
    if not steps:
        return
    # float32 holds the log-probabilities as they are, and whole numbers up to 2^24, which no vocabulary reaches.
    numbers = torch.cat([part.float() for drawn in steps for part in (drawn.tokens, drawn.log_probs)]).tolist()
    for drawn in steps:
        count = len(drawn.rows)
        yield drawn, list(map(int, numbers[:count])), numbers[count : 2 * count]
        numbers = numbers[2 * count :]


def _hand_out(
    drawn: SampledTokens, tokens: Sequence[int], log_probs: Sequence[float], *, with_events: bool
) -> list[TokenEvent]:
    """The events of drawn tokens, where they are wanted; tokens that a request drew behind its end are dropped."""
    events = []
    for index, row in enumerate(drawn.rows):
        if row is None or row.finish is not None:
            continue
        if not math.isfinite(log_probs[index]):
            events.append(row.fail(tokens[index]))
            continue
        if not with_events and row.text is None:
            row.extend(tokens[index], log_probs[index])
            continue
        events.append(row.accept(tokens[index], log_probs[index]))
    return events


# One response for each prompt of a fixed set


@dataclass(frozen=True)
class Generation:
    """Generated responses, one entry per prompt."""

    texts: list[str]  # cut before the stop string or token; empty where no tokenizer was given
    token_ids: list[list[int]]  # the stop token included where there is one
    log_probs: list[list[float]]  # of each token, nats, under the distribution it was sampled from
    ended: list[bool]  # the last token is a stop token or completes a stop string; False at the maximum length


@torch.no_grad()
def decode_responses(
    model: Model,
    prompts: Sequence[Sequence[int]],
    config: SamplingConfig,
    stop_ids: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    batch_size: int = 256,
    start_token: int | None = None,
    largest: Callable[[int], int] | None = None,
    stop: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    adapters: Sequence[str | None] | None = None,
    cuda_graphs: bool = False,
    vocabulary: int | None = None,
) -> Generation:
    """Sample one response for each prompt.

    Args:
        model: in eval mode for exact log-probabilities.
        prompts: token ids, none empty; for an encoder-decoder model the encoder's inputs.
        rows: global number of each prompt, which fixes its random numbers; None counts from 0.
        batch_size: responses decoded side by side; equal prompts are computed once.
        start_token: begins each response of an encoder-decoder model and is no part of it; None: a decoder.
        largest: gives the largest of all ranks' numbers, where each forward of the model is a collective operation. All
            ranks must then call this function, each with prompts of its own, and run equally many forwards. No response
            depends on it. None: this process decodes by itself.
        stop: texts that end a response, whose tokens reach to the one that completes the text.
        tokenizer: for `stop`.
        adapters: of each prompt, as in `DecodingRequest`; None: none has one.
        cuda_graphs, vocabulary: as in `DecodingEngine`.

    Raises:
        UserError: the device has no room for `batch_size` cache rows; logits that are not finite, with the number in
            `rows`.
    """
    numbers = list(range(len(prompts))) if rows is None else list(rows)
    named = [None] * len(prompts) if adapters is None else adapters
    # Prompts of similar length side by side share the width of the cache with little waste; no response depends on it.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    try:
        options: dict[str, Any] = {"start_token": start_token, "tokenizer": tokenizer, "cuda_graphs": cuda_graphs}
        engine = DecodingEngine(model, max_rows=batch_size, vocabulary=vocabulary, **options)
        if order:
            engine.expect(prompts[order[-1]], config.max_new_tokens)
        request = partial(DecodingRequest, sampling=config, stop_ids=stop_ids, stop=stop)
        added = [engine.add(request(prompts[i], row=numbers[i], adapter=named[i])) for i in order]
        by_number = engine.run(largest, idle_room=1 + config.max_new_tokens)
    except torch.OutOfMemoryError as error:
        longest = max(map(len, prompts)) + config.max_new_tokens
        raise UserError(OUT_OF_MEMORY.format(count=min(batch_size, len(prompts)), longest=longest)) from error
    by_prompt = dict(zip(order, (by_number[request_number] for request_number in added), strict=True))
    check_failed({numbers[i]: len(row.tokens) + 1 for i, row in by_prompt.items() if row.finish == "error"})
    ordered = [by_prompt[i] for i in range(len(prompts))]
    return Generation(
        [row.text.text for row in ordered if row.text is not None],
        [row.tokens for row in ordered],
        [row.log_probs for row in ordered],
        [row.finish == "stop" for row in ordered],
    )
