"""The text of a response while its tokens arrive: whole characters only, cut before the first stop string."""

from collections.abc import Sequence

from alignment.data.tokenizers.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what tokenizers decode an incomplete UTF-8 character to


class IncrementalText:
    """Decodes tokens one by one.

    The pieces that `push` and `flush` return are, put together, the whole decoding cut before the first stop string. Only
    tokens since the last whole character, and those before them that it may depend on, are decoded again.

    Attributes:
        text: all characters that are whole so far, cut before a stop string.
        stopped: whether a stop string has occurred.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = False):
        self._tokenizer, self._stop, self._skip = tokenizer, tuple(stop), skip_special_tokens
        self._longest = max(map(len, self._stop), default=0)
        self._tokens: list[int] = []
        self._context = self._decoded = 0  # tokens from `_context` on are decoded; before `_decoded` all is in `text`
        self._returned = 0  # characters of `text` that were handed out
        self.text, self.stopped = "", False

    def push(self, token: int, *, check_stop: bool = True) -> str:
        """What a further token makes certain of the text.

        Args:
            check_stop: whether to look for stop strings that it completes.
        """
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._decoded])
        now = self._decode(self._tokens[self._context :])
        new, searched = now[len(before) :], len(self.text)
        if self._stop and check_stop and self._cut(self.text + new, searched):
            return self._hand_out(len(self.text))
        if new and not now.endswith(UNFINISHED):
            self.text += new
            self._context, self._decoded = self._decoded, len(self._tokens)
        return self._hand_out(len(self.text) - self._held_back())

    def flush(self) -> str:
        """The rest, when no token follows."""
        if not self.stopped:
            before = self._decode(self._tokens[self._context : self._decoded])
            self.text += self._decode(self._tokens[self._context :])[len(before) :]
            self._context = self._decoded = len(self._tokens)
        return self._hand_out(len(self.text))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip) if tokens else ""

    def _cut(self, text: str, searched: int) -> bool:
        """Whether a stop string ends behind the first `searched` characters; `text` is then cut before it."""
        starts = ((each, max(0, searched - len(each) + 1)) for each in self._stop)
        found = [position for each, start in starts if (position := text.find(each, start)) >= 0]
        if found:
            self.text, self.stopped = text[: min(found)], True
        return self.stopped

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(each.startswith(self.text[-size:]) for each in self._stop):
                return size
        return 0

    def _hand_out(self, end: int) -> str:
        new = self.text[self._returned : end]
        self._returned = max(self._returned, end)
        return new


def text_before_stop(
    tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str], min_tokens: int, *, skip_special_tokens: bool
) -> str:
    """Text of a response that a stop string has ended, cut before it; none is searched before `min_tokens` tokens."""
    text = IncrementalText(tokenizer, stop, skip_special_tokens=skip_special_tokens)
    for number, token in enumerate(tokens, start=1):
        text.push(token, check_stop=number >= min_tokens)
    return text.text
