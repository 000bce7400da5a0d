"""The site builds without a warning, every link in it leads somewhere, and it needs no network."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedhist
from fedhist.command import cli
from fedhist.command.settings import all_options
from fedhist.simulation.methods import DEFENCES, METHODS
from fedhist.world.attacks import ATTACKS
from fedhist.world.speeds import SPEEDS
from tests.report.browser import CHROMIUM, Browser

ROOT = Path(__file__).parent.parent
MISSING = [
    name
    for name in ("sphinx", "myst_parser", "sphinx_design", "sphinx_copybutton", "pydata_sphinx_theme", "flwr")
    if importlib.util.find_spec(name) is None
]
COMMANDS = [
    each.name or each.callback.__name__ for each in cli.app.registered_commands if not each.hidden and each.callback
]

pytestmark = pytest.mark.xdist_group("site")  # one process makes what these tests look at


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)}: not installed; pip install 'fedhist[docs]'")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).with_suffix("") for page in docs.rglob("*.md")}
    assert pages <= {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    for page, text in [
        ("changelog", "0.1.0"),
        ("examples/index", "custom_strategy.py"),
        ("examples/flower", "SuperNode"),
    ]:
        assert text in (site / f"{page}.html").read_text(), "the page itself, not the line that links to it"


def test_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"']?([^\"' >]+)", page.read_text())
        assert fetched and not [each for each in fetched if each.startswith(("http", "//"))], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_site_opens_from_files(site: Path) -> None:
    with Browser() as browser:
        browser.call("Page.navigate", url=f"{(site / 'search.html').as_uri()}?q=staleness")
        browser.wait("document.querySelectorAll('#search-results li a').length > 5")
        browser.size(400, 800)
        for page in sorted(page for page in site.rglob("*.html") if "_static" not in page.parts):
            browser.call("Page.navigate", url=page.as_uri())
            browser.wait(f"location.href === '{page.as_uri()}' && document.readyState === 'complete'")
            assert browser.evaluate("document.documentElement.scrollWidth") == 400, f"{page.name} is too wide"
        assert not browser.complaints
        assert not [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:", "about:"))]


def documented() -> dict[str, list[str]]:
    """Return the names that each page of the reference describes."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return {page.stem: re.findall(r"^\.\. auto\w+:: ([\w.]+)$", page.read_text(), flags=re.M) for page in pages}


def test_every_public_name_is_on_exactly_one_page() -> None:
    names = sorted(name for page in documented().values() for name in page)
    network = {"ClientSide", "KAsync", "load", "privatise", "received", "reply"}
    assert names == sorted(
        [f"fedhist.{name}" for name in fedhist.__all__] + [f"fedhist.flower.{name}" for name in network]
    )


def test_site_describes_every_public_name(site: Path) -> None:
    for page, names in documented().items():
        text = (site / "reference" / f"{page}.html").read_text()
        for name in names:
            assert f'id="{name}"' in text, name
            assert inspect.getdoc(_named(name)), name
    run, flower = ((site / "reference" / f"{page}.html").read_text() for page in ("run", "flower"))
    for name in inspect.signature(fedhist.simulate).parameters:
        assert f'<span class="pre">{name}</span>' in run, name
    for name in ("KAsync.start", "KAsync.history", "ClientSide.finish"):
        assert f'id="fedhist.flower.{name}"' in flower, name
    assert " object at 0x" not in run + flower and "&lt;function" not in run + flower


def _named(name: str) -> object:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def test_site_lists_every_setting_and_command(site: Path) -> None:
    configuration = (site / "configuration.html").read_text()
    for name in [*all_options(), *METHODS, *SPEEDS, *DEFENCES, *ATTACKS]:
        assert f'<span class="pre">{name}</span>' in configuration, name
    commands = (site / "reference" / "commands.html").read_text()
    for name in COMMANDS:
        assert f'id="fedhist-{name}"' in commands, name
    assert "<!-- made from" not in configuration + commands


def test_reference_is_complete_without_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import reference  # type: ignore[import-not-found]  # noqa: PLC0415

    for name in all_options():
        assert f"| `{name}` | `--{name.replace('_', '-')}` |" in reference.settings(), name
    assert "| `lr` | `--lr` | what suits the data set |" in reference.settings()
    assert "| `alpha` | `0.1` | `α` in Eq. 7" in reference.methods()
    assert "| `nan` | `0.0` | One value is NaN. |" in reference.faults()
    assert "fedhist replay [OPTIONS] FOLDER" in reference.commands()
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "examples" / "README.md"]
    markers = {marker for page in pages for marker in re.findall(r"<!-- made from the code: \w+ -->", page.read_text())}
    assert markers == set(reference.PARTS)


def test_picture_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import picture  # type: ignore[import-not-found]  # noqa: PLC0415

    assert picture.FILE.read_text() == picture.picture()


def test_the_race_is_what_its_script_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import racing  # type: ignore[import-not-found]  # noqa: PLC0415

    drawn, runs = racing.FILE.read_text(encoding="utf-8"), racing.both()
    assert [int(rounds) for rounds in re.findall(r"(\d+) rounds<", drawn)] == [run.rounds for run in runs]
    for run, shown in zip(runs, re.findall(r"(\d+) %, ", drawn), strict=True):
        assert 100 * run.final_accuracy == pytest.approx(int(shown), abs=5)  # processors round differently
