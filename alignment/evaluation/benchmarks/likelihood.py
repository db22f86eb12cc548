"""Log-probabilities of continuations and of texts, and responses, as benchmarks ask a model for them.

Batches hold documents end to end without padding; an input that several continuations share is computed once, and so is the
context before longer ones. The rules for the boundary between context and continuation, for the first token and for long
texts are lm-eval's, so that its figures and these agree.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from alignment.data.text.chat import prompt_ids, stop_token_ids
from alignment.data.text.special_tokens import bos_adder
from alignment.data.tokenizers.tokenizer import Tokenizer, encode
from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses
from alignment.models.model import Model
from alignment.models.shared_prompts import prompt_sharing
from alignment.ragged import Ragged, Sharing, fill_groups, group_by_length, runs

TOKENS_PER_FORWARD = 16_384
LOGITS_PER_FORWARD = 2**28  # a gigabyte in float32

Request = tuple[str, str]  # context and continuation
Tokens = tuple[int, ...]
Encoded = tuple[Sequence[int], Sequence[int]]  # tokens of context and continuation


class Likelihood(NamedTuple):
    """Log-probability of a continuation, nats; greedy: each of its tokens is the likeliest one."""

    log_prob: float
    greedy: bool


@dataclass(frozen=True)
class LanguageScorer:
    """A decoder, or for pairs an encoder, and its tokenizer.

    Attributes:
        chat: contexts are the user's messages, through the chat template.
    """

    model: Model
    tokenizer: Tokenizer
    chat: bool = False

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
        """Tokens of contexts, BOS included where the tokenizer adds it."""
        if self.chat:
            return [prompt_ids(self.tokenizer, [{"role": "user", "content": text}]) for text in texts]
        return list(map(bos_adder(self.tokenizer), encode(self.tokenizer, texts, control_tokens=True)))

    def encode_requests(self, requests: Sequence[Request]) -> Sequence[Encoded]:
        """Tokens of contexts and continuations: those of both together, cut behind as many tokens as the context alone has.

        Blanks at a context's end belong to the continuation. Without a context `first_token` stands for it. Behind a chat
        template, which has an end of its own, the continuation is encoded for itself.
        """
        moved = [(context.rstrip(), context[len(context.rstrip()) :] + tail) for context, tail in requests]
        contexts = list(dict.fromkeys(context for context, _ in moved if context))
        ids, found = dict(zip(contexts, self.context_ids(contexts), strict=True)), list[Encoded]()
        if self.chat:
            tails = encode(self.tokenizer, [tail.lstrip() for _, tail in moved], follows=True)
            found += [(ids[context], tail) for (context, _), tail in zip(moved, tails, strict=True)]
        else:
            with_bos, first = bos_adder(self.tokenizer), [self.first_token]
            wholes = encode(self.tokenizer, [context + tail for context, tail in moved], control_tokens=True)
            found += [
                (ids[context], with_bos(whole)[len(ids[context]) :])
                if context
                else (first, whole[whole[:1] == first :])
                for (context, _), whole in zip(moved, wholes, strict=True)
            ]
        for (context, text), (_, tail) in zip(requests, found, strict=True):
            if not 0 < len(tail) <= self.positions:
                what = f"{len(tail)} tokens, and the model reads 1 to {self.positions}; leave the row out"
                raise UserError(f"the continuation {text[:40]!r} of {context[-40:]!r} has {what}")
        return found

    def likelihoods(self, requests: Sequence[Request]) -> list[Likelihood]:
        """Of each continuation after its context, which loses its beginning where both are too long for the model."""
        return self.token_likelihoods(self.encode_requests(requests), self.sharing)

    def text_log_probs(self, texts: Sequence[str]) -> list[float]:
        """Of whole texts, nats; one that is longer than the model reads is cut into windows.

        Every token is predicted once, behind at least one other; the last window of a text is as long as the others.
        """
        ids, size = replace(self, chat=False).context_ids(texts), self.positions
        whole = [[self.first_token, *tokens] for tokens in ids]
        starts = [(row, start) for row, text in enumerate(whole) for start in range(1, len(text), size)]
        windows = [
            (text[max(0, min(start + size, len(text)) - 1 - size) : start], text[start : start + size])
            for text, start in ((whole[row], start) for row, start in starts)
        ]
        totals = [0.0] * len(texts)
        for (row, _), found in zip(starts, self.token_likelihoods(windows), strict=True):
            totals[row] += found.log_prob
        return totals

    @torch.no_grad()
    def token_likelihoods(self, requests: Sequence[Encoded], share: Sharing = False) -> list[Likelihood]:
        """Likelihoods of continuations of at least one token after contexts of at least one.

        The last token predicts nothing and is not computed, so that continuations of one token share one input.

        Args:
            share: inputs that begin alike, such as those of one context or behind the same examples, share the computation
                of their beginning.
        """
        of_input = defaultdict[Tokens, list[int]](list)
        for number, (context, tail) in enumerate(requests):
            of_input[tuple([*context, *tail][-self.positions - 1 : -1])].append(number)
        groups, sizes = group_inputs(sorted(of_input), share is not False), list[int]()
        for tokens, group in groups:
            logits = (
                sum(len(requests[number][1]) for read in group for number in of_input[read])
                * self.model.spec.vocabulary
            )
            sizes.append(max(tokens, TOKENS_PER_FORWARD * logits // LOGITS_PER_FORWARD))
        found: list[Likelihood] = [Likelihood(0.0, False)] * len(requests)
        order = sorted(range(len(groups)), key=lambda group: max(map(len, groups[group][1])))
        for batch in fill_groups(order, sizes, TOKENS_PER_FORWARD):
            parts = [groups[group][1] for group in batch]
            numbers = [number for read in chain.from_iterable(parts) for number in of_input[read]]
            tails = [(read, requests[number][1]) for read in chain.from_iterable(parts) for number in of_input[read]]
            for number, one in zip(numbers, self._forward(parts, tails, share), strict=True):
                found[number] = one
        return found

    def _forward(
        self, groups: Sequence[Sequence[Tokens]], tails: Sequence[tuple[Tokens, Sequence[int]]], share: Sharing
    ) -> list[Likelihood]:
        """Likelihoods of `tails`, each behind an input, which it ends and goes one token beyond."""
        documents = list(chain.from_iterable(groups))
        places = {read: place for place, read in enumerate(documents)}
        together = [[places[read] for read in group] for group in groups]
        ends = list(accumulate(map(len, documents)))
        documents.append(documents[0][:1])  # so that the index behind the last input is that of a token
        batch = Ragged.build_shared(documents, [[False] * len(read) for read in documents], together, share=share)
        sizes = [len(tail) for _, tail in tails]
        before = runs([ends[places[read]] - len(tail) for read, tail in tails], sizes)
        rows = torch.repeat_interleave(torch.arange(len(tails)), torch.tensor(sizes))
        if (shared := batch.shared) is not None:
            before = shared.documents[before]
            batch = replace(batch, shared=replace(shared, before=before))
        labels = torch.tensor([token for _, tail in tails for token in tail])
        batch = replace(batch, target_index=before + 1, target_rows=rows, labels=labels)
        device = next(self.model.parameters()).device
        logits = self.model(batch=batch.to(device), return_logits=True).logits.float()
        chosen = logits.gather(1, labels.to(device)[:, None]).squeeze(1)
        values = torch.stack([chosen - logits.logsumexp(1), (chosen < logits.amax(1)).float()]).double().cpu()
        sums = torch.zeros(2, len(tails), dtype=torch.float64).index_add_(1, rows, values)
        return [Likelihood(total, missed == 0) for total, missed in zip(*sums.tolist(), strict=True)]

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
        special, cells = set(self.tokenizer.all_special_ids), list[tuple[int, list[int], int]]()
        for number, pair in enumerate(pairs):
            texts = self.tokenizer(list(pair), verbose=False)["input_ids"]
            for first, second, size in SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks():
                for side, ids, start in ((0, texts[0], first), (1, texts[1], second)):
                    columns = range(start, start + size)
                    cells += [(2 * number + side, ids, column) for column in columns if ids[column] not in special]
        totals, device = torch.zeros(2 * len(pairs), dtype=torch.float64), next(self.model.parameters()).device
        for group in group_by_length([len(ids) for _, ids, _ in cells], TOKENS_PER_FORWARD):
            rows, texts, columns = zip(*(cells[number] for number in group), strict=True)
            batch = Ragged.build(texts)
            index = batch.firsts + torch.tensor(columns)
            labels, tokens = batch.tokens[index], batch.tokens.index_fill(0, index, self.tokenizer.mask_token_id)
            batch = replace(
                batch, tokens=tokens, target_index=index, target_rows=torch.arange(len(rows)), labels=labels
            )
            totals.index_add_(0, torch.tensor(rows), self.model(batch=batch.to(device)).log_probs.double().cpu())
        return totals.tolist()

    def responses(self, prompts: Sequence[str], sampling: SamplingConfig, stop: Sequence[str] = ()) -> list[str]:
        """One text for each prompt, cut before the first stop string; a prompt too long for the model loses its beginning."""
        room = self.positions - sampling.max_new_tokens
        if room < 1:
            raise UserError(
                f"max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in {self.positions} positions"
            )
        ids = [tokens[-room:] for tokens in self.context_ids(prompts)]
        ends = sorted(stop_token_ids(self.tokenizer))
        return decode_responses(self.model, ids, sampling, ends, stop=stop, tokenizer=self.tokenizer).texts


def group_inputs(inputs: Sequence[Tokens], share: bool) -> list[tuple[int, list[Tokens]]]:
    """Sorted inputs in groups that begin alike, or each alone; with the tokens of each group, its beginning counted once.

    An input joins the group before it where at least a third of its tokens are the group's, more tokens are saved with it than
    without, and the group takes no more than half a forward.
    """
    groups, common = list[tuple[int, list[Tokens]]](), 0
    for read in inputs:
        size, group = groups[-1] if groups and share else (0, list[Tokens]([()]))
        parts = enumerate(zip(group[-1], read, strict=False))
        same = next((i for i, (one, other) in parts if one != other), min(len(group[-1]), len(read)))
        same = min(same, common) if len(group) > 1 else same
        saved = (len(group) - 1) * common
        if 3 * same >= len(read) and len(group) * same > saved and size < TOKENS_PER_FORWARD // 2:
            size, common = size + saved + len(read) - len(group) * same, same
            groups[-1] = size, group
            group.append(read)
        else:
            groups.append((len(read), [read]))
    return groups
