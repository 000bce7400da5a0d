"""How long may a SuperLink be away before its ServerApp is given up?

    python benchmarks/flower/outage.py 10 20 30 40 60

The SuperLink has a database and runs with `--isolation process`, so that the ServerApp lives outside it. It is killed
while rounds close, and started again after as many seconds as each argument says. A minute and a half later the run is
alive or not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "flower"))

from local import Deployment


class Apart(Deployment):
    """A deployment whose ServerApp is no child of the SuperLink."""

    def start_superlink(self) -> None:
        place = ["--host", "127.0.0.1", "--port", str(self.port), *self.database]
        self.start("superlink", "flower-superlink", "--insecure", "--isolation", "process", *place)
        self.listening("superlink", self.port)


def saved(state: Path) -> int:
    """Return when a checkpoint was last written; 0 is never."""
    return max((file.stat().st_mtime_ns for file in state.glob("kasync.*")), default=0)


def survived(folder: Path, seconds: float) -> tuple[float, float | None]:
    """Return how long the SuperLink was away, and after how many seconds the next round closed, if one did."""
    state = folder / "state"
    with Apart(folder, ROOT / "tests" / "flower" / "app", database=True) as net:
        net.start("serverapp", "flower-superexec", "--insecure", "--runtime-api-address", f"127.0.0.1:{net.port}")
        for part in range(3):
            net.start_node(f"node{part}", partition_id=part)
        net.run(rounds=1000, checkpoint=state, out=folder / "out")
        while not saved(state):
            time.sleep(0.5)
        time.sleep(15)
        net.kill("superlink")
        killed = time.monotonic()
        time.sleep(seconds)
        net.start_superlink()
        away, before = time.monotonic() - killed, saved(state)
        while time.monotonic() - killed < away + 90:
            if saved(state) > before:
                return away, time.monotonic() - killed
            time.sleep(0.5)
        return away, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, nargs="+")
    print("| SuperLink away, s | next round, s after the kill |\n| --- | --- |", flush=True)
    for seconds in parser.parse_args().seconds:
        with tempfile.TemporaryDirectory(prefix="fedhist-outage-") as place:
            away, after = survived(Path(place), seconds)
        print(f"| {away:.0f} | {'none: the run had ended' if after is None else f'{after:.0f}'} |", flush=True)


if __name__ == "__main__":
    main()
