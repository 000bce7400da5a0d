"""Code in the documents runs, commands and options named in them exist, and links lead somewhere."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
import typer.main

import fedhist
from fedhist.command import cli
from fedhist.command.bench import SCRIPTS
from fedhist.command.experiment import completed, for_trials, methods_of, task_of
from fedhist.command.settings import Settings, all_options
from fedhist.command.style import EXAMPLES
from fedhist.options import RENAMED, options_of
from fedhist.paper.cells import EXPERIMENTS, SCALES
from fedhist.simulation.arms import as_arm
from fedhist.simulation.methods import DEFENCES, METHODS, SHORT, as_method
from fedhist.world.attacks import ATTACKS
from fedhist.world.availability import AVAILABILITIES
from fedhist.world.closing import CLOSINGS
from fedhist.world.coupling import COUPLINGS
from fedhist.world.speeds import SOURCES, SPEEDS

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
NEEDS = {
    "README.md": ["flwr"],
    "watch.md": ["tensorboard"],
    "flower.md": ["flwr"],
    "own-data.md": ["jinja2", "plotly"],
    "to-flower.md": ["flwr"],
    "privacy.md": ["flwr", "dp_accounting"],
}
NOT_RUN = "# not run:"
OF_FLOWER = {"--database", "--host", "--isolation", "--enable-supernode-auth", "--trusted-entities"}
OF_OTHERS = OF_FLOWER | {"--disable-runtime-dependency-installation", "--help", "--version", "--install-completion"}
"""Flags in the text that are not ours, or that every command has."""
REMOVED = {"weight_floor", "ina_norms", "remember_fused", "leave_one_out", "relative_support"}
"""Options that docs/results.md has figures for, and that it says are gone."""
HISTORICAL = {"CHANGELOG.md"}
"""Pages that name what does not exist any more."""
ABOUT_OTHERS = {"methods.md", "coming-from.md"}
"""Pages whose inline code is largely that of other projects."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.S | re.M)


def inline_code(page: Path) -> list[str]:
    """Return what stands between backticks in running text and in tables."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.S | re.M)
    return [" ".join(code.replace("\\|", "|").split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_CODE = [page for page in PAGES if blocks(page, "python")]
CURRENT = [page for page in PAGES if page.name not in HISTORICAL | ABOUT_OTHERS]


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
@pytest.mark.parametrize("page", WITH_CODE, ids=named)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in NEEDS.get(page.name, []):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        if block.startswith(NOT_RUN):
            assert len(block.splitlines()[0]) > len(NOT_RUN) + 10, "say why it is not run"
        else:
            exec(compile(block, named(page), "exec", dont_inherit=True), names)


def test_no_page_with_code_is_forgotten() -> None:
    assert {"README.md", "choose.md", "concepts.md", "flower.md", "interruptions.md", "privacy.md", "first-run.md"} < {
        page.name for page in WITH_CODE
    }
    for page in PAGES:
        for line in re.findall(r"^.*```py.*$", text_of(page), flags=re.M):
            assert line == "```python", f"{named(page)}: code that is run stands between lines ```python and ```"


APP = typer.main.get_command(cli.app)
assert isinstance(APP, click.Group)
COMMANDS = {name: command for name, command in APP.commands.items() if not command.hidden}
FLAGS = {
    name: {flag for each in command.params if not getattr(each, "hidden", False) for flag in each.opts}
    for name, command in COMMANDS.items()
}


def commands(page: Path, program: Sequence[str] = ("fedhist",)) -> Iterator[list[str]]:
    """Yield the arguments of every call of a program in a shell block."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[: len(program)] == list(program):
                yield words[len(program) :]


def make_sense(settings: Settings) -> list[fedhist.Trial]:
    """Return the trials of some settings, on data that need no download; raise unless all values can be used."""
    completed(settings)
    others = {name: value for name, value in settings.given.items() if name != "model"}
    task = task_of(Settings(others | {"dataset": "digits"}), settings["seed"])
    options = {name: value for name, value in for_trials(settings).items() if name != "schedule"}
    return [as_arm(method).trial(task, **options) for method in methods_of(settings)]


class Parsed(BaseException):
    """A script has understood its arguments."""


def parse_with(script: Path, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a script parse arguments and stop it there."""

    def parse(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        _, unknown = parser.parse_known_args(list(arguments))
        assert not unknown, f"{script.name} does not know {unknown}"
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    with pytest.raises(Parsed):
        runpy.run_path(str(script), run_name="__main__")


def parse_command(name: str, arguments: Sequence[str]) -> None:
    """Let a command parse arguments; raise unless their values can be used."""
    context = COMMANDS[name].make_context(name, list(arguments))
    given = {key: value for key, value in context.params.items() if value not in (None, ())}
    assert not RENAMED.keys() & given.keys(), f"fedhist {name} {arguments}"
    if name in ("run", "compare"):
        make_sense(Settings.read(None, {key: value for key, value in given.items() if key in all_options()}))
    if name == "paper":
        assert given["experiment"] in {*EXPERIMENTS, "all"} and given["scale"] in SCALES
    if name == "replay":
        assert all(fedhist.Trial(each, task_of(Settings(), 0)) for each in given["strategy"])


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=named)
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, *arguments in commands(page):
        if name in ("--version", "--install-completion") or arguments == ["--help"]:
            continue
        assert name in COMMANDS, f"fedhist {name}"
        if name == "bench" and arguments[:1] and arguments[0] in SCRIPTS:
            parse_with(ROOT / f"benchmarks/{arguments[0]}.py", arguments[1:], monkeypatch)
            continue
        parse_command(name, arguments)


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_the_help_parse(name: str) -> None:
    """Each is a whole call of its command, and its values can be used."""
    examples = EXAMPLES[name]
    assert len(set(examples)) == 2
    for example in examples:
        program, command, *arguments = shlex.split(re.split(" [|>] ", example)[0])
        assert (program, command) == ("fedhist", name)
        parse_command(name, arguments)


CONFIGURATIONS = [
    *((named(page), block) for page in PAGES for block in blocks(page, "toml")),
    *((named(file), text_of(file)) for file in sorted((ROOT / "examples").glob("*.toml"))),
]


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
@pytest.mark.parametrize(("place", "text"), CONFIGURATIONS, ids=[place for place, _ in CONFIGURATIONS])
def test_configurations_are_read(place: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text, encoding="utf-8")
    trials, given = make_sense(Settings.read(file)), tomllib.loads(text)
    assert trials and given
    shared = given.keys() - {name for arm in given.get("arm", []) for name in arm}
    for trial in trials:
        described = trial.described()
        for name in shared & options_of(fedhist.Trial).keys() - {"schedule", "schedule_clients"}:
            assert described[name] == given[name] or isinstance(given[name], str), name


def test_every_flag_in_the_text_exists() -> None:
    known = set().union(*FLAGS.values(), OF_OTHERS)
    for script in (ROOT / "benchmarks").rglob("*.py"):
        known |= set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", text_of(script)))
    wrong, seen = [], 0
    for page in CURRENT:
        for code in inline_code(page):
            command = re.match(r"fedhist ([a-z-]+)", code)
            if command and command[1] not in {*COMMANDS, "--help", "--version"}:
                wrong.append(f"{named(page)}: {code}")
            if not command and not code.startswith("--"):
                continue
            seen += 1
            own = FLAGS[command[1]] | OF_OTHERS if command and command[1] in FLAGS.keys() - {"bench"} else known
            wrong += [f"{named(page)}: {code}" for flag in re.findall(r"(?<!\S)--[\w-]+", code) if flag not in own]
    assert seen > 30 and not wrong, wrong


def callables() -> dict[str, Any]:
    """Return everything that documents call, by name."""
    found: dict[str, Any] = {name: getattr(fedhist, name) for name in fedhist.__all__}
    for module in ("fedhist.flower", "fedhist.report.live", "fedhist.strategies.private"):
        if module != "fedhist.flower" or importlib.util.find_spec("flwr"):
            each = importlib.import_module(module)
            found |= {name: getattr(each, name) for name in getattr(each, "__all__", ("Private", "gaussian_epsilon"))}
    return found


def given_in(arguments: str) -> set[str]:
    """Return the keywords of a call, without those of calls inside it."""
    while arguments != (arguments := re.sub(r"\([^()]*\)", "", arguments)):
        pass
    return set(re.findall(r"(?<![\w\"'])(\w+)=", arguments))


def keywords_of(thing: Any) -> set[str]:
    """Return the names of a callable's arguments; none for an exception."""
    exception = inspect.isclass(thing) and issubclass(thing, BaseException)
    return set() if exception else set(inspect.signature(thing).parameters)


def test_every_call_and_option_in_the_text_exists() -> None:
    """``FedHist(h=5)`` and ``speeds=`` name options there are, and ``fh.X`` and ``fedhist.a.b`` names there are."""
    known = callables()
    makers = [entry.make for entry in METHODS.values()]
    makers += [*DEFENCES.values(), *ATTACKS.values(), *SPEEDS.values(), fedhist.Faults]
    options = {*all_options(), *REMOVED}.union(*map(keywords_of, [*known.values(), *makers]))
    wrong, seen = [], 0
    for page in CURRENT:
        for name in re.findall(r"\bfh\.(\w+)", text_of(page)):
            wrong += [] if name in fedhist.__all__ else [f"{named(page)}: fh.{name}"]
        for code in inline_code(page):
            call = re.fullmatch(r"(?:fh\.|fedhist\.)?(\w+)\((.*)\)", code)
            if call and call[1] in known:
                seen += 1
                wrong += [f"{named(page)}: {code}"] if given_in(call[2]) - keywords_of(known[call[1]]) else []
            elif (option := re.match(r"(?:[a-z-]+:)?([a-z_]+)=", code)) and "(" not in code.partition("=")[0]:
                seen += 1
                wrong += [] if option[1] in options else [f"{named(page)}: {code}"]
            elif re.fullmatch(r"fedhist(\.\w+)+", code):
                seen += 1
                wrong += [] if _exists(code) else [f"{named(page)}: {code}"]
    assert seen > 60 and not wrong, wrong


def _exists(name: str) -> bool:
    """Return whether a dotted name leads somewhere."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name and not error.name.startswith("fedhist"):
                return True  # an extra that is not installed
            continue
        for part in parts[count:]:
            thing = getattr(thing, part, None)
        return thing is not None
    return False


@pytest.mark.parametrize("name", sorted(ABOUT_OTHERS))
def test_methods_on_pages_about_others_exist(name: str) -> None:
    """What begins like a method of ours is one, with options it has."""
    page, seen = ROOT / "docs" / name, 0
    for code in inline_code(page):
        spec = code.strip('"').partition(" --")[0]
        first = re.split(r"[:\s]", spec)[0].replace("-", "")
        if spec.startswith("fedhist "):
            continue  # a command
        if (first in METHODS or first in SHORT) and not re.search("[…({]|/K|/N", spec) and not spec.endswith(".py"):
            seen += 1
            as_method(spec)
    assert seen > 15


def test_the_page_on_worlds_names_all_they_can_be_made_of() -> None:
    text = text_of(ROOT / "docs" / "worlds.md")
    for name in [*SPEEDS, *AVAILABILITIES, *COUPLINGS, *CLOSINGS]:
        assert f"`{name}`" in text or f"`{name}:" in text, name
    for name, source in SOURCES.items():
        assert source in text or "FedScale" in source, name


def test_old_names_are_gone() -> None:
    old = "|".join([*(rf"\b{name}\s?=" for name in RENAMED if name != "history"), r"fedhist record\b", r"\.records\b"])
    wrong = [(named(page), line) for page in CURRENT for line in text_of(page).splitlines() if re.search(old, line)]
    assert not wrong, wrong


def test_scripts_files_and_targets_that_documents_name_exist() -> None:
    targets, wrong = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)), []
    for page in CURRENT:
        text = text_of(page)
        files = {
            code for code in inline_code(page) if re.fullmatch(r"(?:src|docs|benchmarks|examples|tests)/[\w./-]+", code)
        }
        for file in [*files, *re.findall(r"python ([\w/.-]+\.py)", text)]:
            wrong += [] if (ROOT / file).exists() or (page.parent / file).exists() else [f"{named(page)}: {file}"]
        for target in re.findall(r"(?:^|`)make ([\w-]+)", text, flags=re.M):
            wrong += [] if target in targets else [f"{named(page)}: make {target}"]
    assert not wrong, wrong


def test_benchmarks_know_the_arguments_that_documents_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = set()
    for page in CURRENT:
        called = [shlex.split(code)[1:] for code in inline_code(page) if code.startswith("python benchmarks/")]
        for script, *arguments in [*called, *commands(page, ["python"])]:
            if script.startswith("benchmarks/") and arguments:
                parse_with(ROOT / script, arguments, monkeypatch)
                parsed.add(script)
    assert parsed, "no document gives a benchmark any argument"


def test_documents_link_to_what_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page)):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
