"""Damages files as disks, editors, transfers and people do, and worse. A seed gives the same damage again."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

NUMBERS = [
    b"0", b"-1", b"1", b"0.5", b"-0.0", b"1e308", b"1e999", b"-1e999", b"1e-400", b"NaN", b"nan", b"inf", b"Infinity",
    b"2147483648", b"4294967295", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809",
    b"1" + 30 * b"0", b"7" * 400, b"8" * 5000, b"0x" + b"f" * 5000, b"1_000", b"01",
]  # fmt: skip
OTHERS = [
    b"null", b"none", b"true", b"false", b'""', b'"a"', b"'a'", b'"\\ud800"', b'"\\u0000"', b'"$x$"', b'"a\\nb"', b"[]",
    b"{}", b"[[]]", b"[null]", b'{"a":1}', b"{a=1}", b"[" * 3000, b"[" * 500 + b"]" * 500, b'{"a":' * 2000, b"a.b.c",
    b"1979-05-27T07:32:00Z", b'"' + b"x" * 3000 + b'"', "\N{SNOWMAN}\N{PILE OF POO}".encode(), b"[1,2,3]", b"-", b"",
]  # fmt: skip
TOKEN = re.compile(rb'-?\d[\w.+-]*|"(?:[^"\\\n]|\\.)*"|\b[A-Za-z_]+\b|[\[\]{}:=,]')


def _cut(content: bytes, random: Random) -> tuple[int, int]:
    """Return the ends of a chunk, most often a short one."""
    start = random.randrange(len(content) + 1)
    return start, min(len(content), start + int(2 ** random.uniform(0, 12)))


def flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice([1, 1, 1, 2, 8, 64])):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def overwrite(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content))
    new = random.choice(
        [b"\0", b"\xff", b"\x7f", b"\x80", b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff" * 8, b"\0" * 99]
    )
    return content[:at] + new + content[at + len(new) :]


def insert(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content) + 1)
    new = random.choice([random.randbytes(random.choice([1, 1, 2, 4, 100])), b"\n", b" ", b"\0", random.choice(OTHERS)])
    return content[:at] + new + content[at:]


def delete(content: bytes, random: Random) -> bytes:
    start, end = _cut(content, random)
    return content[:start] + content[end:]


def truncate(content: bytes, random: Random) -> bytes:
    at = random.choice([random.randrange(len(content)), max(0, len(content) - random.randrange(1, 9))])
    return content[:at]


def duplicate(content: bytes, random: Random) -> bytes:
    start, end = _cut(content, random)
    return content[:end] + content[start:end] * random.choice([1, 1, 2, 20]) + content[end:]


def swap(content: bytes, random: Random) -> bytes:
    a, b, c, d = sorted(random.randrange(len(content) + 1) for _ in range(4))
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def retoken(content: bytes, random: Random) -> bytes:
    """Put another number or value where a word, a string or a number was."""
    tokens = list(TOKEN.finditer(content))
    if not tokens:
        return insert(content, random)
    where = random.choice(tokens)
    new = random.choice(NUMBERS if random.random() < 0.5 else OTHERS)
    if random.random() < 0.2:
        new = random.choice(tokens).group()
    return content[: where.start()] + new + content[where.end() :]


def _zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("clients.npy", content)
    return buffer.getvalue()


def _tarred(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("train")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def replace(content: bytes, random: Random) -> bytes:
    """Put a file of another kind in its place."""
    kinds: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: b"\n",
        lambda: b"{}",
        lambda: b"[]\n[]\n",
        lambda: b"\0" * random.choice([1, 100, 10_000]),
        lambda: random.randbytes(random.choice([1, 10, 1000])),
        lambda: b"\x89PNG\r\n\x1a\n" + random.randbytes(99),
        lambda: gzip.compress(content),
        lambda: _zipped(content),
        lambda: _tarred(content),
        lambda: content.decode("latin-1").encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: content[::-1],
    ]
    return random.choice(kinds)()


MUTATIONS = [flip, overwrite, insert, delete, truncate, duplicate, swap, retoken, retoken, retoken]


def mutated(content: bytes, random: Random) -> bytes:
    """Return a content damaged once, or a few times."""
    if random.random() < 0.03:
        return replace(content, random)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        if content:
            content = random.choice(MUTATIONS)(content, random)
    return content


def inside_gzip(packed: bytes, random: Random) -> bytes:
    """Damage what is compressed, so that the damage has the right checksum."""
    return gzip.compress(mutated(gzip.decompress(packed), random), compresslevel=random.choice([1, 9]), mtime=0)


def inside_zip(packed: bytes, random: Random) -> bytes:
    """Damage one of the files in an archive, or leave it out, or give it another's name."""
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(files))
    change = random.random()
    if change < 0.8:
        files[name] = mutated(files[name], random)
    elif change < 0.9:
        files[name] = files[random.choice(list(files))]
    else:
        del files[name]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for each, content in files.items():
            archive.writestr(each, content)
    return buffer.getvalue()


def put_in_the_way(path: Path, random: Random) -> None:
    """Leave something else than a file where one was, or nothing."""
    path.unlink()
    kind = random.randrange(8)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.write_bytes(b"")
        path.chmod(0)  # which does not stop root
    elif kind < 7:
        path.symlink_to([path, "/dev/zero", "/dev/full", "nowhere"][kind - 3])
