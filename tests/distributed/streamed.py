"""What every rank runs to stream rows: prints the batches and the error after them, the same on all. Started by the tests.

python -m tests.distributed.streamed PATH STEPS
"""

import sys

from alignment.data.streaming import Ranks
from alignment.errors import UserError
from alignment.training.distributed import init_distributed
from tests.data.conftest import CORPUS, train_bpe
from tests.data.test_streaming import names, streamed

if __name__ == "__main__":
    group = init_distributed()
    stream = streamed(train_bpe(CORPUS, 400), sys.argv[1], ranks=Ranks(group.rank, group.size, group.gather_objects))
    found = list[str]()
    try:
        for step in range(int(sys.argv[2])):
            found += names(stream, [step])
    except UserError as error:
        found.append(str(error))
    assert group.gather_objects(found) == [found] * group.size
    print(found)
