"""What an installation says of itself, and what it gives to shells."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import meshloom
from meshloom.cli.main import main
from meshloom.report.doctor import OPTIONAL, doctor_facts, doctor_lines

ROOT = Path(__file__).resolve().parent.parent


def test_the_version_is_one(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"meshloom {meshloom.__version__}\n"
    with suppress(
        importlib.metadata.PackageNotFoundError
    ):  # it may run from its folder, and not be installed
        assert importlib.metadata.version("meshloom") == meshloom.__version__
    assert f"\n## {meshloom.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_doctor_says_what_is_there_and_what_is_missing(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"meshloom    {meshloom.__version__}\npython      {sys.version.split()[0]}\n")
    assert f"package     torch {importlib.metadata.version('torch')}\n" in page
    assert re.search(r"processor   \d+ cores, \S+, \S+\nmemory      \S+ [MGT]iB, ", page)
    assert str(Path.home()) not in page  # nothing private


def test_what_is_missing_is_named_with_its_use():
    facts = dict(doctor_facts("1.2.3"))
    lines = doctor_lines(
        {**facts, "optional": dict.fromkeys(OPTIONAL), "packages": {"scipy": None}, "shared memory": "No."}
    )
    assert "optional    wandb not installed; it is for: train --log wandb" in lines
    assert "package     scipy MISSING: install meshloom again" in lines
    assert "transport   No." in lines


def test_the_page_is_a_record_too(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json", "-"]) == 0
    (record,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert record["event"] == "doctor" and record["packages"].keys() > {"torch", "numpy"}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_verbs_and_options(shell: str, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("train", "verify", "doctor", "--plan", "--log"))
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_completion_without_its_library_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'meshloom[completion]'" in capsys.readouterr().err
