"""Puts saved runs into other files: into one if they are resumed together, into several if they are resumed apart."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedhist.simulation.checkpoint import KIND, Content, file_name, require_among, stored_in
from fedhist.store import snapshot


def _empty(stored: Mapping[str, Any]) -> Content:
    """Return the content of a file like another, of no runs."""
    return {}, {**stored, **{name: [] for name in ("members", "facts", "described", "numerics")}}


def _add(
    to: Content, tensors: Mapping[str, Tensor], stored: Mapping[str, Any], place: int, member: tuple[int, int]
) -> None:
    """Add the run at a place of a file to another, with this number and device."""
    kept, facts = to
    new = len(facts["members"])
    kept |= {f"{new}.{n.split('.', 1)[1]}": t for n, t in tensors.items() if n.split(".", 1)[0] == str(place)}
    facts["members"].append(member)
    for name in ("facts", "described", "numerics"):
        facts[name].append(stored[name][place])
    facts["wall_seconds"] = max(facts["wall_seconds"], stored["wall_seconds"])


def divide(folder: Path, pieces: Sequence[Sequence[int]]) -> None:
    """Let each file of a folder hold runs of one piece of work only, on the one device that a piece has.

    Whoever is killed meanwhile leaves a folder that can be resumed: the file that is divided goes last, replaced by the
    part that has its name, and until then the parts hold what it does.
    """
    home = {i: place for place, piece in enumerate(pieces) for i in piece}
    for file in sorted(folder.glob("runs-*.safetensors")):
        tensors, stored = stored_in(file)
        require_among(home, stored["members"], file)
        parts: dict[int, Content] = {}
        for place, (i, _) in enumerate(stored["members"]):
            _add(parts.setdefault(home[i], _empty(stored)), tensors, stored, place, (i, 0))
        if [facts["members"] for _, facts in parts.values()] != [stored["members"]]:
            for own, facts in sorted(parts.values(), key=lambda part: -min(i for i, _ in part[1]["members"])):
                snapshot.write(folder / file_name(facts["kind"], dict(facts["members"])), KIND, own, facts)


def carry_over(saved: Sequence[tuple[Path, int]], folder: Path) -> None:
    """Make a folder from which a call can resume trials that were saved in others, completely or not at all.

    `saved` names, for each trial of that call, the folder it was saved in and the number it had there. Runs that can
    take their rounds together are put into one file, so that they will.
    """
    together: dict[tuple[object, ...], Content] = {}
    for home in dict.fromkeys(home for home, _ in saved):
        new = {number: i for i, (own, number) in enumerate(saved) if own == home}
        for file in sorted(home.glob("runs-*.safetensors")):
            tensors, stored = stored_in(file)
            for place, (i, device) in enumerate(stored["members"]):
                if i not in new:
                    continue
                about = stored["described"][place]
                key = stored["kind"], stored["round"], about.get("rounds"), about.get("eval_every")
                _add(together.setdefault(key, _empty(stored)), tensors, stored, place, (new[i], device))
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for tensors, stored in together.values():
        snapshot.write(part / file_name(stored["kind"], dict(stored["members"])), KIND, tensors, stored)
    part.rename(folder)
