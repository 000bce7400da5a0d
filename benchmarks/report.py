"""How long a report on many runs takes, and how large it gets.

python benchmarks/report.py            # 500 runs: 8 methods, 3 seeds, 21 settings
python benchmarks/report.py --sweep    # 500 settings with one run each
python benchmarks/report.py --seeds    # one setting, 10 methods, 50 seeds
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.report.fake import fake_comparison

NAMES = ("FedHist", "FedAvg", "FedProx", "MOON", "DynSGD", "TWAFL", "WKAFL", "REFL", "FedHist(ina=False)", "Own")
SIZES = {"rounds": 1000, "k": 10, "clients": 100}


def write(folder: Path, kind: str) -> None:
    lifts = {name: -0.02 * i for i, name in enumerate(NAMES)}
    if kind == "seeds":
        fake_comparison(folder / "a", lifts, 50, **SIZES)
    elif kind == "sweep":
        for i in range(500):
            fake_comparison(folder / f"{i:03d}", {"FedHist": 0.0}, 1, beta=0.1 + i / 1000, **SIZES)
    else:
        eight = dict(list(lifts.items())[:8])
        for i in range(21):
            methods = eight if i < 20 else dict(list(eight.items())[:6])
            fake_comparison(folder / f"{i:02d}", methods, 3 if i < 20 else 4, beta=0.1 + i / 100, **SIZES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_const", dest="kind", const="sweep", default="settings")
    parser.add_argument("--seeds", action="store_const", dest="kind", const="seeds")
    parser.add_argument("--keep", type=Path, help="where to leave the page")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "runs", args.kind)
        runs = len(list((folder / "runs").rglob("summary.json")))
        page = args.keep or folder / "report.html"
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fedhist", "report", folder / "runs", "-o", page], check=True)
        took = time.perf_counter() - started
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy, size = usage.ru_utime + usage.ru_stime, page.stat().st_size / 1e6
        print(f"{args.kind}: {runs} runs, {took:.1f} s with start-up, {busy:.1f} s of one core, {size:.1f} MB")


if __name__ == "__main__":
    main()
