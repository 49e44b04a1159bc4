"""The code of the documents is what it is marked as: Python runs, commands are ones that the parser takes, about files that
exist and plans that are plans; all the rest is what is printed.

    ```python           runs, in order, after what `SCENES` gives the document
    ```python sketch    is Python that does not run
    ```diff             a script, and what becomes of it
    indented, ```sh     commands, or what they print
"""

from __future__ import annotations

import ast
import doctest
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import meshloom
from meshloom.cli.arguments import parse, parser
from meshloom.core.plan import Plan
from meshloom.telemetry.progress import QUIET
from tests.doc_scenes import SCENES
from tests.documents import Block, blocks_of

ROOT = Path(__file__).parents[1]
# Decisions and the log say what was then.
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*/*.md")]
    if "decisions" not in path.parts and path.name != "LOG.md"
)
USERS = {
    "job.py",
    "train.py",
    "FILE.py",
    "run_glue_no_trainer.py",
    "adopted/train.py",
    "RUN",
    "DIR",
    "runs/a",
}
# README's example is trained and verified by tests/test_examples.py; the first line of the other says how it is started
RUN_ELSEWHERE = {"README.md", "docs/torch_backend.md"}
WITH_TRANSFORMERS = {"docs/weights.md", "docs/guides/larger_than_a_device.md"}
VERBS = "adopt|run|train|verify|plan|describe|calibrate|report|watch|export|doctor|completion"
# `meshloom ...` at the start of a line, or behind variables, or as a module that a launcher runs
COMMAND = re.compile(rf"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S.* -m |srun )?meshloom +((?:{VERBS})\b.*)")
BATCH = re.compile(rf"^(?:[A-Z_]+=\S+ )*sbatch +(\S+\.sbatch) +((?:{VERBS})\b.*)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def codes_of(path: Path) -> list[tuple[str, str, Block]]:
    """(how it is marked, its text, the block) of all code, in order; an indented block has no mark."""
    found: list[tuple[str, str, Block]] = []
    for block in blocks_of(path.read_text(encoding="utf-8")):
        if block.kind == "code":
            lines = block.text.splitlines()
            fenced = lines[0].startswith("```")
            text = "\n".join(lines[1:-1]) if fenced else textwrap.dedent(block.text)
            found.append((lines[0].removeprefix("```").strip() if fenced else "", text, block))
    return found


def pythons_of(path: Path) -> list[str]:
    return [text for mark, text, _ in codes_of(path) if mark == "python"]


def is_python(text: str) -> bool:
    """Whether it is a program: more than words that happen to be an expression."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return any(not isinstance(each, ast.Expr) or isinstance(each.value, ast.Call) for each in body)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
@pytest.mark.every
def test_python_is_marked_as_such(path: Path):
    wrong: list[str] = []
    for mark, text, block in codes_of(path):
        here = f"{name_of(path)}:{block.line}"
        if mark not in ("", "python", "python sketch", "diff", "sh", "yaml", "{toctree}", "{eval-rst}"):
            wrong.append(f"{here} is marked {mark!r}, which is nothing that is known here")
        elif mark.startswith("python") and not is_python(text):
            wrong.append(f"{here} is marked as Python, and is none")
        elif not mark and is_python(text):
            wrong.append(f"{here} is Python: fence it as ```python, or as ```python sketch if it cannot run")
    assert not wrong, "\n".join(wrong)


def marked(path: Path) -> Any:
    slow = [pytest.mark.slow] if name_of(path) in WITH_TRANSFORMERS else []
    return pytest.param(path, marks=[*slow, pytest.mark.long], id=name_of(path))


# The Chinese documents have the same code (tests/test_docs.py).
@pytest.mark.parametrize(
    "path",
    [
        marked(path)
        for path in DOCUMENTS
        if pythons_of(path) and name_of(path) not in RUN_ELSEWHERE and ".zh-CN" not in path.name
    ],
)
def test_python_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With trainers of two steps on simulated devices, whatever the document says of steps."""
    full = meshloom.Trainer

    def short(job: Any, plan: Any = None, **arguments: Any) -> Any:
        return full(
            job, plan, **{"listener": QUIET, **arguments, "devices": "simulated", "steps": 2, "out": None}
        )

    monkeypatch.setattr(meshloom, "Trainer", short)
    monkeypatch.chdir(tmp_path)
    before, after = SCENES.get(name_of(path), ("", ""))
    names: dict[str, Any] = {"__name__": "document"}
    for text in (before, *pythons_of(path), after):
        exec(compile(text, name_of(path), "exec"), names)  # noqa: S102 - the documents are our own


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if ">>>" in path.read_text(encoding="utf-8")], ids=name_of)  # fmt: skip
def test_what_is_shown_of_an_interpreter_is_what_it_shows(path: Path):
    texts = [text for _, text, _ in codes_of(path) if text.startswith(">>>")]
    for number, text in enumerate(texts):
        test = doctest.DocTestParser().get_doctest(text + "\n", {}, name_of(path), str(path), number)
        assert not doctest.DocTestRunner().run(test).failed


def commands_of(path: Path) -> list[tuple[int, str]]:
    """(line, words behind `meshloom`) of all commands in code."""
    found: list[tuple[int, str]] = []
    for _, text, block in codes_of(path):
        for number, line in enumerate(text.splitlines()):
            at = block.line + number
            if batch := BATCH.match(line):
                found.append((at, batch[2]))
            elif command := COMMAND.match(line.strip()):
                found.append((at, command[1]))
    return [(line, words) for line, words in found if "…" not in words]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if commands_of(path)], ids=name_of)
@pytest.mark.every
def test_commands_are_what_the_parser_takes(path: Path, capsys: pytest.CaptureFixture[str]):
    wrong: list[str] = []
    for line, command in commands_of(path):
        # what stands behind is said in a comment, or three blanks apart; [what may be left out] is given
        plain = re.sub(r"^(\w+) {1,3}(?=\S)", r"\1 ", re.sub(r"[\[\]]", "", command).replace("$more", ""))
        words = shlex.split(re.split(r" #|[ ]{3,}| && ", plain)[0])
        here = f"{name_of(path)}:{line}: meshloom {' '.join(words)}"
        try:
            arguments = parse([word for word in words if word != "..."])
        except SystemExit:
            wrong.append(f"{here}: {capsys.readouterr().err.splitlines()[-1]}")
            continue
        target = str(getattr(arguments, "target", None) or "job.py").rpartition(":")
        file = target[0] or target[2]
        if file not in USERS and not any((folder / file).exists() for folder in (ROOT, path.parent)):
            wrong.append(f"{here}: there is no {file}")
        if plan := getattr(arguments, "plan", None):
            Plan.parse(plan)
    assert not wrong, "\n".join(wrong)


OPTIONS = {
    verb: {option for action in chosen._actions for option in action.option_strings}
    for group in parser()._subparsers._group_actions  # type: ignore[union-attr]
    for verb, chosen in group.choices.items()  # type: ignore[union-attr]
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
@pytest.mark.every
def test_options_that_a_sentence_names_are_there(path: Path):
    """`meshloom train --log tensorboard`, which need not be a whole command."""
    wrong: list[str] = []
    for block in blocks_of(path.read_text(encoding="utf-8")):
        for word in block.code_words:
            verb = re.match(rf"meshloom +({VERBS})\b(.*)", word)
            given = re.findall(r"(?<=\s)--[a-z-]+", verb[2].partition(" -- ")[0]) if verb else []
            wrong += [
                f"{name_of(path)}:{block.line} says `{word}`, and {verb[1]} has no {each}"
                for each in given
                if verb and each not in OPTIONS[verb[1]]
            ]
    assert not wrong, "\n".join(wrong)


MAKE = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if re.match(r"[a-z-]+:", line)}  # fmt: skip


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
@pytest.mark.every
def test_other_commands_are_about_what_is_there(path: Path):
    """`make TARGET`, `python FILE`, `pytest FILE`."""
    wrong: list[str] = []
    for _, text, block in codes_of(path):
        for line in text.splitlines():
            here = f"{name_of(path)}:{block.line}: {line.strip()}"
            if (made := re.match(r"make ([a-z-]+)\b", line)) and made[1] not in MAKE:
                wrong.append(f"{here}: no such target")
            files = re.findall(r"\b(?:python|pytest) (\S+\.py)\b", line)
            known = USERS | {"example.py", "my_script.py"}
            wrong += [
                f"{here}: no such file" for file in files if file not in known and not (ROOT / file).exists()
            ]
    assert not wrong, "\n".join(wrong)


@cache
def sentences() -> list[str]:
    """All texts of the package, with a zero in each place of a value."""

    def text_of(node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.JoinedStr(values=values):
                return "".join(text_of(each) if isinstance(each, ast.Constant) else "\0" for each in values)
            case _:
                return "\0"

    nodes = (
        node
        for path in (ROOT / "meshloom").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    )
    return [text for node in nodes if len(text := text_of(node)) > 10]


@pytest.mark.long
def test_messages_that_are_explained_are_ones_of_the_package():
    rows = [
        line.split("`")[1]
        for line in (ROOT / "docs/error_messages.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    unknown = [row for row in rows if not any(holds(text, row) for text in sentences())]
    assert not unknown, "\n".join(unknown)
    assert len(rows) > 25


def holds(text: str, message: str) -> bool:
    """Whether a sentence with values is one that the package makes; three dots stand for values.

    >>> holds("There is no file \\0. Give one.", "There is no file ... Give one."), holds("There is no \\0.", "There is a ...")
    (True, False)
    """
    at = 0
    for piece in filter(None, (each.strip(" .") for each in message.split("..."))):
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def test_what_is_wrong_with_a_document_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Each kind of mistake, so that the tests above cannot pass by looking at nothing."""

    def commands(path: Path) -> None:
        test_commands_are_what_the_parser_takes(path, capsys)

    mistakes: list[tuple[str, Callable[[Path], object], str]] = [
        ("    job = ml.Job(steps=3)", test_python_is_marked_as_such, "is Python: fence it"),
        ("```python\nout: 3 ms\n```", test_python_is_marked_as_such, "and is none"),
        ("    meshloom train job.py --plam dp=2", commands, "--plam"),
        ("    meshloom train jobs.py --plan dp=2", commands, "there is no jobs.py"),
        ("`meshloom train --logs x`", test_options_that_a_sentence_names_are_there, "train has no --logs"),
        ("    make nothing", test_other_commands_are_about_what_is_there, "no such target"),
    ]
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for number, (text, check, message) in enumerate(mistakes):
        (made := tmp_path / f"{number}.md").write_text(f"# Title\n\n{text}\n", encoding="utf-8")
        with pytest.raises(AssertionError, match=re.escape(message)):
            check(made)
