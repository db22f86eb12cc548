"""Log-probabilities of continuations and of texts, and responses, as benchmarks ask a model for them.

Batches hold documents end to end without padding; an input that several continuations share is computed once, and so is
the context before longer ones. The rules for the boundary between context and continuation, for the first token and for
long texts are lm-eval's, so that its figures and these agree.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.data.encoder_inputs import encode_sources
from alignment.data.rows.records import Message, Prompt
from alignment.data.text.chat import prompt_ids, stop_token_ids
from alignment.data.text.special_tokens import bos_adder, special_token_template
from alignment.data.tokenizers.tokenizer import ANCHOR, Tokenizer, encode, known_tokens
from alignment.errors import UserError, raise_all
from alignment.generation import SamplingConfig, decode_responses
from alignment.losses import token_log_probs
from alignment.models.model import Model, start_token_of
from alignment.models.outputs import check_numbers
from alignment.models.shared_prompts import prompt_sharing
from alignment.ragged import Ragged, Seq2Seq, Sharing, group_by_length, on_float64_device, runs

TOKENS_PER_FORWARD = 16_384
LOGITS_PER_TOKEN = 2**14  # beside each token of a forward: a gigabyte in float32

Request = tuple[str, str]  # context and continuation
# tokens of a context and all but the last of its continuation, and how many the continuation has
Input = tuple[tuple[int, ...], int]
Encoded = tuple[Sequence[int], Sequence[int]]  # tokens of context and continuation


class Likelihood(NamedTuple):
    """Log-probability of a continuation, nats; greedy: each of its tokens is the likeliest one."""

    log_prob: float
    greedy: bool


@dataclass(frozen=True)
class LanguageScorer:
    """A decoder, for pairs an encoder, or an encoder-decoder, which reads contexts apart; and its tokenizer.

    Attributes:
        chat: contexts are the user's messages, through the chat template.
    """

    model: Model
    tokenizer: Tokenizer
    chat: bool = False

    @cached_property
    def start_token(self) -> int | None:
        """The token that begins the responses of an encoder-decoder; None of a decoder."""
        return start_token_of(self.model)

    @property
    def positions(self) -> int:
        """Tokens of the longest text that the model reads."""
        return self.model.spec.max_positions - self.model.virtual_tokens()

    @property
    def first_token(self) -> int:
        """The token before a text without context: BOS, else EOS."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise UserError("the tokenizer has neither a BOS nor an EOS token, so that a text's first token has no context")

    @cached_property
    def sharing(self) -> Sharing:
        """True where several continuations of a context share its computation."""
        return prompt_sharing([self.model], wanted=True, note=lambda line: None)

    def context_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of contexts, with BOS where the tokenizer adds it; of an encoder's, all that the tokenizer adds."""
        if self.start_token is not None:
            asked = [[Message(role="user", content=text)] if self.chat else text for text in texts]
            return encode_sources(
                self.tokenizer, [Prompt(prompt, {}, f"context {n}") for n, prompt in enumerate(asked)]
            )
        if self.chat:
            return [prompt_ids(self.tokenizer, [{"role": "user", "content": text}]) for text in texts]
        return list(map(bos_adder(self.tokenizer), encode(self.tokenizer, texts, control_tokens=True)))

    def encode_requests(self, requests: Sequence[Request]) -> Sequence[Encoded]:
        """Tokens of contexts and continuations: of both together, cut behind as many tokens as the context alone has.

        Blanks at a context's end belong to the continuation. Without a context `first_token` stands for it. Behind a
        chat template, which has an end of its own, the continuation is encoded for itself.
        """
        moved = [(context.rstrip(), context[len(context.rstrip()) :] + tail) for context, tail in requests]
        contexts = list(dict.fromkeys(context for context, _ in moved))
        ids = dict(zip(contexts, self.context_ids(contexts), strict=True))
        if self.chat:
            tails = encode(self.tokenizer, [tail.lstrip() for _, tail in moved], after=ANCHOR)
        else:
            wholes = zip(moved, self.context_ids([context + tail for context, tail in moved]), strict=True)
            tails = [whole[len(ids[context]) :] for (context, _), whole in wholes]
        raise_all(
            f"the continuation {text[:40]!r} of {context[-40:]!r} has {len(tail)} tokens, and the model reads 1 to "
            f"{self.positions}; leave the row out"
            for (context, text), tail in zip(requests, tails, strict=True)
            if not 0 < len(tail) <= self.positions
        )
        return [(ids[context] or [self.first_token], tail) for (context, _), tail in zip(moved, tails, strict=True)]

    def likelihoods(self, requests: Sequence[Request]) -> list[Likelihood]:
        """Of each continuation after its context, which loses its beginning where both are too long for the model."""
        if self.start_token is not None:
            return self._likelihoods_apart(requests, self.start_token)
        encoded = self.encode_requests(requests)
        self._tell_cut([len(context) + len(tail) - 1 for context, tail in encoded], self.positions)
        return self.token_likelihoods(encoded)

    @torch.no_grad()
    def _likelihoods_apart(self, requests: Sequence[Request], start: int) -> list[Likelihood]:
        """Of each continuation by a decoder whose encoder reads the context; the end token is not part of it."""
        before = special_token_template(self.tokenizer).single[0]
        device = next(self.model.parameters()).device
        contexts = [ids[-self.positions :] for ids in self.context_ids([context for context, _ in requests])]
        tails = encode(self.tokenizer, [tail.strip() for _, tail in requests])
        raise_all(
            f"the continuation {tail[:40]!r} has no token"
            for (_, tail), ids in zip(requests, tails, strict=True)
            if not ids
        )
        sizes = list(map(len, tails))
        likelihoods = [Likelihood(0.0, False)] * len(requests)
        for group in group_by_length(
            [len(c) + size for c, size in zip(contexts, sizes, strict=True)], TOKENS_PER_FORWARD
        ):
            targets = Ragged.build(
                [[start, *before, *tails[i]] for i in group],
                [[False] * (1 + len(before)) + [True] * sizes[i] for i in group],
            )
            batch = Seq2Seq(Ragged.build([contexts[i] for i in group]), targets).to(device)
            logits = self.model(batch=batch, return_logits=True).logits.split([sizes[i] for i in group])
            for index, scores in zip(group, logits, strict=True):
                likelihoods[index] = likelihood_of(scores, tails[index])
        return self._checked(likelihoods, list(zip(contexts, tails, strict=True)))

    def _checked(
        self, found: list[Likelihood], encoded: Sequence[Encoded], name: Callable[[int], str] | None = None
    ) -> list[Likelihood]:
        """The likelihoods, each of which has to be finite."""

        def text_of(number: int) -> str:
            context, tail = map(self.tokenizer.decode, encoded[number])
            return f"{tail[:40]!r} after {context[-40:]!r}"

        log_probs = torch.tensor([one.log_prob for one in found])
        check_numbers(log_probs, name or text_of, f"the log-probability by {self.tokenizer.name_or_path}")
        return found

    def _tell_cut(self, lengths: Sequence[int], room: int) -> None:
        """Print how many texts lose their beginning."""
        if cut := sum(length > room for length in lengths):
            print(
                f"{cut} of {len(lengths)} texts have more tokens than the {room} that fit, and lose their beginning",
                file=sys.stderr,
            )

    def text_log_probs(self, texts: Sequence[str]) -> list[float]:
        """Of whole texts, nats; one that is longer than the model reads is cut into windows.

        Every token is predicted once, behind at least one other; the last window of a text is as long as the others.
        """
        ids = replace(self, chat=False).context_ids(texts)
        size = self.positions
        whole = [[self.first_token, *tokens] for tokens in ids]
        starts = [(row, start) for row, text in enumerate(whole) for start in range(1, len(text), size)]
        windows = []
        for row, start in starts:
            text = whole[row]
            windows.append((text[max(0, min(start + size, len(text)) - 1 - size) : start], text[start : start + size]))
        totals = [0.0] * len(texts)
        for (row, _), likelihood in zip(starts, self.token_likelihoods(windows), strict=True):
            totals[row] += likelihood.log_prob
        return totals

    @torch.no_grad()
    def token_likelihoods(
        self, requests: Sequence[Encoded], name: Callable[[int], str] | None = None
    ) -> list[Likelihood]:
        """Likelihoods of continuations of at least one token after contexts of at least one, all of them finite.

        The last token predicts nothing and is not computed, so that continuations of one token share one input. Inputs
        that begin alike, such as those of one context or behind the same examples, share the computation of their
        beginning.

        Args:
            name: number of a request -> its name in an error; None: its text.

        Raises:
            UserError: a log-probability is not finite.
        """
        alike = defaultdict[Input, list[int]](list)
        likelihoods = [Likelihood(0.0, False)] * len(requests)
        for index, (context, tail) in enumerate(requests):
            alike[tuple([*context, *tail][-self.positions - 1 : -1]), len(tail)].append(index)
        groups = group_inputs(sorted(alike)) if self.sharing else [(len(one[0]), [one]) for one in alike]
        logits = [sum(size for _, size in group) * self.model.spec.vocabulary for _, group in groups]
        sizes = [max(group[0], part // LOGITS_PER_TOKEN) for group, part in zip(groups, logits, strict=True)]
        for batch in group_by_length(sizes, TOKENS_PER_FORWARD):
            for one, scores in self._forward([groups[group_index][1] for group_index in batch]):
                for index in alike[one]:
                    likelihoods[index] = likelihood_of(scores, requests[index][1])
        return self._checked(likelihoods, requests, name)

    def _forward(self, groups: Sequence[Sequence[Input]]) -> Iterator[tuple[Input, Tensor]]:
        """Each input with the logits of all tokens at the places of its continuation, [m, V]."""
        inputs = list(chain.from_iterable(groups))
        places = {one: place for place, one in enumerate(inputs)}
        together = [[places[one] for one in group] for group in groups]
        # one more token, so that the index behind the last input is that of a token
        documents = [*(tokens for tokens, _ in inputs), (0,)]
        batch = Ragged.build_shared(documents, [[False] * len(one) for one in documents], together, share=self.sharing)
        ends = accumulate(len(tokens) for tokens, _ in inputs)
        sizes = [size for _, size in inputs]
        before = runs([end - size for end, size in zip(ends, sizes, strict=True)], sizes)
        if (shared := batch.shared) is not None:
            before = shared.documents[before]
            batch = replace(batch, shared=replace(shared, before=before))
        batch = replace(batch, target_index=before + 1).to(next(self.model.parameters()).device)
        return zip(inputs, self.model(batch=batch, return_logits=True).logits.split(sizes), strict=True)

    @property
    def is_encoder(self) -> bool:
        """True for a model that predicts masked tokens."""
        return not hasattr(self.model, "new_cache")

    @torch.no_grad()
    def pseudo_log_probs(self, pairs: Sequence[tuple[str, ...]]) -> list[float]:
        """Pseudo-log-likelihoods of both texts of each pair in turn, nats, from an encoder.

        Each token that both texts have is masked in turn, and predicted from all others of its text.

        Source: Nangia et al. 2020, arXiv:2010.00133, section 3, eq. 1.
        """
        special = set(self.tokenizer.all_special_ids)
        cells = list[tuple[int, list[int], int]]()
        for pair_index, pair in enumerate(pairs):
            texts = self.tokenizer(list(pair), verbose=False)["input_ids"]
            blocks = SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks()
            for side, ids in enumerate(texts):
                shared = chain.from_iterable(range(block[side], block[side] + block.size) for block in blocks)
                cells += [(2 * pair_index + side, ids, column) for column in shared if ids[column] not in special]
        totals = torch.zeros(2 * len(pairs), dtype=torch.float64)
        device = next(self.model.parameters()).device
        for group in group_by_length([len(ids) for _, ids, _ in cells], TOKENS_PER_FORWARD):
            rows, texts, columns = zip(*(cells[cell_index] for cell_index in group), strict=True)
            batch = Ragged.build(texts)
            index = batch.firsts + torch.tensor(columns)
            masked = batch.tokens.index_fill(0, index, self.tokenizer.mask_token_id)
            batch = replace(batch, tokens=masked, target_index=index, labels=batch.tokens[index])
            totals.index_add_(0, torch.tensor(rows), self.model(batch=batch.to(device)).log_probs.cpu().double())
        check_numbers(totals, lambda i: repr(pairs[i // 2][i % 2]), "the pseudo-log-likelihood")
        return totals.tolist()

    def responses(self, prompts: Sequence[str], sampling: SamplingConfig, stop: Sequence[str] = ()) -> list[str]:
        """One text per prompt, cut before the first stop string; a prompt too long for the model loses its start."""
        start = self.start_token
        stops = sorted(stop_token_ids(self.tokenizer))
        room = self.positions - (sampling.max_new_tokens if start is None else 0)
        if room < 1:
            raise UserError(
                f"max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in {self.positions} positions"
            )
        ids = self.context_ids(prompts)
        self._tell_cut(list(map(len, ids)), room)
        kept = [tokens[-room:] for tokens in ids]
        coder = self.tokenizer
        options = {"tokenizer": coder, "start_token": start, "vocabulary": known_tokens(coder)}
        return decode_responses(self.model, kept, sampling, stops, stop=stop, **options).texts


def likelihood_of(scores: Tensor, tail: Sequence[int]) -> Likelihood:
    """The likelihood of a continuation from the logits of its tokens, [m, V]."""
    labels = torch.tensor(tail, device=scores.device)
    total = on_float64_device(token_log_probs(scores, labels)).sum(dtype=torch.float64)
    return Likelihood(float(total), bool((scores.argmax(1) == labels).all()))


def group_inputs(inputs: Sequence[Input]) -> list[tuple[int, list[Input]]]:
    """Sorted inputs in groups that begin alike; with the tokens of each group, its beginning counted once.

    An input joins the group before it where at least a third of its tokens are the group's, more tokens are saved with
    it than without, and the group takes no more than half a forward.
    """
    groups = list[tuple[int, list[Input]]]()
    common = 0
    for one in inputs:
        size, group = groups[-1] if groups else (0, [((), 0)])
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(group[0][0], one[0], strict=False)))
        saved = (len(group) - 1) * common
        if 3 * same >= len(one[0]) and len(group) * same > saved and size < TOKENS_PER_FORWARD // 2:
            groups[-1] = size + saved + len(one[0]) - len(group) * same, [*group, one]
            common = same
        else:
            groups.append((len(one[0]), [one]))
    return groups
