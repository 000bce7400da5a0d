"""The site builds without a warning, every link in it leads somewhere, and it needs no network."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedhist
from fedhist.clients.local import LocalSGD
from fedhist.command.settings import all_options
from fedhist.simulation.methods import DEFENCES, METHODS
from fedhist.simulation.trial import Trial
from fedhist.world.attacks import ATTACKS
from fedhist.world.speeds import SPEEDS
from tests.report.browser import CHROMIUM, Browser

ROOT = Path(__file__).parent.parent
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.xdist_group("site")  # one process makes what these tests look at


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)}: not installed; pip install 'fedhist[docs]'")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} | {"changelog", "contributing"}
    assert pages <= {page.stem for page in site.glob("*.html")}
    assert (site / "examples" / "index.html").exists() and (site / "examples" / "flower" / "index.html").exists()


def test_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"']?([^\"' >]+)", page.read_text())
        assert fetched and not [each for each in fetched if each.startswith(("http", "//"))], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_site_opens_from_files(site: Path) -> None:
    with Browser() as browser:
        browser.call("Page.navigate", url=f"{(site / 'index.html').as_uri()}?q=staleness")
        browser.wait("/[1-9].* matching/.test(document.querySelector('.md-search-result__meta')?.innerText)")
        browser.size(400, 800)
        for page in sorted(site.rglob("*.html")):
            if page.name != "404.html":
                browser.call("Page.navigate", url=page.as_uri())
                browser.wait(f"location.href === '{page.as_uri()}' && document.readyState === 'complete'")
                assert browser.evaluate("document.documentElement.scrollWidth") == 400, f"{page.name} is too wide"
        assert not browser.complaints
        assert not [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:", "about:"))]


def test_site_lists_every_setting_option_and_public_name(site: Path) -> None:
    configuration, api = (site / "configuration.html").read_text(), (site / "api.html").read_text()
    for name in [*all_options(), *METHODS, *SPEEDS, *DEFENCES, *ATTACKS]:
        assert f"<code>{name}</code>" in configuration, name
    for name in fedhist.__all__:
        assert f'id="fedhist.{name}"' in api, name
    for name in ("KAsync", "KAsync.start", "KAsync.history", "load", "reply", "received", "privatise"):
        assert f'id="fedhist.flower.{name}"' in api, name
    options = [field.name for field in dataclasses.fields(Trial) if field.init]
    options += [field.name for field in dataclasses.fields(LocalSGD)]
    for name in [*options, "device", "trainer", "engine", "on_round", "checkpoint", "checkpoint_every", "seeds"]:
        assert f"<code>{name}</code>" in api, name
    assert "<!-- made from" not in configuration + api


def test_reference_is_complete_without_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import reference  # type: ignore[import-not-found]  # noqa: PLC0415

    for name in all_options():
        assert f"| `{name}` | `--{name.replace('_', '-')}` |" in reference.settings(), name
    assert "| `lr` | `--lr` | what suits the data set |" in reference.settings()
    assert '| `speeds` | `"lognormal"` | How long clients take' in reference.fields_of(Trial)
    assert "| `alpha` | `0.1` | `α` in Eq. 7" in reference.methods()
    assert "| `nan` | `0.0` | One value is NaN. |" in reference.faults()
    pages = [*ROOT.glob("docs/*.md"), ROOT / "examples" / "README.md"]
    markers = {marker for page in pages for marker in re.findall(r"<!-- made from the code: \w+ -->", page.read_text())}
    assert markers == set(reference.PARTS)


def test_picture_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import picture  # type: ignore[import-not-found]  # noqa: PLC0415

    assert picture.FILE.read_text() == picture.picture()


def test_the_race_is_what_its_script_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import race  # type: ignore[import-not-found]  # noqa: PLC0415

    drawn, runs = race.FILE.read_text(encoding="utf-8"), race.both()
    assert [int(rounds) for rounds in re.findall(r"(\d+) rounds<", drawn)] == [run.rounds for run in runs]
    for run, shown in zip(runs, re.findall(r"(\d+) %, ", drawn), strict=True):
        assert 100 * run.final_accuracy == pytest.approx(int(shown), abs=5)  # processors round differently
