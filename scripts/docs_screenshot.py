"""A picture of the top of a report page, for the documentation.

    python scripts/docs_screenshot.py runs/quickstart/report.html docs/pictures/quickstart_report.png

Chromium has to be installed. The picture has 64 colors, which a page of text and tables does not miss.
"""

import argparse
import subprocess
from pathlib import Path

from PIL import Image

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", default="1200,1150", help="width and height in pixels")
    given = parser.parse_args()
    shot = [f"--window-size={given.size}", f"--screenshot={given.picture.resolve()}", given.report.resolve().as_uri()]
    subprocess.run(["chromium", *FLAGS, *shot], check=True)
    with Image.open(given.picture) as image:
        small = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(given.picture, optimize=True)


if __name__ == "__main__":
    main()
