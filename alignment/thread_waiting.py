"""How long the idle threads of PyTorch's OpenMP keep a processor busy before they sleep."""

import os

# libgomp takes this many itself where it knows of more threads than processors; it does not see other processes.
SPINS = 1000
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def shorten_waiting() -> None:
    """Let threads that wait for each other go to sleep after a few microseconds; before the first import of torch.

    By default they spin for milliseconds. Where other processes want the processors, the thread that all wait for is then
    kept from running by those that spin. A GOMP_SPINCOUNT or OMP_WAIT_POLICY that is set stays as it is.

    Source: libgomp's manual, GOMP_SPINCOUNT.
    """
    if not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
