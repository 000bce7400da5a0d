"""What examples/flower tells people to type runs as it stands, but for ports, addresses and folders."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fedhist as fh

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from tests.flower.processes import EXAMPLE, load_local
from tests.flower.recipes import blocks, changed, command_of, services, typist, unit

APP = Path(__file__).parent / "app"
NGINX = shutil.which("nginx")
UNITS = ["flower-superlink.service", "flower-serverapp.service", "flower-supernode@.service"]
needs = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="openssl or ssh-keygen is not installed"
)


@pytest.fixture(scope="module")
def local() -> Iterator[ModuleType]:
    yield load_local()


def secrets(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(EXAMPLE / "secrets.sh")
    return subprocess.run([script, *arguments], check=False, capture_output=True, text=True)


def verified(folder: Path, *name: str) -> bool:
    command = ["openssl", "verify", "-CAfile", "ca.crt", *name, "server.crt"]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode == 0


@needs
def test_certificates_hold_for_names_and_addresses(tmp_path: Path) -> None:
    made = secrets(str(tmp_path), "2", "server.example.org", "192.0.2.7", "2001:db8::7")
    assert made.returncode == 0, made.stderr
    for address in ("127.0.0.1", "::1", "192.0.2.7", "2001:db8::7"):
        assert verified(tmp_path, "-verify_ip", address), address
    assert verified(tmp_path, "-verify_hostname", "server.example.org")
    assert not verified(tmp_path, "-verify_ip", "192.0.2.8")
    assert not verified(tmp_path, "-verify_hostname", "192.0.2.7.example.org")
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())
    before = {name: (tmp_path / name).read_bytes() for name in ("ca.crt", "node0", "superexec")}
    assert secrets(str(tmp_path), "3", "192.0.2.9").returncode == 0  # another node, another name
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert (tmp_path / "node2").exists() and verified(tmp_path, "-verify_ip", "192.0.2.9")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "FOLDER is missing"),
        (["-x"], "got '-x'"),
        (["F", "many"], "got 'many'"),
        (["F", "1", "300.0.0.1"], "'300.0.0.1' is not an IPv4 address"),
        (["F", "1", "192.0.2.7:8000"], "without a port"),
        (["F", "1", "[2001:db8::7]"], "without brackets"),
        (["F", "1", "a,DNS:b"], "'a,DNS:b' is not"),
        (["F", "1", "under_score"], "neither a host name nor an IP address"),
    ],
)
def test_wrong_names_make_no_certificate(arguments: list[str], reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "F"
    refused = secrets(*(str(folder) if word == "F" else word for word in arguments))
    assert refused.returncode == 2 and reason in refused.stderr and "usage: " in refused.stderr
    assert not folder.exists()


def test_on_one_machine_by_hand(local: ModuleType, tmp_path: Path) -> None:
    changes = {each: str(local.free_port()) for each in ("8000", "9094", "9095", "9096")} | {"rounds=2": "rounds=1"}
    with typist(local, tmp_path / "example") as person:
        superlink, nodes, run = blocks("Run it by hand on this machine")
        person.types(superlink, changes, "superlink")
        person.listening("superlink", int(changes["8000"]))
        person.types(nodes, changes, "node")
        person.types(run, changes)
    history = fh.History.load(person.folder / "history")  # relative to where the SuperLink was started
    assert history.clients.shape == (1, 3) and set(np.unique(history.clients)) == {0, 1, 2}


@needs
def test_on_several_machines(local: ModuleType, tmp_path: Path) -> None:
    port = str(local.free_port())
    changes = {"SERVER": "127.0.0.1", "0.0.0.0": "127.0.0.1", "8000": port, "rounds=50": "rounds=1"}
    with typist(local, tmp_path / "example") as person:
        make, superlink, register, node, run = blocks("Run it on several machines")
        person.types(make, changes)
        person.types(superlink, changes, "superlink")
        person.listening("superlink", int(port))
        person.types(register, changes)
        for part in range(3):
            own = {"node0": f"node{part}", "partition-id=0'": f"partition-id={part}' --port {local.free_port()}"}
            person.types(node, changes | own, f"node{part}")
        person.types(run, changes)
    history = fh.History.load(person.folder / "history")
    assert history.clients.shape == (1, 3) and set(np.unique(history.clients)) == {0, 1, 2}
    assert (person.folder / "state" / "kasync.safetensors").exists()


@needs
def test_a_fleet_has_only_known_nodes(local: ModuleType, tmp_path: Path) -> None:
    """The commands of the units: the ServerApp outside the SuperLink, which nginx, where there is one, hides."""
    link, gate = str(local.free_port()), str(local.free_port())
    changes = {"/opt/fedhist/bin/": "", "/etc/flower": str(tmp_path / "secrets"), "/var/lib": str(tmp_path)}
    changes |= {"8001": link, "8000": gate, "${SUPERLINK}": f"127.0.0.1:{gate if NGINX else link}"}
    assert secrets(str(tmp_path / "secrets"), "3").returncode == 0
    (tmp_path / "flower-superlink").mkdir()
    with typist(local, tmp_path / "example") as person:
        (person.folder / "home" / ".flwr").mkdir(parents=True)
        connection = changed((EXAMPLE / "connection.toml").read_text(), changes)
        (person.folder / "home" / ".flwr" / "config.toml").write_text(connection)
        person.start("superlink", *command_of(UNITS[0], changes))
        person.listening("superlink", int(link))
        executor = command_of(UNITS[1], changes)
        person.start("thief", *executor[:1], *executor[3:])  # without the secret
        person.start("serverapp", *executor)
        if NGINX:
            start_gate(person, tmp_path, changed((EXAMPLE / "nginx.conf").read_text(), changes | {"listen [": "# ["}))
            person.listening("gate", int(gate))

        def start(name: str, part: int, *flags: str) -> None:
            own = {"%i": f"node{part}", "${NODE_CONFIG}": f"partition-id={part}", "${PORT}": str(local.free_port())}
            program, *known = command_of(UNITS[2], changes | own)
            person.start(name, program, *(flags or known[:4]), *known[4:])

        for part in range(2):
            person.does(f"flwr supernode register {tmp_path}/secrets/node{part}.pub fleet --name site{part}")
            start(f"node{part}", part)
        start("stranger", 2)  # a key, but not a known one
        start("nameless", 2, "--root-certificates", f"{tmp_path}/secrets/ca.crt")
        start("plaintext", 2, "--insecure")
        person.does(f"flwr run {APP} fleet --stream -c 'rounds=1 out=\"{tmp_path}/out\"'")
        for name in ("stranger", "nameless", "plaintext"):
            log = person.log(name).lower()
            assert "starting flower supernode" in log and "supernode id" not in log, log
        person.processes["thief"].wait(30)  # it has been refused, and has given up
        assert person.processes["serverapp"].poll() is None
        for path in ("control/list-runs", "runtime/acquire-task", "fleet/../control/list-runs") if NGINX else ():
            ask = f"curl -s --path-as-is --cacert {tmp_path}/secrets/ca.crt -o /dev/null -w '%{{http_code}}' -X POST"
            assert person.does(f"{ask} https://127.0.0.1:{gate}/v1/{path}") == "403", path
    history = fh.History.load(tmp_path / "out")
    assert history.clients.shape == (1, 2) and set(np.unique(history.clients)) == {0, 1}
    assert [event["event"] for event in history.events].count("joined") == 2


def start_gate(person: Any, folder: Path, server: str) -> None:
    """Start nginx as somebody who is not root, with a server block of the example."""
    parts = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = " ".join(f"{part}_temp_path {folder}/{part};" for part in parts)
    http = f"http {{ access_log off; {places} {server} }}"
    (folder / "nginx.conf").write_text(f"pid {folder}/nginx.pid; error_log stderr; events {{}} {http}")
    person.start("gate", str(NGINX), "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;")


@pytest.mark.parametrize(
    ("service", "name"), [("superlink", UNITS[0]), ("serverapp", UNITS[1]), ("supernode", UNITS[2])]
)
def test_containers_run_the_commands_of_the_units(service: str, name: str) -> None:
    own = {"/opt/fedhist/bin/": "", "%i": "node", "/var/lib/flower-superlink": "/state"}
    own |= {"${SUPERLINK}": "${SERVER:-SERVER-is-not-set}:8000", "${NODE_CONFIG}": "partition-id=${PARTITION:-0}"}
    command = command_of(name, own)
    if service == "supernode":  # a container has its ports to itself
        at = command.index("--port")
        del command[at : at + 2]
    assert services()[service]["command"] == command


def test_containers_show_one_port_and_keep_keys_to_those_who_need_them() -> None:
    ours = services()
    assert {name: each["ports"] for name, each in ours.items() if "ports" in each} == {"pod": ["8000:8000"]}
    mounts = {name: [re.split(":(?=/|ro$)", mount) for mount in each.get("volumes", [])] for name, each in ours.items()}
    assert all(mode == ["ro"] for each in mounts.values() for source, _, *mode in each if source != "./state")
    holders = {name for name, each in mounts.items() if any(place.endswith("server.key") for _, place, *_ in each)}
    assert holders == {"superlink", "gate"}
    copied = re.findall(r"^COPY (.*) \S+$", (EXAMPLE / "Dockerfile").read_text(), flags=re.M)
    assert copied and all((EXAMPLE.parents[1] / file).exists() for line in copied for file in line.split())


@pytest.mark.parametrize("name", UNITS)
def test_units_give_little_away_and_try_again_without_end(name: str) -> None:
    service, text = unit(name), (EXAMPLE / "systemd" / name).read_text()
    wanted = {"User": "flower", "UMask": "0077", "NoNewPrivileges": "yes", "ProtectSystem": "strict"}
    assert wanted.items() <= dict(service).items()
    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}" and service["Restart"] == "always"
    assert "StartLimitIntervalSec=0" in text and "FLWR_TELEMETRY_ENABLED=0" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for name in UNITS:  # with a program that exists
        text = (EXAMPLE / "systemd" / name).read_text()
        (tmp_path / name).write_text(re.sub(r"/opt/fedhist/bin/\S+", sys.executable, text, count=1))
    files = [str(tmp_path / name) for name in UNITS]
    checked = subprocess.run(["systemd-analyze", "verify", *files], check=False, capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr
