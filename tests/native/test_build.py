"""Building the kernel: where, with what, and the errors when it cannot be built."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedhist as fh
from fedhist import native

BUILD = "from fedhist import native; native.kernel()"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Forget the kernel there is, and keep the next one in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._kernel.cache_clear()
    yield tmp_path / "fedhist"
    native._kernel.cache_clear()


def test_is_built_once(kernel: None, fresh: Path) -> None:
    native.kernel()
    (built,) = fresh.iterdir()
    before = built.stat().st_mtime_ns
    native._kernel.cache_clear()
    native.kernel()
    assert list(fresh.iterdir()) == [built] and built.stat().st_mtime_ns == before


def test_processes_may_build_at_the_same_time(kernel: None, fresh: Path) -> None:
    racing = [subprocess.Popen([sys.executable, "-c", BUILD]) for _ in range(2)]
    assert [each.wait() for each in racing] == [0, 0]
    (built,) = fresh.iterdir()
    assert built.suffix == ".so"


def test_other_flags_make_another_kernel(kernel: None, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.kernel()
    native._kernel.cache_clear()
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, "-DANOTHER"])
    native.kernel()
    assert len(list(fresh.iterdir())) == 2


def test_a_damaged_kernel_in_the_cache_is_built_again(kernel: None, fresh: Path) -> None:
    """In processes of their own: one that loads a truncated library is killed, one that reads a pipe waits."""
    run = [sys.executable, "-c", BUILD]
    subprocess.run(run, check=True)
    (built,) = fresh.iterdir()
    content = built.read_bytes()
    for damage in (content[: len(content) // 3], Path(_ctypes.__file__).read_bytes()):
        built.write_bytes(damage)
        subprocess.run(run, check=True)
        assert built.read_bytes() == content
    built.unlink()
    os.mkfifo(built)
    subprocess.run(run, check=True, timeout=60)


def test_a_library_without_the_functions_is_not_used(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_built", lambda _: ctypes.CDLL(_ctypes.__file__))
    with pytest.raises(native.Unavailable, match="the compiled kernel could not be loaded .*fedhist_scratch"):
        native.kernel()


def test_works_where_the_cache_is_no_folder(kernel: None, fresh: Path) -> None:
    fresh.write_text("in the way")
    native.kernel()
    assert fresh.read_text() == "in the way"


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("false", r"false failed to compile the kernel \(exit code 1\)"),
        ("no-such-compiler", r"no-such-compiler could not compile the kernel \(.*No such file"),
    ],
)
def test_without_a_compiler_torch_does_the_work(
    task: fh.Task, fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(native.Unavailable, match=reason):
        native.kernel()
    with pytest.raises(fh.InvalidInput, match=f"trainer='native' cannot train these clients, use 'auto': {reason}"):
        fh.simulate("fedavg", task, k=2, rounds=2, trainer="native")
    with pytest.warns(UserWarning, match=f"clients are trained by PyTorch, .*: {reason}"):
        auto = fh.simulate("fedavg", task, k=2, rounds=2, trainer="auto")
    assert auto.evaluations == fh.simulate("fedavg", task, k=2, rounds=2, trainer="threaded").evaluations


def test_no_compiler_at_all(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ziglang", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(native.Unavailable, match=r"there is no C compiler; install one, or fedhist\[native\]"):
        native.kernel()


def test_an_error_of_the_compiler_is_reported(kernel: None, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fresh.parent / "broken.c"
    broken.write_text("int f(void) { return nonsense; }")
    monkeypatch.setattr(native, "SOURCE", broken)
    with pytest.raises(native.Unavailable, match=r"failed to compile the kernel \(.*error.*nonsense"):
        native.kernel()
    assert not list(fresh.iterdir())
