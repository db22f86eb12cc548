"""Turn a llama2.c checkpoint and its tokenizer into a Hugging Face Llama directory (safetensors, fast tokenizer).

    python scripts/import_llama2c.py CHECKPOINT.bin TOKENIZER.bin --output DIR

Only the float32 export with the 7-integer header is read; quantized and versioned exports are not.
"""

import argparse
import sys
from pathlib import Path

from alignment.config.load import packaged_folder
from alignment.errors import UserError
from alignment.files import exported_directory
from alignment.pipeline.stages import load_stage_file


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        llama2c = load_stage_file(packaged_folder("recipes") / "stories/llama2c.py")
        with exported_directory(arguments.output) as folder:
            llama2c.convert(arguments.checkpoint, arguments.tokenizer, folder)
    except (UserError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
