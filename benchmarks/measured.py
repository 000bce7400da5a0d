"""What Nowcast measures along a run, in four settings of the small league: one picture.

python benchmarks/measured.py --data-dir DIR --out docs/nowcast/measured.png
"""

import argparse
from dataclasses import replace
from pathlib import Path

from small_league import SETTINGS, small, split_of

import fedhist as fh
from fedhist.looks import looks
from fedhist.paper.league import Entrant, cell_of
from fedhist.report.curves import drawing

RATES = {"one-0.3-10": (0.03, 10.0), "one-0.3-100": (0.1, 1.0), "five-0.3-10": (0.1, 1.0), "five-0.3-100": (0.1, 1.0)}
"""Settings and the rates that were chosen there."""
PANELS = ("β: share of the last upload that is removed", "mean trust in uploads", "s: share of signal")


def main() -> None:
    """Run Nowcast once in each setting and draw what it measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("measured.png"))
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with drawing(given.out, 1, len(PANELS), (12, 3.2), 110) as axes:
        for name, look in looks(RATES).items():
            setting = SETTINGS["full"][name]
            cell = replace(cell_of((setting, Entrant("nowcast")), *RATES[name], 1), validation=True, eval_every=10)
            history = fh.simulate_many([cell.trial(small(split_of(cell), given.data_dir))], device="cpu")[0]
            rounds, measured = history.traces["round"], history.traces["measured"]
            for axis, values in zip(axes, measured.T, strict=True):
                axis.plot(
                    rounds / setting.rounds, values, color=look.colour, linestyle=look.dashes, label=setting.title
                )
        for axis, title in zip(axes, PANELS, strict=True):
            axis.set(title=title, xlabel="share of the rounds", ylim=(0, 1.02))
        axes[0].legend(fontsize=8)


if __name__ == "__main__":
    main()
