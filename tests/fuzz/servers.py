"""What a server on a network leaves behind: its snapshot and its journal."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import fedhist as fh
from fedhist.store.deployed import CHECKPOINT, GROWING, KINDS, State, export, read_state
from fedhist.store.journal import Journal
from tests.fuzz.readers import Files, Reader, contents


def server_files(tmp: Path) -> Files:
    """A server's snapshot, and a journal of three more rounds."""
    shutil.copytree(Path(__file__).parents[1] / "flower" / "old" / "fedhist", tmp / "state")
    state = read_state(tmp / "state")
    assert state is not None
    journal = Journal(tmp / "state" / CHECKPOINT, KINDS[0], GROWING)
    for round_ in range(4, 8):
        facts = state.facts | {"server": state.facts["server"] | {"round": round_}}
        tables = {
            name: torch.cat([t, t[-1:]][: 1 + (round_ > 4)]) for name, t in state.tensors.items() if "rows." in name
        }
        state = state._replace(tensors={**state.tensors, **tables}, facts=facts)
        state.tensors["model"].add_(1)
        journal.write(state.tensors, facts, {"strategy.G": torch.tensor([0])})
        journal.wait()
    journal.close()
    return contents(tmp / "state")


def use_server(state: State | None, folder: Path) -> None:
    if state is None:
        return
    before = folder / "model.safetensors", folder / "history"
    assert export(folder, *before).facts["server"]["round"] <= 7
    fh.History.load(before[1])


SERVERS = {
    "server": Reader(server_files, read_state, use_server),
    "forged server": Reader(server_files, read_state, use_server, forged=True),
}
