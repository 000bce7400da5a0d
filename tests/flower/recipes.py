"""Reads what examples/flower tells people to type, and runs it on loopback."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from tests.flower.processes import EXAMPLE

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
}
"""What keeps Flower from calling home, and short."""


def blocks(heading: str) -> list[str]:
    """Return the shell blocks of a section of the example's README."""
    section = (EXAMPLE / "README.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```", section, flags=re.S | re.M)


def unit(name: str) -> Mapping[str, str]:
    """Return the [Service] section of a systemd unit; of options that are given twice, the last."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((EXAMPLE / "systemd" / name).read_text().replace("\\\n", " "))
    return parser["Service"]


def command_of(name: str, changes: Mapping[str, str] | None = None) -> list[str]:
    """Return the words of the command that a systemd unit starts."""
    return [changed(word, changes) if changes else word for word in shlex.split(unit(name)["ExecStart"])]


def services() -> dict[str, dict[str, Any]]:
    """Return the services of compose.yaml, each with its command as words."""
    services = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]
    for service in services.values():
        command = service.get("command", [])
        service["command"] = shlex.split(command) if isinstance(command, str) else command
    return dict(services)


def typist(local: ModuleType, folder: Path) -> Any:
    """Return somebody with a copy of the example and a home of their own, who has never run Flower."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "secrets", "state", "history"))

    class Typist(local.Processes):  # type: ignore[misc,name-defined]
        def types(self, block: str, changes: Mapping[str, str], name: str = "") -> str:
            """Type the lines of a block; servers go on in the background, the others must succeed."""
            lines = changed(block, changes).replace("\\\n", " ").splitlines(keepends=True)
            servers = [line for line in lines if re.match(r"(\w+=\S+ )*flower-", line)]
            for number, line in enumerate(servers):
                self.start(f"{name or 'server'}{number or ''}", "bash", "-c", line)
            return self.does("".join(line for line in lines if line not in servers))

        def does(self, script: str) -> str:
            command, here = ["bash", "-euc", script], {"cwd": self.folder, "env": self.env}
            done = subprocess.run(command, **here, check=False, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
            return done.stdout

    person = Typist(folder, QUIET | {"HOME": str(folder / "home")})
    person.env = {name: value for name, value in person.env.items() if name != "FLWR_HOME"}
    return person


def changed(text: str, changes: Mapping[str, str]) -> str:
    """Return a text in which parts are replaced, all at once."""
    parts = sorted(changes, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, parts)), lambda part: changes[part[0]], text)
