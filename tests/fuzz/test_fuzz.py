"""Damaged files: every reader gives a result that can be used or one sentence, soon and in limited memory.

``FEDHIST_FUZZ=20000 pytest tests/fuzz`` damages the files of each reader so many times, and ``FEDHIST_FUZZ_SEED=1`` in
other ways.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import fedhist as fh
from tests.fuzz.commands import COMMANDS
from tests.fuzz.forging import forge, swell
from tests.fuzz.mutations import mutated, put_in_the_way
from tests.fuzz.readers import READERS as SINGLE, Files, Reader
from tests.fuzz.servers import SERVERS

TIMES, SEED = int(os.environ.get("FEDHIST_FUZZ", "100")), os.environ.get("FEDHIST_FUZZ_SEED", "0")
READERS = SINGLE | COMMANDS | SERVERS
SECONDS, MEMORY = 20, 2 << 30
"""Time after which a reader is taken to hang, and bytes that it and the use of its result may take."""


class Hung(BaseException):
    """A reader did not return."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Make whatever hangs, or would take the machine's memory, fail."""

    def ring(*_: object) -> None:
        raise Hung

    before, (soft, hard) = signal.signal(signal.SIGALRM, ring), resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def lay_out(folder: Path, files: Files) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def damage(path: Path, content: bytes, reader: Reader, random: Random) -> None:
    """Do something to a file, which holds the content."""
    if random.random() < (0.05 if reader.forged else 0.01):
        put_in_the_way(path, random)
    elif reader.forged and random.random() < 0.02:
        swell(path, random)
    elif not (reader.forged and random.random() < 0.9 and forge(path, random)):
        packed = path.suffix in (".gz", ".npz") and random.random() < 0.5
        change = reader.inside if packed and reader.inside is not None else mutated
        path.write_bytes(change(content, random))


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    reader, folder = READERS[name], tmp_path / "run"
    (tmp_path / "made").mkdir()
    whole = reader.files(tmp_path / "made")
    lay_out(folder, whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for instance, matplotlib has no glyph for some names
        reader.use(reader.read(folder), folder)
        accepted = 0
        times = max(8, int(TIMES * reader.share))
        for number in range(times):
            random = Random(f"{name} {SEED} {number}")
            lay_out(folder, whole)
            chosen = random.choice(sorted(whole))
            damage(folder / chosen, whole[chosen], reader, random)
            try:
                with limits():
                    result = reader.read(folder)
                    accepted += 1
                    with contextlib.suppress(fh.FedHistError):
                        reader.use(result, folder)
            except fh.FedHistError as error:
                assert 10 < len(str(error)) < 1000 and "\n" not in str(error), error
            except BaseException as error:
                error.add_note(f"damage {number} of {chosen}, FEDHIST_FUZZ_SEED={SEED}")
                raise
    assert accepted < times or reader is READERS["report"], "no damage was noticed"
