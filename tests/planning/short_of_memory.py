"""What each rank runs where no memory is free: `alignment sft CONFIG`, which must end with code 2 on every rank.

python -m tests.planning.short_of_memory CONFIG DIRECTORY     rank 1 writes what it says to DIRECTORY/rank-1
"""

import os
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from alignment import cli
from alignment.planning import plan

if __name__ == "__main__":
    plan.free_memory = lambda: 10**6  # type: ignore[assignment]
    with redirect_stderr(StringIO()) as said:
        code = cli.main(["sft", sys.argv[1]])
    print(said.getvalue())
    if os.environ["RANK"] == "1":
        (Path(sys.argv[2]) / "rank-1").write_text(said.getvalue())
    sys.exit(0 if code == 2 else 3)
