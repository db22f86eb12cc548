"""Attention maps as one HTML page with nothing to fetch. What is drawn, and of which model, is in inspection.py.

Every head is a grey picture of one pixel per weight; a click enlarges it between its tokens. The page's script is the one
thing that may run in it, by its hash.
"""

import base64
import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import Tensor

from alignment.files import write_text

TEMPLATES = Path(__file__).parent / "templates"
LEVELS = 255  # of grey


@dataclass(frozen=True)
class Maps:
    """One kind of attention in one document.

    Attributes:
        title: what looks at what.
        rows, columns: tokens that look, and that are looked at, as shown.
        layers: number of a layer -> its weights, [H, rows, columns].
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    layers: dict[int, Tensor]


@dataclass(frozen=True)
class Picture:
    """One head: where it stands, and its weights as the address of a picture."""

    layer: int
    head: int
    address: str


def write_attention_page(path: Path, title: str, texts: Sequence[tuple[str, Sequence[Maps]]]) -> Path:
    """Write the page of some texts with the maps of each, and return its path. All text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (TEMPLATES / "attention.js").read_text(encoding="utf-8")
    html = environment.get_template("attention.html.jinja").render(
        title=title,
        texts=[(text, [(maps, pictures(maps), cell_size(maps)) for maps in kinds]) for text, kinds in texts],
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    write_text(Path(path), html)
    return Path(path)


def pictures(maps: Maps) -> list[list[Picture]]:
    """The heads of each layer."""
    return [
        [Picture(layer, head, address_of(png(pixels(each)))) for head, each in enumerate(weights)]
        for layer, weights in maps.layers.items()
    ]


def cell_size(maps: Maps) -> int:
    """Pixels of one weight in the enlarged picture: smaller in long documents, never too small for a token's letters."""
    return max(13, min(26, 900 // max(len(maps.columns), 1)))


def pixels(weights: Tensor) -> Tensor:
    """Weights [T, S] as grey from white (0) to black (1), bytes [T, S].

    The root of the weight is what darkens: 0.01 can be seen then, and 255 levels are finest among small weights.
    """
    return LEVELS - (LEVELS * weights.clamp(0, 1).sqrt()).round().to(torch.uint8)


def png(grey: Tensor) -> bytes:
    """Bytes [T, S] as a picture file.

    Source: PNG specification, third edition, sections 5 and 11.2.
    """
    rows, columns = grey.shape
    lines = b"".join(b"\0" + bytes(row) for row in grey.tolist())  # 0: the line as it is, unfiltered
    header = struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def address_of(picture: bytes) -> str:
    """A picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()
