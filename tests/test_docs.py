"""Code in the documents runs, commands in them parse, and links lead somewhere."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

from fedhist.command import bench, cli
from fedhist.command.experiment import devices_of, faults_of, methods_of
from fedhist.command.settings import Settings
from fedhist.paper import __main__ as paper
from fedhist.world.attacks import as_attack

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
NEEDS = {
    "README.md": ["flwr"],
    "watch.md": ["tensorboard"],
    "flower.md": ["flwr"],
    "privacy.md": ["flwr", "dp_accounting"],
}
NOT_RUN = "# not run:"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_CODE = [page for page in PAGES if blocks(page, "python")]


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
    assert {"README.md", "choose.md", "concepts.md", "flower.md", "interruptions.md", "privacy.md", "quickstart.md"} < {
        page.name for page in WITH_CODE
    }
    for page in PAGES:
        for line in re.findall(r"^.*```py.*$", page.read_text(encoding="utf-8"), flags=re.M):
            assert line == "```python", f"{named(page)}: code that is run stands between lines ```python and ```"


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every fedhist command in a shell block."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["fedhist"]:
                yield words[1:]


def mentioned(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every fedhist command in running text; they may be incomplete."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for module, arguments in re.findall(r"`(?:python -m )?fedhist(\.paper|\.bench)?\s+([a-z-][^`]*)`", text):
        yield [*([module[1:]] if module else []), *arguments.split()]


APP = typer.main.get_command(cli.app)
assert isinstance(APP, click.Group)
PASSED_ON = {"paper": paper._parser(paper.EXPERIMENTS), "bench": bench._parser()}


def options(parser: argparse.ArgumentParser) -> set[str]:
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for each in action.choices.values() for option in options(each)}
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=named)
def test_commands_parse(page: Path) -> None:
    for name, *arguments in commands(page):
        if name in PASSED_ON:
            PASSED_ON[name].parse_args(arguments)
            continue
        assert name in APP.commands, f"fedhist {name}"
        given = APP.commands[name].make_context(name, list(arguments)).params
        if name in ("run", "record", "compare"):
            flags = {key: value for key, value in given.items() if key in Settings.model_fields and value != ()}
            settings = Settings.read(None, flags)
            assert methods_of(settings) and devices_of(settings)
            faults_of(settings)
            as_attack(settings.attack)


def test_commands_in_the_text_have_the_options_named() -> None:
    wrong, seen = [], 0
    for page in PAGES:
        for name, *arguments in mentioned(page):
            seen += 1
            if name.startswith("--"):
                known, arguments = {"--help", "--version"}, [name]  # noqa: PLW2901
            elif name in PASSED_ON:
                known = options(PASSED_ON[name])
            elif name in APP.commands:
                known = {"--help", *(option for p in APP.commands[name].params for option in p.opts)}
            else:
                wrong.append(f"{named(page)}: fedhist {name}")
                continue
            unknown = {word for word in arguments if word.startswith("--")} - known
            wrong += [f"{named(page)}: fedhist {name} {option}" for option in sorted(unknown)]
    assert seen > 20 and not wrong


def test_scripts_and_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for script in re.findall(r"python ([\w/.-]+\.py)", text):
            assert (ROOT / script).exists() or (page.parent / script).exists(), f"{named(page)} names {script}"
        for target in re.findall(r"(?:^|`)make ([\w-]+)", text, flags=re.M):
            assert target in targets, f"{named(page)} names make {target}"


def test_documents_link_to_what_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
