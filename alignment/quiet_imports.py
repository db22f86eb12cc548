"""bitsandbytes imported without a look-up on the Hub, whichever package imports it first: this one, peft or accelerate."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGE = "bitsandbytes"
KERNEL_PACKAGE = "kernels"  # what bitsandbytes fetches a kernel from the Hub with, when it is imported


class QuietFinder:
    """Finds bitsandbytes as Python does; while it is executed, it has no `kernels` and says nothing about that."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == PACKAGE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with without_kernel_package():
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this import's own loader
        return spec


def import_quietly() -> None:
    """Put the finder before Python's own, once; nothing is imported."""
    if QuietFinder not in sys.meta_path:
        sys.meta_path.insert(0, QuietFinder)


@contextmanager
def without_kernel_package() -> Iterator[None]:
    """Let imports of `kernels` fail within the block, and silence bitsandbytes' warning of that."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, loaded = logger.level, sys.modules.get(KERNEL_PACKAGE)
    logger.setLevel(logging.ERROR)
    sys.modules[KERNEL_PACKAGE] = None  # type: ignore[assignment]  # an import of it fails, and nothing is fetched
    try:
        yield
    finally:
        logger.setLevel(level)
        sys.modules.pop(KERNEL_PACKAGE)
        if loaded is not None:
            sys.modules[KERNEL_PACKAGE] = loaded
