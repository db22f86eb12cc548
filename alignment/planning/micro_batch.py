"""The largest micro-batch that fits a device's memory."""

from collections.abc import Callable

from alignment.errors import UserError

MOST_TRIALS = 6  # each is a trace of the model


def largest_that_fits(needed: Callable[[int], int], memory: int, *, row: int, most: int) -> int:
    """The largest number of tokens, a multiple of `row`, whose need fits; `needed` was called with it.

    Memory grows about linearly with the tokens, so that each trial is placed by interpolation.

    Args:
        needed: tokens -> bytes.
        memory: bytes.
        row: tokens of the longest row.
        most: tokens beyond which nothing is gained.

    Raises:
        UserError: not even one row fits.
    """
    largest = needed(most)
    if largest <= memory:
        return most
    least = largest if most == row else needed(row)
    if least > memory:
        raise UserError(
            f"training.micro_batch_tokens: auto: not even one row of {row} tokens fits: {least / 1e9:.2f} GB are needed "
            f"and {memory / 1e9:.2f} GB are free; `alignment plan` lists what makes the run smaller"
        )
    fits, fits_bytes, fails, fails_bytes = row, least, most, largest
    for _ in range(MOST_TRIALS):
        slope = (fails_bytes - fits_bytes) / (fails - fits)
        guess = int(fits + (memory - fits_bytes) / slope) // row * row if slope > 0 else fits
        guess = min(max(guess, fits + row), fails - row)
        if fails - fits <= row:
            break
        size = needed(guess)
        if size <= memory:
            fits, fits_bytes = guess, size
        else:
            fails, fails_bytes = guess, size
    return fits
