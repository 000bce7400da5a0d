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


class Deployment:
    """A network of processes in a folder of its own.

    Parameters
    ----------
    folder
        Where logs, databases and certificates go.
    app
        Folder of the Flower app.
    database
        Whether the SuperLink keeps its state in a file.
    secrets
        Folder made by `secrets.sh`; with it everything is encrypted and SuperNodes must have a known key.
    """

    def __init__(self, folder: Path, app: Path = APP, database: bool = False, secrets: Path | None = None) -> None:
        self.folder, self.app, self.secrets = folder.resolve(), app.resolve(), secrets
        self.database = self.folder / "superlink.db" if database else None
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = os.environ | {
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",  # a second by default, on each end of each message
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def __enter__(self) -> Self:
        (self.folder / "flwr").mkdir(parents=True, exist_ok=True)
        safety = f'root-certificates = "{self.secrets / "ca.crt"}"' if self.secrets else "insecure = true"
        config = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\n{safety}\n'
        (self.folder / "flwr" / "config.toml").write_text(config)
        try:
            self.start_superlink()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop everything that was started; nothing short of SIGKILL interrupts that."""
        impatient = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, impatient)
        try:
            self._stop(list(self.processes), signal.SIGTERM)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            # A session of its own, so that Ctrl-C reaches this program alone, which then stops everything in order.
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (it calls the kernel and nothing else)
            )

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it listens."""
        kept = ["--database", str(self.database)] if self.database else []
        if self.secrets:
            files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
            safety = [word for flag, file in files.items() for word in (f"--ssl-{flag}", str(self.secrets / file))]
            safety.append("--enable-supernode-auth")
        else:
            safety = ["--insecure"]
        self._start("superlink", "flower-superlink", *safety, "--host", "127.0.0.1", "--port", str(self.port), *kept)
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if time.monotonic() > deadline or self.processes["superlink"].poll() is not None:
                raise RuntimeError(f"the SuperLink did not start:\n{self.log('superlink')[-2000:]}")
            time.sleep(0.2)

    def start_node(self, name: str, key: Path | None = None, insecure: bool = False, **config: object) -> None:
        """Start a SuperNode, with settings that its ClientApp finds in `context.node_config`."""
        settings = _toml(config)
        encrypted = self.secrets is not None and not insecure
        safety = ["--root-certificates", str(self.secrets / "ca.crt")] if encrypted and self.secrets else ["--insecure"]
        safety += ["--auth-supernode-private-key", str(key)] if key else []
        link = ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port())]
        self._start(name, "flower-supernode", *safety, *link, "--node-config", settings)

    def flwr(self, *arguments: str) -> str:
        """Run a `flwr` command to its end."""
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments], env=self.env, capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def run(self, **config: object) -> None:
        """Start the app, and keep the log of its server in run.log."""
        if "run" in self.processes:
            self.kill("run")  # only the process that follows the log of the run before
        self._start("run", "flwr", "run", str(self.app), NAME, "--stream", "-c", _toml(config))

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

    def server_app(self) -> int | None:
        """Return the process that runs the ServerApp."""
        return next(
            (pid for pid in _descendants(self.processes["superlink"].pid) if "serverapp" in _command(pid)), None
        )

    def log(self, name: str) -> str:
        """Return what a process has written."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""


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


def wait_for(file: Path, deployment: Deployment, seconds: float) -> None:
    """Wait until a file exists, at most until the run ends."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        ended = deployment.processes["run"].poll() is not None and not file.exists()
        if ended or time.monotonic() > deadline:
            what = "the run has ended" if ended else f"{seconds:g} s have passed"
            raise TimeoutError(f"{what}, and {file} does not exist:\n{deployment.log('run')[-4000:]}")
        time.sleep(0.2)
