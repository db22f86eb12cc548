"""`python -m alignment`, which launchers such as torchrun and accelerate need."""

import sys

from alignment.cli import main

if __name__ == "__main__":
    sys.exit(main())
