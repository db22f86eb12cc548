"""What an encoder-decoder is: two trunks and the tokens that begin and end what they read and write."""

from dataclasses import dataclass

from alignment.models.spec import TransformerSpec


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """An encoder and a decoder whose blocks look at it; they share the token table, the head perhaps too.

    Attributes:
        start_token: begins every target.
        end_token: the last of them in a document is where a sequence classifier reads; None: not known.
    """

    encoder: TransformerSpec
    decoder: TransformerSpec
    start_token: int
    end_token: int | None

    @property
    def vocabulary(self) -> int:
        """Tokens that can be read and written."""
        return self.decoder.vocabulary

    @property
    def max_positions(self) -> int:
        """Longest target document."""
        return self.decoder.max_positions
