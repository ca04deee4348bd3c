"""What README.md and docs/ tell people to open, type and run is there: links, paths, commands with their options, recipes, targets."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from zoo import declare
from zoo.cli import app
from zoo.components import registry
from zoo.components.spec import load
from zoo.recipes import recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = ("zoo", "components", "quantize", "eval", "recipes", "tests", "docs", "benchmarks", ".ci")
GROUP: Any = typer.main.get_command(app)
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")  # MODEL, DIR: what a reader fills in
TO_WRITE = {"components/kernel/relu.py"}  # files that a page has its reader write


class Command(NamedTuple):
    """Words of a command line. whole: shown to be typed, not only named."""

    page: str
    words: list[str]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def fenced(page: Path, *languages: str) -> list[str]:
    found = [text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]
    return [re.sub(r"\\\n\s*", "", text) for text in found]  # a command may go on in the next line


def inline(page: Path) -> list[str]:
    return INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def commands() -> Iterator[Command]:
    for page in PAGES:
        lines = [line for text in fenced(page, "bash", "sh") for line in text.splitlines()]
        lines += [line[2:] for text in fenced(page, "console") for line in text.splitlines() if line.startswith("$ ")]
        yield from (Command(page.name, shlex.split(line, comments=True), True) for line in lines if line.strip())
        yield from (Command(page.name, shlex.split(code), False) for code in inline(page) if re.match(r"(zoo|make|python) ", code))


COMMANDS = list(commands())
ZOO = [c for c in COMMANDS if c.words[:1] == ["zoo"]]


def parse(words: list[str], whole: bool) -> tuple[str, dict[str, object]]:
    """The subcommand and the values that a command line gives it; nothing is run. Raises UsageError of the command line's library."""
    context = typer.Context(GROUP, info_name="zoo")
    name, command, rest = GROUP.resolve_command(context, words)
    try:
        return name, command.make_context(name, list(rest), parent=context).params
    except typer.BadParameter as e:
        if whole or type(e).__name__ != "MissingParameter":
            raise
        return name, {}


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {link}; headings: {sorted(anchors(file))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_are_there(page: Path) -> None:
    paths = [code for code in inline(page) if re.fullmatch(rf"({'|'.join(map(re.escape, FOLDERS))})/[\w./-]*", code)]
    real = [path for path in paths if path not in TO_WRITE and not re.search(r"[A-Z]{2}", path)]  # capitals are filled in by the reader
    missing = [path for path in real if not (ROOT / path).exists()]
    assert not missing, f"{page.name} names {missing}"


def test_there_are_commands_to_check() -> None:
    assert {parse(c.words[1:], c.whole)[0] for c in ZOO} >= {"list", "show", "diff", "generate", "quantize", "eval", "bench", "run"}
    assert {c.words[0] for c in COMMANDS if c.whole} >= {"zoo", "make"}


@pytest.mark.parametrize(
    ("words", "message"),
    [("bench --speed", "No such option"), ("benchmark x", "No such command"), ("diff a", "Missing"), ("diff a b c", "unexpected")],
)
def test_commands_that_are_wrong_do_not_parse(words: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        parse(words.split(), whole=True)


@pytest.mark.parametrize("command", ZOO, ids=str)
def test_zoo_commands_parse(command: Command) -> None:
    name, given = parse(command.words[1:], command.whole)

    def known(argument: str) -> list[str]:
        value = given.get(argument)
        values = [str(v) for v in value] if isinstance(value, (list, tuple)) else [] if value is None else [str(value)]
        return [v for v in values if not PLACEHOLDER.fullmatch(v)]

    for recipe_name in known("recipe"):
        recipe.read_recipe(str(ROOT / recipe_name) if "/" in recipe_name else recipe_name)
    for family in known("family"):
        registry.family_named(family)
    for method in known("method"):
        registry.get("quantizer", method)
    for model in (*known("model"), *known("a"), *known("b")):
        assert "/" in model or model in declare.names() or (name == "bench" and len(model) == 1)
    for task in known("task"):
        assert f"task: {task}\n" in "".join(p.read_text() for p in (ROOT / "eval/tasks").rglob("*.yaml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_are_named_exist(page: Path) -> None:
    known = {word for command in GROUP.commands.values() for option in command.params for word in option.opts}
    named = {code.split()[0].partition("=")[0] for code in inline(page) if code.startswith("--")}
    assert named <= known


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[:1] == ["make"]], ids=str)
def test_make_targets_exist(command: Command) -> None:
    targets = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {target for line in targets for target in line.split()}
    assert {word for word in command.words[1:] if "=" not in word} <= known


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[:1] == ["python"]], ids=str)
def test_python_commands_have_their_file_or_module(command: Command) -> None:
    if command.words[1] == "-m":
        assert importlib.util.find_spec(command.words[2])
    else:
        assert (ROOT / command.words[1]).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python(page: Path) -> None:
    for text in fenced(page, "python"):
        ast.parse(text)


def test_recipes_in_the_documentation_are_valid() -> None:
    (text,) = fenced(ROOT / "docs/recipes.md", "yaml")
    data = yaml.safe_load(text)
    assert all((ROOT / "recipes" / name).is_file() for name in data.pop("imports"))
    wanted = load(recipe.Recipe, data)
    assert wanted.variants[0].label == "baseline"
