"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it replaces `path` when the block succeeds, else it is removed.

    The content reaches the disk before the name does, so that not even a power failure leaves half a file.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def slug(text: str) -> str:
    """Return a name for a file or folder that still reads like the text."""
    return re.sub(r"[^\w.=+-]+", "-", text.lower()).strip("-")[:100]
