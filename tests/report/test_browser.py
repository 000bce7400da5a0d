"""The page in a real browser: nothing is complained about, every figure is there, every switch does something."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedhist.report.page import write_report
from tests.report.browser import CHROMIUM, Browser
from tests.report.fake import fake_comparison, fake_history, measured_in, with_clients
from tests.report.test_figures import deployment

pytest.importorskip("plotly", reason="Plotly is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")

NAMES = "boosts classes curves labels lengths rejected seeds staleness target tiers timeline utility weights"
DRAWN = [f"g0-{name}" for name in NAMES.split(" ")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    fake_comparison(folder / "a", {"FedHist": 0.0, "FedAvg": -0.1, "FedHist(ina=False)": -0.05}, seeds=2)
    return write_report([folder], folder / "page.html").path


@pytest.fixture
def shown(browser: Browser, page: Path) -> Browser:
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(page)
    return browser


def drawn(browser: Browser) -> dict[str, int]:
    """Return how many marks, lines, bars and images each figure really shows."""
    marks = ".points path, .scatterlayer path, .barlayer path, .hm image"
    found: dict[str, int] = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('figure')].map("
        f"f => [f.id, [...f.querySelectorAll('{marks}')].filter(m => m.getBoundingClientRect().width > 0).length]))"
    )
    return found


def choose(browser: Browser, figure: str, place: int, value: int) -> None:
    """Click on a choice of a figure's switch, as a reader would."""
    browser.evaluate(f'document.querySelector(\'#{figure} [data-place="{place}"] input[value="{value}"]\').click()')


def test_every_figure_is_drawn_and_nothing_complained_about(shown: Browser) -> None:
    found = drawn(shown)
    assert sorted(found) == DRAWN
    assert all(count > 0 for count in found.values()), found
    assert shown.complaints == []
    assert {url.split(":")[0] for url in shown.requests} <= {"file", "data", "blob"}, "works without a network"


def test_figures_are_described(shown: Browser) -> None:
    described = shown.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => [p.getAttribute('role'), "
        "document.getElementById(p.getAttribute('aria-labelledby')).textContent, "
        "document.getElementById(p.getAttribute('aria-describedby')).textContent])"
    )
    assert len(described) == len(DRAWN)
    assert all(role == "img" and len(title) > 5 and len(summary) > 60 for role, title, summary in described)
    missing = shown.evaluate(
        "[...document.querySelectorAll('figure')]"
        ".filter(f => !f.querySelector('.xtitle') || !f.querySelector('.ytitle')).map(f => f.id)"
    )
    assert {*missing} == {"g0-seeds", "g0-target", "g0-classes"}  # whose rows are methods


def test_switch_between_costs(shown: Browser) -> None:
    axis = "document.querySelector('#g0-curves .xtitle').textContent"
    last = "Math.max(...document.querySelector('#g0-curves .plot').data.at(-1).x)"
    seen = []
    for place in range(4):
        choose(shown, "g0-curves", 0, place)
        seen.append((shown.evaluate(axis), shown.evaluate(last)))
    worked = "time that clients have worked, all together"
    assert [title for title, _ in seen] == ["virtual time", "round", worked, "sent, both ways (MB)"]
    assert (seen[1][1], seen[3][1]) == (60, 2.56) and seen[2][1] == pytest.approx(40 * seen[0][1], rel=1e-4)
    assert shown.complaints == []


def test_arms_are_drawn_over_time_and_over_rounds(browser: Browser, tmp_path: Path) -> None:
    own = {"varied": "concurrency"}
    fake_history("waits", pace=20.0, concurrency=5, **own).save(tmp_path / "a")
    fake_history("does not", **own).save(tmp_path / "b")
    browser.complaints.clear()
    browser.open(write_report([tmp_path], tmp_path / "page.html").path)
    kind = "document.querySelector('#g0-curves .plot').layout.xaxis.type"
    marks = "[...document.querySelectorAll('#g0-curves .xtick text')].map(t => t.textContent)"
    assert browser.evaluate(kind) == "log" and {"10", "100"} <= {*browser.evaluate(marks)}
    choose(browser, "g0-curves", 0, 3)
    assert browser.evaluate(kind) == "linear" and {"20", "40", "60"} <= {*browser.evaluate(marks)}
    assert browser.complaints == []


def test_switch_the_order_of_clients_and_the_run(shown: Browser) -> None:
    order = "document.querySelector('#g0-utility .plot').layout.yaxis.categoryarray.join()"
    values = "JSON.stringify(document.querySelector('#g0-utility .plot').data[0].z)"
    by_speed, first = shown.evaluate(order), shown.evaluate(values)
    choose(shown, "g0-utility", 0, 1)
    assert shown.evaluate(order) != by_speed and shown.evaluate(values) == first
    choose(shown, "g0-utility", 1, 1)
    assert shown.evaluate(values) != first
    assert shown.complaints == []


def test_a_method_can_be_hidden_everywhere(shown: Browser) -> None:
    lines = "document.querySelectorAll('#g0-curves .scatterlayer .trace').length"
    before = shown.evaluate(lines)
    shown.evaluate("document.querySelector('.methods input[value=FedAvg]').click()")
    assert shown.evaluate(lines) == before - 2  # its line and its band
    visible = (
        "[...document.querySelectorAll('.plot')].flatMap(p => p.data.filter(t => t.meta === 'FedAvg')"
        ".map(t => t.visible !== false))"
    )
    assert shown.evaluate(visible) and not any(shown.evaluate(visible))
    shown.evaluate("document.querySelector('.methods input[value=FedAvg]').click()")
    assert shown.evaluate(lines) == before and all(shown.evaluate(visible))


def test_pointing_at_a_line_greys_the_others_in_all_figures(shown: Browser) -> None:
    x, y = shown.evaluate(
        "(() => { const p = document.querySelector('#g0-curves .plot');"
        "p.scrollIntoView({ behavior: 'instant', block: 'center' });"
        "const t = p.data.find(t => t.meta === 'FedAvg' && t.hovertemplate), l = p._fullLayout;"
        "const i = Math.floor(t.x.length / 2), b = p.getBoundingClientRect();"
        "return [b.x + l.xaxis._offset + l.xaxis.d2p(t.x[i]), b.y + l.yaxis._offset + l.yaxis.d2p(t.y[i])]; })()"
    )
    faded = "[...document.querySelectorAll('#{} .faded')].length"
    for step in (4, 0):
        shown.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - step, y=y)
    shown.wait(f"{faded.format('g0-curves')} > 0 && {faded.format('g0-weights')} > 0")
    shown.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    shown.wait("document.querySelectorAll('.faded').length === 0")
    assert shown.complaints == []


def test_names_stand_at_the_ends_of_lines_without_touching(browser: Browser, tmp_path: Path) -> None:
    names = [f"Method {i}" for i in range(20)]
    fake_comparison(tmp_path, {name: -0.002 * i for i, name in enumerate(names)}, seeds=1)
    browser.open(write_report([tmp_path], tmp_path / "page.html").path)
    boxes = browser.evaluate(
        "[...document.querySelectorAll('#g0-curves .annotation-text')].map(t => "
        "[t.textContent, t.getBoundingClientRect().top, t.getBoundingClientRect().right])"
    )
    assert {name for name, _, _ in boxes} == {*names}
    tops = sorted(top for _, top, _ in boxes)
    assert all(below - above > 12 for above, below in itertools.pairwise(tops))
    edge = browser.evaluate("document.querySelector('#g0-curves').getBoundingClientRect().right")
    assert max(right for _, _, right in boxes) < edge
    colours = "new Set([...document.querySelectorAll('#g0-curves .annotation-text')].map(t => t.style.fill)).size"
    assert browser.evaluate(colours) == 20


def saved(browser: Browser, button: str) -> str:
    """Click on a button and return the first bytes of what it saves: texts as they are, pictures as a data URL."""
    browser.evaluate(
        "window.found = null; HTMLAnchorElement.prototype.click = function () {"
        "  fetch(this.href).then(r => r.blob()).then(b => b.type.startsWith('text') ? b.text() : b.type + b.size)"
        "    .then(t => { window.found = this.download + '\\n' + t; }); };"
        f"document.querySelector('{button}').click()"
    )
    browser.wait("window.found !== null")
    return str(browser.evaluate("window.found"))


def test_numbers_and_pictures_can_be_saved(browser: Browser, tmp_path: Path) -> None:
    fake_comparison(tmp_path, {"FedHist": 0.0, '=1+1, "quoted"': -0.1}, seeds=2)
    browser.complaints.clear()
    browser.open(write_report([tmp_path], tmp_path / "page.html").path)
    name, header, *rows = saved(browser, "#g0-curves [data-save=csv]").splitlines()
    assert name == "fedhist-g0-curves.csv"
    assert header.lstrip("\ufeff") == "series,kind,virtual time,test accuracy (%),standard deviation"
    assert rows[0].startswith("FedHist,curve,") and rows[-1].startswith('"\'=1+1, ""quoted""",curve,')
    seeds = saved(browser, "#g0-seeds [data-save=csv]").splitlines()
    assert seeds[2].split(",")[3] == "FedHist", "a row's name instead of its number"
    classes = saved(browser, "#g0-classes [data-save=csv]").splitlines()
    assert len(classes) == 4 and classes[1].lstrip("\ufeff") == ",0,1,2,3,4,5,6,7,8,9"
    picture = saved(browser, "#g0-curves [data-save=png]")
    assert re.fullmatch(r"fedhist-g0-curves.png\nimage/png\d{5,}", picture)
    assert not browser.evaluate("document.documentElement.classList.contains('printing')")
    assert browser.complaints == []


def test_wide_tables_say_so_on_a_phone(browser: Browser, page: Path) -> None:
    browser.open(page, 390, 800)
    cue = "document.querySelector('.scroll:has(.final)').dataset.wider"
    browser.wait(f"{cue} === ''")
    browser.evaluate("document.querySelector('.scroll:has(.final)').scrollTo(5000, 0)")
    browser.wait(f"{cue} === undefined")
    browser.open(page)
    assert browser.evaluate("document.querySelectorAll('.swatch svg').length") > 0


def brightness(browser: Browser, colour: str) -> float:
    red, green, blue = browser.evaluate(f"({colour}).match(/[0-9.]+/g).slice(0, 3).map(Number)")
    return float(0.299 * red + 0.587 * green + 0.114 * blue)


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_by_day_and_by_night(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    paper = brightness(browser, "getComputedStyle(document.body).backgroundColor")
    assert (paper < 60) is dark
    for place in ("figcaption", "td", "#g0-curves .xtitle", "#g0-curves .annotation-text"):
        style = f"getComputedStyle(document.querySelector('{place}'))"
        ink = brightness(browser, f"{style}.{'fill' if 'curves' in place else 'color'}")
        assert abs(ink - paper) > 90, place


@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_wider_than_the_window(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width, 800)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth))") <= width


def test_prints(shown: Browser, tmp_path: Path) -> None:
    shown.pdf(tmp_path / "page.pdf")
    content = (tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF") and len(content) > 50_000
    assert shown.complaints == []


def test_a_folder_of_everything(browser: Browser, tmp_path: Path) -> None:
    """Several settings, one of them a deployment: closed sections are drawn when they are opened."""
    deployment().save(tmp_path / "flower" / "a")
    for beta in (0.1, 0.5):
        fake_comparison(tmp_path / str(beta), {"FedHist": 0.0, "FedAvg": 0.1}, seeds=2, beta=beta)
    fake_history("Own").save(tmp_path / "own")
    browser.complaints.clear()
    browser.open(write_report([tmp_path], tmp_path / "page.html").path)
    count = "document.querySelectorAll('figure[data-drawn]').length"
    before = browser.evaluate(count)
    browser.evaluate("document.querySelectorAll('details.figures').forEach(d => { d.open = true; })")
    browser.wait("document.querySelectorAll('figure:not([data-drawn])').length === 0")
    assert browser.evaluate(count) > before
    assert all(marks > 0 for marks in drawn(browser).values())
    assert browser.complaints == []


def test_names_are_shown_as_they_are_written(browser: Browser, tmp_path: Path) -> None:
    """Plotly takes some tags and entities for its own, and %{…} for a number: a name must not become a link."""
    name = '<a href="https://example.org/">A</a> %{x} &lt;'
    for seed in range(2):
        for method in (name, "FedHist"):
            run = fake_history(method, seed, weights=None)
            run.events = [{"time": 1.0, "round": 3, "event": f"{name}!", "reason": name}]
            run.weights[:] = 1  # so that events are drawn
            run.save(tmp_path / f"{len(method)}-{seed}")
    browser.complaints.clear()
    browser.open(write_report([tmp_path], tmp_path / "page.html").path)
    links = (
        "[...document.querySelectorAll('.plot a')].filter(a => [...a.attributes].some(t => /href/.test(t.name))).length"
    )
    assert browser.evaluate(links) == 0
    legends = set(browser.evaluate("[...document.querySelectorAll('.legendtext')].map(t => t.textContent)"))
    assert legends == {f"{name}!"}
    labels = "[...document.querySelectorAll('#g0-curves .annotation-text')].map(t => t.textContent)"
    assert {*browser.evaluate(labels)} == {name[:23] + "…", "FedHist"}
    ticks = browser.evaluate("[...document.querySelectorAll('#g0-seeds .ytick text')].map(t => t.textContent)")
    assert ticks == ["FedHist", name[:27] + "…"] or ticks == [name[:27] + "…", "FedHist"]
    assert browser.complaints == []


@pytest.fixture(scope="module")
def errors_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    for method, lift in (("FedHist", 0.1), ("FedAvg", 0.0)):
        for seed in range(2):
            run = measured_in(fake_history(method, seed, lift=lift - 0.2), {"rmse": False, "mae": False})
            with_clients(run).save(folder / run.name)
    return write_report([folder], folder / "page.html").path


def test_switch_between_metrics(browser: Browser, errors_page: Path) -> None:
    browser.complaints.clear()
    browser.open(errors_page)
    state = (
        "(p => [p.querySelector('.ytitle').textContent, p.querySelector('.xtitle').textContent, p.data.at(-1).y.at(-1),"
        " p.data.at(-1).hovertemplate])(document.querySelector('#g0-curves .plot'))"
    )
    rmse = browser.evaluate(state)
    choose(browser, "g0-curves", 1, 1)
    mae = browser.evaluate(state)
    choose(browser, "g0-curves", 0, 2)
    worked = browser.evaluate(state)
    assert (rmse[0], mae[0]) == ("test rmse", "test mae") and mae[2] == pytest.approx(2 * rmse[2], rel=1e-2)
    assert worked == ["test mae", "time that clients have worked, all together", *mae[2:]], (
        "the metric stays when the cost changes"
    )
    assert "%" not in re.sub(r"%\{.*?\}", "", rmse[3])
    assert browser.complaints == []


def test_switch_between_views_of_the_clients(browser: Browser, errors_page: Path) -> None:
    browser.complaints.clear()
    browser.open(errors_page)
    state = (
        "(p => [p.querySelector('.ytitle').textContent, p.querySelector('.xtitle').textContent,"
        " [...p.querySelectorAll('.xtick text')].map(t => t.textContent), p.data[0].y])"
        "(document.querySelector('#g0-tiers .plot'))"
    )
    by_speed = browser.evaluate(state)
    assert by_speed[2] == ["all clients", "fastest third", "middle third", "slowest third"]
    choose(browser, "g0-tiers", 0, 1)
    worst = browser.evaluate(state)
    assert "worst tenth" in worst[0] and all(w > m for w, m in zip(worst[3], by_speed[3], strict=True))
    browser.evaluate(
        "(s => { s.value = '4'; s.dispatchEvent(new Event('change', { bubbles: true })); })"
        "(document.querySelector('#g0-tiers [data-place=\"1\"] select'))"
    )
    over_rounds = browser.evaluate(state)
    assert over_rounds[1] == "round" and "20" in over_rounds[2] and len(over_rounds[3]) == 3
    assert drawn(browser)["g0-tiers"] > 0 and browser.complaints == []
