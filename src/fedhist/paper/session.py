"""One call of ``fedhist paper`` or ``fedhist league``: run what a folder lacks, show what there is, pack it."""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhist.errors import InvalidInput, require
from fedhist.paper.cells import Cell
from fedhist.paper.runner import SIDE_BY_SIDE, pack, results, run
from fedhist.paper.tables import Results
from fedhist.simulation.functions import version_of
from fedhist.simulation.methods import as_method
from fedhist.store.files import whole_file


def share_of(text: str) -> slice:
    """Return which of some things belong to a share such as 2/8."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise InvalidInput(f"part must look like 2/8, the second of eight shares, got {text!r}.")
    return slice(part - 1, None, parts)


class Session:
    """A folder with results, how its runs are made, and what is printed about it.

    Parameters
    ----------
    folder
        Where finished runs are kept and tables and figures are written.
    beside
        An archive with finished runs that are not run again either.
    redraw
        Run nothing, show the runs there are.
    quiet
        Do not say on standard error how far it is.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "auto",
        engine: str = "local",
        data_dir: str | Path | None = None,
        redraw: bool = False,
        beside: Path | None = None,
        side_by_side: int = SIDE_BY_SIDE,
        quiet: bool = False,
    ) -> None:
        self.folder, self.beside, self._redraw, self._quiet = Path(folder), beside, redraw, quiet
        self._device, self._engine, self._data_dir, self._most = device, engine, data_dir, side_by_side
        self._started = time.perf_counter()

    def finished(self, cells: Sequence[Cell], own: Sequence[Cell], what: str = "") -> Results:
        """Run what is missing of this call's own cells; return the results of all cells that are finished.

        With `what` they are, it is said how many of its own need not be run.
        """
        there = self.found(cells)
        missing = [cell for cell in own if cell not in there]
        _require_same_code([(cell, there[cell]) for cell in own if cell in there], self.folder)
        if what:
            self._progress(f"Runs {what}: {len(own) - len(missing):,} of {len(own):,} are there already.")
        if not missing or self._redraw:
            return there
        try:
            run(
                missing, self.folder, on_batch=self._announce, device=self._device, engine=self._engine,
                data_dir=self._data_dir, side_by_side=self._most,
            )  # fmt: skip
        except KeyboardInterrupt:
            done = len(self.found(own))
            how = f"{done} of {len(own)} runs are in {self.folder}, and the same command resumes."
            print(f"Interrupted; {how}", file=sys.stderr)
            raise SystemExit(130) from None
        return self.found(cells)

    def found(self, cells: Sequence[Cell]) -> Results:
        """Return the results of the cells that are finished."""
        return results(cells, self.folder, self.beside)

    def _announce(self, batch: Sequence[Cell]) -> None:
        first = batch[0]
        what = f"{first.method}, rates {first.lr:g} × {first.server_lr:g}, seed {first.seed}"
        what = what if len(batch) == 1 else f"{len(batch)} runs"
        self._progress(f"{self._seconds}: {what}, {first.rounds:,} rounds on {first.dataset}")

    def _progress(self, line: str) -> None:
        if not self._quiet:
            print(line, file=sys.stderr, flush=True)

    @property
    def _seconds(self) -> str:
        return f"{time.perf_counter() - self._started:7.1f} s"

    def show(self, name: str, table: str, missing: str = "") -> None:
        """Print a table and write it into the folder."""
        print(f"\n{name}{missing}\n\n{table}\n")
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self.folder / f"{name}.md") as part:
            part.write_text(table + "\n", encoding="utf-8")

    def draw(self, name: str, figure: Callable[[Path], None]) -> None:
        """Draw a figure into the folder."""
        figure(self.folder / f"{name}.png")
        print(f"Figure: {self.folder / f'{name}.png'}")

    def end(self, packed: bool, shortened: Callable[[str], str] = str) -> None:
        """Pack the folder's runs if that was asked for, and say how long all this took."""
        if packed:
            print(f"Runs: {pack(self.folder, shortened)}")
        self._progress(f"{self._seconds} in all")


def _require_same_code(done: Iterable[tuple[Cell, Mapping[str, Any]]], folder: Path) -> None:
    """Raise if finished runs are those of a strategy whose code the user has changed since."""
    versions: dict[str, str | None] = {}
    changed = Counter[str]()
    for cell, result in done:
        if "code" in result:
            if cell.method not in versions:
                versions[cell.method] = version_of(as_method(cell.method))
            changed[cell.method] += result["code"] != versions[cell.method]
    for method, runs in changed.items():
        same = f"the code of {method} has changed since {runs} of its runs in {folder} were made"
        require(not runs, f"{same}; take another folder (--out).")


def lacking(found: int, wanted: int) -> str:
    """Return how many runs are missing, in brackets; nothing if there are all."""
    return f" ({wanted - found} of {wanted} runs are missing)" if found < wanted else ""
