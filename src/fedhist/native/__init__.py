"""The compiled kernel: built on first use by the machine's own compiler, for the machine's own processor.

A kernel in a wheel could use only the instructions that all processors have.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("train.c")
# Not -ffast-math, which reorders sums and assumes that there is no NaN or infinity. Without errno and traps,
# comparisons and roots become vector instructions.
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
if platform.machine().lower() in ("x86_64", "amd64"):
    FLAGS.append("-mprefer-vector-width=512")  # clang's default is 256 even where 512 is faster
LARGEST_KERNEL = 1 << 26
"""Bytes of a kernel at most; it has some tens of thousands."""
_building = threading.Lock()


class Unavailable(Exception):
    """The kernel cannot be used; the message says why, as part of a sentence."""


class Layer(ctypes.Structure):
    """One layer, as layers.h declares it."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "activation", "input", "other", "slot")),
        *((name, ctypes.c_int32) for name in ("channels", "height", "width")),
        *((name, ctypes.c_int32) for name in ("out_channels", "out_height", "out_width")),
        *((name, ctypes.c_int32) for name in ("kernel_height", "kernel_width", "stride_height", "stride_width")),
        *((name, ctypes.c_int32) for name in ("pad_height", "pad_width", "groups")),
        *((name, ctypes.c_int64) for name in ("weight", "bias", "call", "threshold")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    ]


class Net(ctypes.Structure):
    """Layers over one flat parameter vector, each after those whose outputs it takes, and the last one's loss."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        *((name, ctypes.c_int64) for name in ("num_layers", "num_slots", "num_parameters", "loss")),
    ]


class Descent(ctypes.Structure):
    """The parameters of a local optimizer, `μ` of FedProx, and the key of what dropout draws."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("lr", "momentum", "weight_decay", "mu")),
        *((name, ctypes.c_int64) for name in ("nesterov", "adam")),
        *((name, ctypes.c_double) for name in ("beta1", "beta2", "eps", "clip_norm")),
        ("key", ctypes.c_uint64),
    ]


CONVOLUTION, MAX_POOL, AVERAGE_POOL, DROPOUT, CHANNEL_DROPOUT, SUM, GROUP_NORM, GELU, GELU_TANH = range(9)
IDENTITY, RELU, TANH = range(3)
CROSS_ENTROPY, SQUARED_ERROR, BINARY_CROSS_ENTROPY, HUBER = range(4)
SGD, ADAM, ADAMW = range(3)

_ARGUMENTS = {
    # The type of the result, and the arguments; a star marks an address.
    "fedhist_scratch": (ctypes.c_size_t, "net batch adam"),
    "fedhist_train": (None, "net descent *x *y *index *sizes steps *received *shift *upload *scratch"),
    "fedhist_outputs": (None, "net *parameters *x *index count batch *outputs *scratch"),
}
_TYPES = {"net": ctypes.POINTER(Net), "descent": ctypes.POINTER(Descent)}


def kernel() -> ctypes.CDLL:
    """Return the kernel, built if necessary; raise :class:`Unavailable` if it cannot be built."""
    with _building:
        result = _kernel()
    if isinstance(result, Unavailable):
        raise result
    return result


@cache
def _kernel() -> ctypes.CDLL | Unavailable:
    try:
        library = _built(compiler())
        functions = {name: getattr(library, name) for name in _ARGUMENTS}
    except Unavailable as reason:
        return reason
    except (OSError, AttributeError) as error:
        return Unavailable(f"the compiled kernel could not be loaded ({error})")
    for name, (result, arguments) in _ARGUMENTS.items():
        function = functions[name]
        function.restype = result
        function.argtypes = [
            ctypes.c_void_p if each[0] == "*" else _TYPES.get(each, ctypes.c_int64) for each in arguments.split()
        ]
    return library


def compiler() -> list[str]:
    """Return the command of the C compiler; raise :class:`Unavailable` if there is none."""
    if named := os.environ.get("CC"):
        try:
            return shlex.split(named)
        except ValueError as error:
            raise Unavailable(f"CC={named!r} is not a command ({error})") from None
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise Unavailable("there is no C compiler; install one, or fedhist[native]")


def fingerprint() -> str:
    """Return what tells this kernel from others: a checksum of its code."""
    return Path(kernel()._name).stem.split("-")[-1]


@cache
def processor() -> str:
    """Return the name of the processor, for which mathematical libraries choose their code."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, ValueError):
        pass
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Return where built kernels are kept; nowhere if the home folder is not known."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 (it may be unknown)
    return (home if home.is_absolute() else Path(os.devnull)) / "fedhist"


def _built(compiler: list[str]) -> ctypes.CDLL:
    """Return the kernel from the cache, or build it.

    The name of its file holds checksums of what it is made from and of its content: a file that was truncated, or put
    there by somebody else, is not loaded, which could end the process.
    """
    # The compiler's predefined macros: its version, and the instructions that it assumes the processor to have.
    about = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    sources = [file.read_bytes() for file in sorted(SOURCE.parent.glob("*.[ch]"))]
    name = "kernel-" + _checksum(b"\0".join([*sources, *map(str.encode, FLAGS), about]))
    cache = cache_folder()
    for cached in sorted(cache.glob(f"{name}-*.so")):
        with contextlib.suppress(OSError):
            plain = cached.is_file() and cached.stat().st_size < LARGEST_KERNEL  # not a pipe, which may never end
            if plain and cached.stem == f"{name}-{_checksum(cached.read_bytes())}":
                return ctypes.CDLL(str(cached))
            if plain:
                cached.unlink()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(dir=cache)
    except OSError:
        place = tempfile.TemporaryDirectory()  # it cannot be cached; a loaded library needs its file no more
    with place as folder:
        built = Path(folder) / "kernel.so"
        _run([*compiler, *FLAGS, "-shared", "-fPIC", "-o", str(built), str(SOURCE), "-lm"])
        named = built.with_name(f"{name}-{_checksum(built.read_bytes())}.so")
        built.rename(named)
        library = ctypes.CDLL(str(named))
        # The file is moved as a whole, so that processes may build at the same time.
        with contextlib.suppress(OSError), named.open("rb") as file:
            os.fsync(file.fileno())
            named.replace(cache / named.name)
    return library


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=120).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {error.returncode}"]
        what = next((line for line in lines if "error: " in line), lines[-1])
        raise Unavailable(f"{shlex.join(command[:1])} failed to compile the kernel ({what})") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{shlex.join(command[:1])} could not compile the kernel ({error})") from None
