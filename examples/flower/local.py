"""A SuperLink and SuperNodes as processes of this machine, talking over loopback.

For demonstrations and tests. What it starts it also stops, and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

APP = Path(__file__).parent
BIN = Path(sys.executable).parent
NAME = "loopback"
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


def free_port() -> int:
    """Return a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """Processes that write their logs into a folder, and end when this program does.

    Parameters
    ----------
    folder
        Where logs go.
    env
        Environment variables beside those of this program.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder.resolve()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        path = f"{BIN}:{os.environ['PATH']}"
        self.env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (env or {})
        if modules := self.env.get("PYTHONPATH"):  # relative to where this program was started
            self.env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, modules.split(os.pathsep)))

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, *command: str) -> None:
        """Start a process."""
        with (self.folder / f"{name}.log").open("ab") as log:
            # A session of its own, so that Ctrl-C reaches this program alone, which then stops everything in order.
            self.processes[name] = subprocess.Popen(
                command,
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (it calls the kernel and nothing else)
            )

    def listening(self, name: str, port: int, seconds: float = 60) -> None:
        """Wait until a process listens."""
        deadline = time.monotonic() + seconds
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if time.monotonic() > deadline or self.processes[name].poll() is not None:
                raise RuntimeError(f"{name} did not start:\n{self.log(name)[-2000:]}")
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop everything that was started; nothing short of SIGKILL interrupts that."""
        impatient = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, impatient)
        try:
            self._stop(list(self.processes), signal.SIGTERM)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Stop a process and all that it has started."""
        self._stop([name], how)

    def _stop(self, names: Sequence[str], how: signal.Signals) -> None:
        stopping = [self.processes.pop(name) for name in names]
        started = {pid for each in stopping for pid in (each.pid, *_descendants(each.pid))}
        _signal(started, how)
        for process in stopping:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _signal(started - {process.pid for process in stopping}, signal.SIGKILL)  # those that are still there

    def log(self, name: str) -> str:
        """Return what a process has written."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""


class Deployment(Processes):
    """A SuperLink and SuperNodes without encryption, on ports that were free.

    Parameters
    ----------
    folder
        Where logs, the database and what Flower keeps go.
    app
        Folder of the Flower app.
    database
        Whether the SuperLink keeps its state in a file.
    """

    def __init__(self, folder: Path, app: Path = APP, database: bool = False) -> None:
        env = {
            "FLWR_HOME": str(folder.resolve() / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        super().__init__(folder, env)
        self.app = app.resolve()
        self.database = ["--database", str(self.folder / "superlink.db")] if database else []
        self.port = free_port()

    def __enter__(self) -> Self:
        (self.folder / "flwr").mkdir(parents=True, exist_ok=True)
        config = f'[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (self.folder / "flwr" / "config.toml").write_text(config)
        try:
            self.start_superlink()
        except BaseException:
            self.stop()
            raise
        return self

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it listens."""
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        self.start("superlink", "flower-superlink", "--insecure", *place, *self.database)
        self.listening("superlink", self.port)

    def start_node(self, name: str, **config: object) -> None:
        """Start a SuperNode, with settings that its ClientApp finds in `context.node_config`."""
        link = ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port())]
        self.start(name, "flower-supernode", "--insecure", *link, "--node-config", _toml(config))

    def run(self, **config: object) -> None:
        """Start the app, and keep the log of its server in run.log."""
        if "run" in self.processes:
            self.kill("run")  # only the process that follows the log of the run before
        self.start("run", "flwr", "run", str(self.app), NAME, "--stream", "-c", _toml(config))

    def server_app(self) -> int | None:
        """Return the process that runs the ServerApp."""
        return next(
            (pid for pid in _descendants(self.processes["superlink"].pid) if "serverapp" in _command(pid)), None
        )


def _toml(config: Mapping[str, object]) -> str:
    """Return settings as Flower's command line wants them."""
    quoted = {
        name: f'"{value}"' if isinstance(value, (str, Path)) else str(value).lower()  # false, not False
        for name, value in config.items()
    }
    return " ".join(f"{name.replace('_', '-')}={value}" for name, value in quoted.items())


def _end_with_parent() -> None:
    """Let the kernel end this process when the one that started it is gone, even if that was killed (Linux)."""
    if PRCTL is not None:
        PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _signal(pids: Iterable[int], how: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    try:
        children = [
            int(word)
            for each in Path(f"/proc/{pid}/task").iterdir()
            for word in (each / "children").read_text().split()
        ]
    except OSError:
        return []
    return children + [each for child in children for each in _descendants(child)]


def wait_for(file: Path, processes: Processes, seconds: float) -> None:
    """Wait until a file exists, at most until the run ends."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        ended = processes.processes["run"].poll() is not None and not file.exists()
        if ended or time.monotonic() > deadline:
            what = "the run has ended" if ended else f"{seconds:g} s have passed"
            raise TimeoutError(f"{what}, and {file} does not exist:\n{processes.log('run')[-4000:]}")
        time.sleep(0.2)
