"""Shakespeare's plays, a client for each role: predict the next character from the eighty before it.

After LEAF (Caldas et al., 2018): a client is one role in one play, and the vocabulary is LEAF's eighty characters.
Curly quotation marks, dashes and letters with accents become their plain forms, and what is outside the vocabulary then
is dropped. The lines of a speech are joined by spaces and the speeches of a role by line breaks. The first four fifths
of that text are for training and the last fifth is for testing; windows do not reach across the cut, so the two parts
share neither inputs nor targets. Training has a window at every character, as in LEAF; testing has at most a hundred
windows per role, evenly spaced, since evaluating all would take longer than training. LEAF leaves out roles of two
lines or less. Here a role needs `LEAST` characters, so that every part of it holds a window, the validation part
included.
"""

import re
import shutil
import unicodedata
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedhist.data.natural import Held, Part, join, largest
from fedhist.data.places import Progress, download
from fedhist.data.plays import roles
from fedhist.errors import DataError, reason
from fedhist.store.files import read_bytes, slug, whole_file

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WINDOW = 80
LEAST = 510
"""Characters: 0.8 · 0.2 · 510 is one more than a window and its target."""
TEST_WINDOWS = 100
"""Most test examples of one role."""

FOLDER = "shakespeare"
SOURCE = "https://www.gutenberg.org/cache/epub/100/pg100.txt"
_PLAIN = str.maketrans(
    {
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
        "—": "--",
        "–": "-",
        "…": "...",
        "æ": "ae",
        "Æ": "AE",
        "œ": "oe",
        "Œ": "OE",
    }
)
_CODES = np.full(256, 255, np.uint8)
_CODES[np.frombuffer(LETTERS.encode(), np.uint8)] = np.arange(len(LETTERS))


def place(roots: Sequence[Path]) -> Path | None:
    """Return the first folder with plays, one a file, or None."""
    return next((root / FOLDER for root in roots if _files(root / FOLDER)), None)


def load(roots: Sequence[Path], clients: int, validation: bool = False, progress: Progress | None = None) -> Held:
    """Return the roles with the most text; the plays are downloaded to the first folder if none has them."""
    found = place(roots)
    if found is None:
        found = roots[0] / FOLDER
        try:
            fetch(roots[0], progress)
        except DataError as error:
            raise DataError(f"shakespeare is not in {found} and could not be fetched: {error}") from error
    return _load(found, clients, validation)


def fetch(root: Path, progress: Progress | None = None, source: str = SOURCE) -> None:
    """Download the complete works and divide them into one play a file."""
    name = source.rpartition("/")[2]
    archive, part = root / name, root / f".{FOLDER}.part"
    if not archive.is_file():
        download(source, archive, None, progress and partial(progress, name))
    found = divide(_read(archive))
    if not found:
        raise DataError(f"{archive} does not hold plays below a list of contents; delete it and try again.")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for title, text in found.items():
            with whole_file(part / f"{slug(title.lower())}.txt") as file:
                file.write_text(text, encoding="utf-8")
        part.rename(root / FOLDER)  # in one step, so that there are all plays or none
    except OSError as error:
        raise DataError(f"{root / FOLDER} cannot be written: {reason(error)}.") from error


def divide(text: str) -> dict[str, str]:
    """Return the plays of Project Gutenberg's complete works by their titles; poems have no acts and are left out."""
    text = re.split(r"^\*\*\* ?END OF", re.split(r"^\*\*\* ?START OF.*$", text, flags=re.M)[-1], flags=re.M)[0]
    rest = text.partition("Contents\n")[2]
    titles = re.match(r"\s*((?:[^\n]+\n)*)", rest)
    lines, wanted = rest.splitlines(), [line.strip() for line in (titles[1] if titles else "").splitlines()]
    starts, at = list[int](), len(wanted) + 1
    for title in wanted:
        place = next((i for i in range(at, len(lines)) if lines[i].strip() == title), None)
        starts.append(at if place is None else place)
        at = starts[-1] if place is None else place + 1
    if not wanted:
        return {}
    works = {
        title: "\n".join(lines[start:end])
        for title, start, end in zip(wanted, starts, [*starts[1:], len(lines)], strict=True)
    }
    return {title: work for title, work in works.items() if re.search(r"^\s*ACT I\b", work, flags=re.M)}


@lru_cache(maxsize=1)
def _load(folder: Path, clients: int, validation: bool) -> Held:
    texts, plays, left_out = _texts(folder)
    chosen = [list(texts)[i] for i in largest("shakespeare", "roles", [len(each) for each in texts.values()], clients)]
    train, test = zip(*(_parts(texts[role], validation) for role in chosen), strict=True)
    return join(train, test, chosen, len(LETTERS), split="roles", plays=plays, roles_left_out=left_out)


@lru_cache(maxsize=1)
def _texts(folder: Path) -> tuple[dict[str, NDArray[np.uint8]], int, int]:
    """Return the text of each role as numbers, how many plays there are, and how many roles say too little."""
    said = {
        f"{file.stem}: {role}": encode("\n".join(speeches))
        for file in _files(folder)
        for role, speeches in roles(_read(file)).items()
    }
    texts = {role: text for role, text in said.items() if len(text) >= LEAST}
    if not texts:
        raise DataError(f"{folder} holds no play in which a role says at least {LEAST} characters.")
    return texts, len({role.partition(":")[0] for role in said}), len(said) - len(texts)


def encode(text: str) -> NDArray[np.uint8]:
    """Return the numbers of a text's characters in the vocabulary; others are mapped to plain ones or dropped."""
    plain = unicodedata.normalize("NFKD", text.translate(_PLAIN)).encode("ascii", "ignore")
    codes: NDArray[np.uint8] = _CODES[np.frombuffer(plain, np.uint8)]
    return codes[codes < len(LETTERS)]


def _parts(text: NDArray[np.uint8], validation: bool) -> tuple[Part, Part]:
    """Return the windows of a role's training part and of its test part."""
    if validation:
        text = text[: _cut(len(text))]
    cut = _cut(len(text))
    train, test = _windows(text[:cut]), _windows(text[cut:])
    chosen = np.linspace(0, len(test[1]) - 1, min(TEST_WINDOWS, len(test[1]))).astype(np.int64)
    return train, (test[0][chosen], test[1][chosen])


def _cut(length: int) -> int:
    return length * 4 // 5


def _windows(text: NDArray[np.uint8]) -> Part:
    """Return all windows of a text, as views of it, and the character after each."""
    return sliding_window_view(text, WINDOW)[:-1], text[WINDOW:].astype(np.int64)


def _files(folder: Path) -> list[Path]:
    """Return the plays in a folder; none where it may not be read."""
    try:
        return sorted(each for each in folder.iterdir() if each.suffix == ".txt" and not each.name.startswith("."))
    except OSError:
        return []


def _read(file: Path) -> str:
    try:
        content = read_bytes(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {reason(error)}.") from error
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:  # as older files are
        return content.decode("latin-1").replace("\r\n", "\n")
