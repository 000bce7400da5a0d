"""Where data sets lie on this machine, and how they come there."""

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedhist.errors import DataError, brief, require
from fedhist.store.files import whole_file

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes so far and the total."""

md5 = partial(hashlib.md5, usedforsecurity=False)  # the checksum that is published for these data sets


class Where(NamedTuple):
    """Where a data set is, or how it comes here."""

    text: str
    found: bool


def where_is(place: Path | None, roots: Sequence[Path]) -> Where:
    """Return where a data set is, or to which of some folders it would be downloaded."""
    return Where(str(place) if place else f"to be downloaded to {roots[0]}", place is not None)


def data_folders(data_dir: str | Path | None = None) -> list[Path]:
    """Return the folders in which to look for data sets; missing ones are downloaded to the first.

    A folder given by argument or by $FEDHIST_DATA is the only one. By default they are the user's cache and ./data,
    where torchvision's examples put theirs.
    """
    chosen = data_dir or os.environ.get("FEDHIST_DATA")
    if not chosen:
        home = Path(os.path.expanduser("~"))  # noqa: PTH111 (it stays "~" where it is not known)
        return [home / ".cache" / "fedhist", Path("data")] if home.is_absolute() else [Path("data")]
    try:
        folder = Path(chosen).expanduser()
        possible = b"\0" not in os.fsencode(folder)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: the home folder of an unknown user
        possible = False
    require(possible, f"data_dir={brief(chosen)} is not the name of a folder.")
    return [folder]


def existing(path: Path) -> Path | None:
    """Return the path of a file, which may be compressed, or None; also None for a folder we may not read."""
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if os.path.isfile(p)), None)  # noqa: PTH113


def download(url: str, to: Path, checksum: str | None, progress: Callable[[int, int], None] | None = None) -> None:
    """Download a file, which appears only once it is complete and its MD5 sum is right, where one is known.

    `progress` is called with the bytes so far and the total, which is 0 where the server does not say.
    """
    digest, done = md5(), 0
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(to) as part:
            with urllib.request.urlopen(url, timeout=30) as response, part.open("wb") as file:
                total = response.length or 0
                while chunk := response.read(1 << 18):
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress:
                        progress(done, total)
            if total and done != total:
                raise DataError(f"{url} broke off after {done} of {total} bytes; try again.")
            if checksum is not None and (found := digest.hexdigest()) != checksum:
                raise DataError(f"{url} has MD5 {found} where {checksum} was expected; it was not kept.")
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", None) or error
        raise DataError(f"{url} could not be downloaded to {to}: {cause}.") from error
