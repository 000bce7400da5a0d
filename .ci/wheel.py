"""Install the wheel alone, with the lowest or the newest versions of what it needs, and use it far from the checkout.

    python .ci/wheel.py lowest|newest [REQUIREMENT…]

Requirements such as torch==2.13.0 replace versions that a machine cannot have.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = "report,privacy,tensorboard"
COMMANDS = (
    ["--version"],
    ["--help"],
    ["strategies"],
    ["world", "--clients", "20", "--k", "3"],
    ["run", "--rounds", "30", "--clients", "20", "--k", "4", "--quiet", "--record", "--tensorboard", "--out", "runs/a"],
    ["compare", "--strategy", "fedbuff", "--strategy", "nowcast", "--seeds", "2", "--rounds", "30", "--out", "runs/b"],
    ["resume", "runs/a"],
    ["replay", "runs/a", "--strategy", "refl", "--quiet"],
    ["report", "runs", "-o", "report.html"],
    ["league", "--redraw", "--out", "league"],
)  # fmt: skip


def lowest() -> list[str]:
    """Return the lowest versions that the package says it works with."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [re.sub(r">=", "==", each) for each in needed]


def main() -> None:
    """Build, install, and use."""
    which, *instead = sys.argv[1:] or [""]
    if which not in ("lowest", "newest"):
        sys.exit(__doc__)
    replaced = {re.split("[=<>]", each)[0] for each in instead}
    versions = [
        each for each in (lowest() if which == "lowest" else []) if each.split("=")[0] not in replaced
    ] + instead
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "versions.txt").write_text("\n".join(versions))
        subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place, str(ROOT)], check=True)
        (wheel,) = folder.glob("fedhist-*.whl")
        venv.create(folder / "venv", with_pip=True)
        pip = [str(folder / "venv" / "bin" / "pip"), "install", "-q", "-c", str(folder / "versions.txt")]
        subprocess.run([*pip, f"{wheel}[{EXTRAS}]"], check=True)
        subprocess.run([pip[0], "freeze"], check=True)
        away = folder / "away"
        away.mkdir()
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for command in COMMANDS:
            print("fedhist", *command, flush=True)
            done = subprocess.run(
                [str(folder / "venv" / "bin" / "fedhist"), *command],
                cwd=away,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(f"{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
