"""Fetch a file, whole and verified, or leave nothing behind."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fedhist.errors import DataError
from fedhist.store.files import whole_file

CHUNK = 1 << 18
TIMEOUT = 30.0


def download(url: str, to: Path, checksum: str, progress: Callable[[int, int], None] | None = None) -> None:
    """Download `url` to the file `to`, which appears only once it is complete and its MD5 sum is right.

    `progress` is called with the bytes so far and the total, 0 where the server does not tell.
    """
    digest = hashlib.md5(usedforsecurity=False)  # the sums published for these data sets are MD5
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(to) as part:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response, part.open("wb") as file:
                length = response.headers.get("Content-Length", "")
                total, done = int(length) if length.isdecimal() else 0, 0
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress:
                        progress(done, total)
            if total and done != total:
                raise DataError(f"{url} broke off after {done} of {total} bytes; try again.")
            if (got := digest.hexdigest()) != checksum:
                raise DataError(f"{url} has MD5 {got} where {checksum} was expected; it was not kept.")
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"{url} could not be downloaded to {to}: {reason}.") from error
