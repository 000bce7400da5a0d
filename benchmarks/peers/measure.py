"""Other simulators on the same work: client updates a second against the plain PyTorch loop, start-up and memory.

    python benchmarks/peers/measure.py [--peers fedhist flower flgo ...] [--updates 240] [--repeats 1]

Each peer gets a virtual environment of its own under ``--envs``, with the versions listed in `PEERS`, and runs
workload W (``workload.py``) with its own simulator (``<peer>_sim.py``). The plain loop R0 is measured with the
same Python right before and right after, since machines are noisy and ratios less so. A Markdown table is
printed, and the raw figures are written as JSON. Linux only: memory is read from /proc.

A peer that needs another Python than this one is installed with ``--python flsim=/path/to/python3.10``, and one
that is to come from a checkout with ``--source plato=/path/to/checkout``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
TIME_LIMIT = 420


@dataclass(frozen=True)
class Peer:
    """What to install and which of the script's modes to run."""

    requirements: tuple[str, ...]
    modes: tuple[str, ...] = ("",)
    python: str | None = None
    """The version of Python it needs, where that may not be the one that runs this file."""


PEERS = {
    "fedhist": Peer((), ("fedavg", "fedhist")),
    "flower": Peer(("flwr[simulation]==1.41.0", "torch==2.13.0")),
    "jax": Peer(("jax==0.10.2", "jaxlib==0.10.2", "torch==2.13.0"), ("vmap", "map")),
    "flgo": Peer(("flgo==0.4.4", "torch==2.13.0"), ("sync", "threads", "async")),
    # Its configuration classes have mutable defaults, which dataclasses refuse from Python 3.11 on.
    "flsim": Peer(("flsim==0.1.0", "torch==2.13.0", "torchvision==0.28.0"), ("sync", "async"), "3.10"),
    "pfl": Peer(("pfl[pytorch]==0.6.0", "torch==2.13.0")),
    "appfl": Peer(("appfl==1.12.0", "torch==2.13.0", "torchvision==0.28.0")),
    "fedlab": Peer(("fedlab==1.3.0", "torch==2.13.0", "torchvision==0.28.0")),
    "plato": Peer(("plato-learn==1.0", "torch==2.13.0", "torchvision==0.28.0"), ("sync", "async"), "3.12"),
}

QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Nobody is told about the runs, nothing is fetched, and processes talk over loopback.
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MPLBACKEND": "Agg",
    "PYTHONWARNINGS": "ignore",
}


class NotMeasuredError(Exception):
    """Why a peer has no figures."""


@dataclass
class Row:
    """One line of the table."""

    peer: str
    mode: str
    result: dict | None = None
    r0: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    start_up: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    problem: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--updates", type=int, default=240, help="client updates of a run")
    parser.add_argument("--loop-updates", type=int, default=120, help="client updates of a run of R0")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each peer, each between two of R0")
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "fedhist-peers")
    parser.add_argument("--json", type=Path, help="raw figures; peers.json beside the environments by default")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="Python to install it with")
    parser.add_argument("--source", action="append", default=[], metavar="PEER=PATH", help="checkout to install")
    args = parser.parse_args()
    pythons, sources = (dict(pair.split("=", 1) for pair in pairs) for pairs in (args.python, args.source))
    args.envs.mkdir(parents=True, exist_ok=True)

    rows = []
    for name in args.peers:
        peer = PEERS[name]
        try:
            python = environment(name, peer, args.envs, pythons.get(name), sources.get(name))
        except NotMeasuredError as error:
            rows.append(Row(name, "", problem=str(error)))
            continue
        r0: list[float] = []
        for mode in peer.modes:
            rows.append(row := Row(name, mode, r0=r0[-1:]))
            print(f"{name} {mode}", file=sys.stderr, flush=True)
            try:
                measure(row, python, args)
            except NotMeasuredError as error:
                row.problem = str(error)
                print(f"  {error}", file=sys.stderr, flush=True)
            r0 = row.r0 if row.ratios else []  # what came right after one mode comes right before the next
    report(rows, args)


def environment(name: str, peer: Peer, envs: Path, base: str | None, source: str | None) -> Path:
    """Return the Python of the peer's environment, which is made when it is not there or is out of date."""
    if not peer.requirements:
        return Path(sys.executable)
    wanted = [source, *peer.requirements[1:]] if source else list(peer.requirements)
    folder = envs / name
    python, note = folder / "bin" / "python", folder / "installed.json"
    if note.exists() and json.loads(note.read_text()) == wanted:
        return python
    print(f"installing {' '.join(wanted)}", file=sys.stderr, flush=True)
    if not python.exists():
        running = f"{sys.version_info.major}.{sys.version_info.minor}"
        same = peer.python in (None, running)
        base = base or (sys.executable if same else shutil.which(f"python{peer.python}"))
        if base is None:
            raise NotMeasuredError(f"needs Python {peer.python}; name one with --python {name}=PATH")
        run_logged([base, "-m", "venv", str(folder)], envs / f"{name}-install.log")
    run_logged([str(python), "-m", "pip", "install", "--quiet", *wanted], envs / f"{name}-install.log")
    note.write_text(json.dumps(wanted))
    return python


def run_logged(command: list[str], log: Path) -> None:
    """Run a step of an installation."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    log.write_text(done.stdout)
    if done.returncode:
        raise NotMeasuredError(f"cannot be installed: {last_line(done.stdout)}")


def measure(row: Row, python: Path, args: argparse.Namespace) -> None:
    """Run R0, the peer, R0, … and put the figures into the row."""
    if not row.r0:
        row.r0.append(plain_loop(python, args.loop_updates))
    for _ in range(args.repeats):
        command = [str(HERE / f"{row.peer}_sim.py"), "--updates", str(args.updates), "--mode", row.mode]
        log = args.envs / f"{row.peer}-{row.mode or 'run'}.log"
        with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
            memory = run_watched(python, command, log, Path(folder))
            result = Path(folder) / "result"
            if not result.exists():
                raise NotMeasuredError(f"failed: {last_line(log.read_text(errors='replace'))}")
            row.result = json.loads(result.read_text().removeprefix("PEER "))
        row.r0.append(plain_loop(python, args.loop_updates))
        row.rates.append(row.result["updates"] / row.result["seconds"])
        row.ratios.append(row.rates[-1] / mean(row.r0[-2:]))
        row.start_up.append(row.result["start_up"])
        row.memory.append(memory)
        print(f"  {row.rates[-1]:.1f} updates/s, {row.ratios[-1]:.2f} × R0", file=sys.stderr, flush=True)


def plain_loop(python: Path, updates: int) -> float:
    """Measure R0 in a process of its own."""
    command = [str(python), str(HERE / "workload.py"), "--updates", str(updates)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(python), check=False)
    if done.returncode:
        raise NotMeasuredError(f"R0 failed: {last_line(done.stderr)}")
    return float(done.stdout.split()[1])


def clean_environment(python: Path, **more: str) -> dict[str, str]:
    """Return the variables for a process of the peer's environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | QUIET | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"} | more


def run_watched(python: Path, command: list[str], log: Path, folder: Path) -> int:
    """Run a peer's script; return the largest sum of its processes' resident memory, in bytes."""
    mark = f"PEER_RUN={uuid.uuid4().hex}"
    name, value = mark.split("=")
    peer_env = clean_environment(
        python,
        **{name: value},
        PEER_RESULT=str(folder / "result"),
        PEER_FOLDER=str(folder),
        PEER_LAUNCHED=str(time.time()),
    )
    with (
        log.open("w") as out,
        subprocess.Popen(
            [str(python), *command], stdout=out, stderr=subprocess.STDOUT, env=peer_env, cwd=folder
        ) as process,
    ):
        watcher = Watcher(mark.encode())
        watcher.start()
        try:
            process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            out.write(f"\nstopped after {TIME_LIMIT} s\n")
            process.kill()
        watcher.finish()
        return watcher.peak


class Watcher(threading.Thread):
    """Adds up the resident memory of all processes that a run started, however they were started.

    They are known by a variable in their environment, which children inherit, looked up when a process is
    first seen. Pages that processes share are counted once for each.
    """

    def __init__(self, mark: bytes) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._mark = mark
        self._ours: dict[int, bool] = {}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.3):
            self.peak = max(self.peak, sum(map(resident, self.members())))

    def members(self) -> list[int]:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        for pid in pids:
            if pid not in self._ours:
                try:
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    variables = []
                self._ours[pid] = self._mark in variables
        return [pid for pid in pids if self._ours[pid]]

    def finish(self) -> None:
        """Stop watching and end what the run left behind."""
        self._done.set()
        self.join()
        for pid in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue


def resident(pid: int) -> int:
    """Return a process's resident memory in bytes, 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def last_line(text: str) -> str:
    """Return the last line of an output that says something, the reason of a failure as a rule."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "workload W" in line or "stopped after" in line]
    return ([*lines[-1:], *named[-1:]] or ["no output"])[-1][:300]


def report(rows: list[Row], args: argparse.Namespace) -> None:
    """Print the table and write the raw figures."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    cores = len(os.sched_getaffinity(0))
    measured = [row for row in rows if row.ratios and row.result]
    torch_versions = ", ".join(sorted({row.result["torch"].split("+")[0] for row in measured if row.result}))
    print(f"{today}, {cores} cores ({cpu()}), PyTorch {torch_versions}; {args.updates} client updates a run, ", end="")
    print(f"{args.repeats} run{'s' if args.repeats > 1 else ''} each\n")
    print("| peer | version | mode | updates/s | ÷ R0 | R0, updates/s | start-up, s | peak memory, GB | how |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if row not in measured or row.result is None:
            print(f"| {row.peer} | – | {row.mode} | not measured: {row.problem} | | | | | |")
            continue
        cells = [
            row.peer,
            row.result["version"],
            row.result["mode"],
            span(row.rates, 1),
            span(row.ratios, 2),
            span(row.r0, 1),
            span(row.start_up, 1),
            f"{max(row.memory) / 1e9:.1f}",
            row.result["notes"],
        ]
        print(f"| {' | '.join(cells)} |")
    target = args.json or args.envs / "peers.json"
    facts = {"date": today, "cores": cores, "cpu": cpu(), "python": platform.python_version(), "updates": args.updates}
    target.write_text(json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def span(values: list[float], digits: int) -> str:
    """Return a figure, or the smallest and the largest of several where they differ."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def cpu() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
