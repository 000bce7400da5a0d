"""``fedhist doctor``: what is installed, what is missing with the command that brings it, and how fast it is.

Nothing is sent anywhere, and everything heavy is tried inside a function, so that what is broken can be told.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

import fedhist
from fedhist.command.flags import DataDir, Device
from fedhist.command.printing import console, say, stderr
from fedhist.errors import reason

REQUIRED = (
    "click>=8.2", "matplotlib>=3.9", "numpy>=2.0", "pydantic>=2.9", "rich>=13.9", "safetensors>=0.5",
    "scikit-learn>=1.5", "scipy>=1.13", "torch>=2.5", "typer>=0.16,<0.26",
)  # fmt: skip
EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "flower": (("flwr>=1.41,<1.43",), "the same strategies on real machines"),
    "native": (("ziglang",), "machines without a C compiler"),
    "optuna": (("optuna>=4",), "fedhist tune --search optuna"),
    "privacy": (("dp-accounting>=0.6",), "differential privacy, --clip and --noise-multiplier"),
    "prometheus": (("prometheus_client>=0.20",), "a server's figures for Prometheus"),
    "ray": (("ray>=2.40",), "--engine ray, runs on a cluster"),
    "report": (("jinja2>=3.1", "plotly>=6"), "fedhist report"),
    "tensorboard": (("tensorboard>=2.17",), "--tensorboard"),
    "watch": (("seglearn>=1.2",), "the data set watch"),
}
"""Extras: what they install, as pyproject.toml has it, and what for. Those for developers are left out."""
SECONDS = 5.0
"""How long the speed test may take, without what is compiled for it."""
OPTIONAL, MISSING, BROKEN, FINE = "optional", "missing", "broken", "fine"
MARKS = {FINE: "ok", OPTIONAL: "-", MISSING: "!", BROKEN: "X"}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, whether that will do, and what helps if not."""

    part: str
    name: str
    found: str
    state: str = FINE
    remedy: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for an issue.")] = False,
    no_speed: Annotated[bool, typer.Option("--no-speed", help="Leave the speed test of five seconds out.")] = False,
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Check what is installed and found and how fast it is; give the command for anything missing."""
    findings = list[Finding]()
    with warnings.catch_warnings(), stderr.status("Looking around, then measuring for five seconds…"):
        warnings.simplefilter("ignore")  # what they would say is among the findings
        for finding in _look(data_dir, device, no_speed):
            findings.append(finding)
    verdict = _verdict(findings)
    if as_json:
        lines = [{name: value for name, value in asdict(each).items() if value} for each in findings]
        print(json.dumps({"findings": lines, "verdict": verdict}, indent=1))
    else:
        _show(findings)
        say(verdict)
    if any(each.state == BROKEN for each in findings):
        raise typer.Exit(1)


def _look(data_dir: Path | None, device: str, no_speed: bool) -> Iterator[Finding]:
    """Yield everything that is found."""
    yield Finding("Versions", "fedhist", fedhist.__version__)
    yield Finding("Versions", "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _required()
    broken = _import_error()
    if broken is not None:
        yield broken
    yield from _extras()
    yield from _machine(broken is None)
    yield (kernel := _kernel())
    if broken is None:
        yield from _gpus()
        yield from _data(data_dir)
        if not no_speed:
            yield _speed(device, kernel.state == FINE)


def _lacking(requirement: str) -> tuple[str, str, bool]:
    """Return a package's name, its version or what is wrong with it, and whether it will do."""
    from packaging.requirements import Requirement  # noqa: PLC0415 (matplotlib brings it)

    wanted = Requirement(requirement)
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return wanted.name, "not installed", False
    fits = wanted.specifier.contains(version, prereleases=True)
    return wanted.name, version if fits else f"{version}, where {wanted.specifier} is needed", fits


def _required() -> Iterator[Finding]:
    for requirement in REQUIRED:
        try:
            name, found, fits = _lacking(requirement)
        except ImportError:
            name, found, fits = requirement, "cannot be checked without packaging", False
        remedy = "" if fits else f"pip install '{requirement}'"
        yield Finding("Versions", name, found, FINE if fits else BROKEN, remedy)


def _import_error() -> Finding | None:
    """Return what is wrong with PyTorch; None if it can be used."""
    try:
        import torch  # noqa: PLC0415

        torch.zeros(1).numpy()
    except Exception as error:  # a library that is missing, of another processor, compiled against another NumPy …
        return Finding(
            "Versions", "import torch", _private(reason(error)), BROKEN, "pip install --force-reinstall torch"
        )
    return None


def _extras() -> Iterator[Finding]:
    for extra, (requirements, purpose) in EXTRAS.items():
        try:
            checked = [_lacking(each) for each in requirements]
        except ImportError:
            return
        fits = all(fit for *_, fit in checked)
        found = ", ".join(f"{name} {version}" for name, version, _ in checked)
        wrong = any(version != "not installed" for _, version, fit in checked if not fit)
        state = FINE if fits else MISSING if wrong else OPTIONAL
        remedy = "" if fits else f"pip install 'fedhist[{extra}]'"
        yield Finding("Extras", extra, found if fits or wrong else f"not installed; for {purpose}", state, remedy)


def _machine(usable: bool) -> Iterator[Finding]:
    """Yield processor, memory and threads."""
    from fedhist.native import processor  # noqa: PLC0415

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = ""
    if usable:
        import torch  # noqa: PLC0415

        threads = f", {torch.get_num_threads()} threads of PyTorch"
    yield Finding("Machine", "processor", f"{processor()}, {cores} of {os.cpu_count()} cores{threads}")
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return
    yield Finding("Machine", "memory", f"{memory:.1f} GiB")


def _kernel() -> Finding:
    """Say whether the C kernel can be built and loaded, by which compiler, and where it is kept."""
    from fedhist import native  # noqa: PLC0415

    try:
        command = native.compiler()
        native.kernel()
    except native.Unavailable as error:
        brings = "sudo apt install gcc, or pip install 'fedhist[native]'"
        remedy = f"unset CC, or {brings}" if os.environ.get("CC") else brings
        return Finding("Machine", "C kernel", f"cannot be used: {_private(str(error))}", MISSING, remedy)
    place = native.cache_folder()
    kept = "kept in" if any(place.glob("kernel-*.so")) else "built each time, since nothing can be kept in"
    return Finding("Machine", "C kernel", f"built by {_compiler_version(command)}; {kept} {_private(str(place))}")


def _compiler_version(command: list[str]) -> str:
    try:
        output = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
        return output.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return _private(shlex.join(command))


def _gpus() -> Iterator[Finding]:
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        yield Finding("Machine", "GPU", "none that PyTorch can use", OPTIONAL)
        return
    for place in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(place)
        found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        yield Finding("Machine", f"cuda:{place}", found)
    try:
        yield Finding("Machine", "Triton", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        yield Finding("Machine", "Triton", "not installed; convolutions take longer", MISSING, "pip install triton")


def _data(data_dir: Path | None) -> Iterator[Finding]:
    from fedhist.data.datasets import whereabouts  # noqa: PLC0415
    from fedhist.data.places import data_folders  # noqa: PLC0415

    for name, _, where in whereabouts(data_folders(data_dir)):
        text, _, command = where.text.partition(": ")
        download = "" if command else f"fedhist run --dataset {name} --rounds 1"
        yield Finding(
            "Data", name, _private(text), FINE if where.found else OPTIONAL, "" if where.found else command or download
        )


def _speed(device: str, compiled: bool) -> Finding:
    """Compare a simulation with the plain loop of ``fedhist bench``."""
    from fedhist.command.speed import FIRST, measured  # noqa: PLC0415
    from fedhist.simulation.plan import devices_of  # noqa: PLC0415

    where = devices_of(device)[0]
    trainer = "batched" if where.type != "cpu" else "native" if compiled else "threaded"
    rates = measured(
        device=device, trainers=[trainer], clients=20, rounds=20, loop_updates=20, repeats=1000, seconds=SECONDS,
        threaded_loop=False,
    )  # fmt: skip
    *_, rate = rates.values()
    found = f"LeNet on {where}, {trainer} trainer: {rate:,.0f} client updates/s, "
    found += f"{rate / rates[FIRST]:.1f} times a plain PyTorch loop"
    load, cores = _load(), os.cpu_count() or 1
    found += f"; the machine is busy (load {load:.1f}), so that says little" if load > cores else ""
    return Finding("Speed", "simulation", found)


def _load() -> float:
    """Return how many processes wanted to run in the last minute; 0 where that is not known."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return 0.0


def _private(text: str) -> str:
    """Return a text for others to see: without the name of the user's home folder."""
    home = os.path.expanduser("~")  # noqa: PTH111 (it stays "~" where it is not known)
    return text.replace(home, "~") if len(home) > 1 else text


def _show(findings: list[Finding]) -> None:
    table = Table("", "", Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
    seen = ""
    for each in findings:
        if each.part != seen:
            table.add_row("", Text(each.part, style="bold"))
            seen = each.part
        colour = {MISSING: "yellow", BROKEN: "red", FINE: "green"}.get(each.state, "")
        remedy = f"\ntry: {each.remedy}" if each.remedy else ""
        table.add_row(Text(MARKS[each.state], style=colour), each.name, f"{each.found}{remedy}")
    console.print(table)


def _verdict(findings: list[Finding]) -> str:
    """Return the last line: whether fedhist works here, and what would help."""
    broken, missing = ([each for each in findings if each.state == state] for state in (BROKEN, MISSING))
    if broken:
        names = ", ".join(each.name for each in broken)
        return f"fedhist cannot work here: {names} must be repaired; see the lines with {MARKS[BROKEN]}."
    if missing:
        names = ", ".join(each.name for each in missing)
        return f"fedhist works here, but not as well as it could: see {names}, marked with {MARKS[MISSING]}."
    return f"Everything that fedhist needs is here. Lines with {MARKS[OPTIONAL]} are optional."
