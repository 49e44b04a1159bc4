"""The command line as a user meets it: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshloom.cli.main import main

pytestmark = pytest.mark.usefixtures("own_path")

FILE = str(Path(__file__).with_name("job_file.py"))
WORDS = str(Path(__file__).with_name("words_job.py"))


def records(text: str) -> list[dict[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.long
def test_training_prints_plan_progress_bytes_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["train", FILE, "--plan", "dp=2", "--devices", "simulated", "--out", str(tmp_path / "run")]) == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("plan dp=2 on simulated: 2 ranks in this process")
    assert "MLP, 246 parameters; batches of 12 samples over 2 replicas x 1 chunk; 4 steps" in text
    assert re.search(r"step 4/4  loss \d\.\d{4}  \S+ samples/s  \S+ tokens/s  0:00 left  \S+ [MG]iB", text)
    assert "step 4  evaluation: loss " in text
    assert f"step 4  checkpoint: {tmp_path}/run/step-00000004" in text
    assert re.search(r"dp +all_reduce +([\d,]+) +\1 +none", text)
    assert re.search(
        r"time: \d+% compute, \d+% communication, \d+% waiting for slower ranks, \d+% data", text
    )


@pytest.mark.long
def test_json_holds_what_the_terminal_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["train", FILE, "--plan", "dp=3,zero=1", "--devices", "simulated", "--steps", "3", "--json", "-"]
        )
        == 0
    )
    captured = capsys.readouterr()
    found = records(captured.out)
    assert [record["event"] for record in found] == [
        "start",
        "step",
        "step",
        "evaluation",
        "step",
        "evaluation",
        "end",
    ]
    assert found[0]["plan"] == "dp=3,zero=1"
    assert found[-1]["bytes"]["predicted"] == found[-1]["bytes"]["counted"]
    assert found[1]["tokens_per_second"] == pytest.approx(7 * found[1]["samples_per_second"])
    assert sum(found[-1]["time"].values()) == pytest.approx(1.0)
    assert f"{found[-1]['last_loss']:.4f}" in captured.err  # the text goes to stderr then


def test_json_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", FILE, "--devices", "cpu", "--json", str(tmp_path / "run.jsonl")]) == 0
    assert records((tmp_path / "run.jsonl").read_text())[-1]["steps"] == 4
    assert "bytes: none, one replica exchanges nothing" in capsys.readouterr().out


@pytest.mark.long
def test_resume_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", FILE, "--devices", "simulated", "--json", "-"]
    main([*run, "--plan", "dp=2"])
    expected = [record["loss"] for record in records(capsys.readouterr().out) if record["event"] == "step"]
    main([*run, "--plan", "dp=2", "--steps", "2", "--out", str(tmp_path)])
    main([*run, "--plan", "dp=1,microbatches=2", "--resume", str(tmp_path)])
    found = [record["loss"] for record in records(capsys.readouterr().out) if record["event"] == "step"]
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_verification_passes_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", FILE, "--plan", "dp=4", "--devices", "simulated", "--dtype", "float64"]) == 0
    text = capsys.readouterr().out
    assert (
        "EQUAL to one device that runs the same chunks: 4 steps" in text
        and "The checkpoint after step 0: equal" in text
    )
    assert main(["verify", FILE, "--plan", "dp=4", "--devices", "simulated", "--quick", "--steps", "2"]) == 0
    text = capsys.readouterr().out
    assert "EQUAL to one device that runs the same chunks: 2 steps" in text and "checkpoint" not in text


@pytest.mark.slow
def test_a_verification_is_handed_on_as_a_page_and_tensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, directory = tmp_path / "page.html", tmp_path / "repro"
    flags = ["--devices", "simulated", "--report", str(page), "--repro", str(directory)]
    assert main(["verify", FILE, "--plan", "dp=2", "--quick", *flags]) == 0
    assert "equals one device" in page.read_text() and not directory.exists()
    assert main(["verify", f"{FILE}:unsteady", "--plan", "dp=4", "--quick", *flags]) == 1
    assert "differs from one device" in page.read_text() and "<script" not in page.read_text()
    pair = load_file(directory / "tensors.safetensors")
    assert not torch.equal(pair["plan"], pair["one_device"])
    assert "meshloom" in (directory / "README.txt").read_text()
    missing = str(tmp_path / "nowhere" / "page.html")
    capsys.readouterr()
    assert (
        main(["verify", FILE, "--plan", "dp=2", "--quick", "--devices", "simulated", "--report", missing])
        == 2
    )
    captured = capsys.readouterr()
    assert "cannot be written" in captured.err
    assert "EQUAL" not in captured.out  # it was said before the work


@pytest.mark.slow
def test_verification_fails_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["verify", f"{FILE}:unsteady", "--plan", "dp=4", "--devices", "simulated", "--json", "-"]) == 1
    )
    captured = capsys.readouterr()
    assert "EQUAL to one device" not in captured.err
    assert not any(record.get("passed") for record in records(captured.out) if record["event"] == "end")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", f"{FILE}:nothing"], "has no 'nothing'. It has job"),
        (["train", FILE, "--resume", "nowhere"], "nowhere"),
        (
            ["verify", f"{FILE}:big_plan", "--plan", "dp=4,sync_batch_norm=true", "--devices", "simulated"],
            "A batch of 2 samples cannot fill 4 chunks",
        ),
        (["train", FILE, "--json", "/nowhere/x.json"], "--json /nowhere/x.json cannot be written"),
    ],
)
@pytest.mark.long
def test_a_wrong_request_is_one_sentence_and_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_cuda_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.device_count() >= 64:
        pytest.fail("this machine has too many GPUs for this test")
    assert main(["train", FILE, "--plan", "dp=64", "--devices", "cuda"]) == 2
    assert "devices=cuda needs 64 GPUs" in capsys.readouterr().err


LARGER = ["--", "--batch", "6", "--steps", "2"]  # words that only tests/words_job.py knows


@pytest.mark.parametrize(
    "verb", [["train"], ["train", "--plan", "dp=2", "--devices", "simulated"], ["verify"], ["describe"]]
)
@pytest.mark.long
def test_what_follows_two_dashes_is_the_job_files(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """There was no way to say `--lr 0.5` to a job file, and one that parses sys.argv ended at meshloom's
    words."""
    assert main([verb[0], WORDS, *verb[1:], *LARGER]) == 0
    captured = capsys.readouterr()
    assert {"train": "batches of 6 samples", "verify": "EQUAL", "describe": "6 samples"}[
        verb[0]
    ] in captured.out
    assert "words_job.py sees --batch 6 --steps 2\n" in captured.err


def test_a_job_file_that_parses_words_finds_none_where_none_follow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", WORDS, "--steps", "1"]) == 0
    assert "batches of 4 samples over 1 replica x 1 chunk; 1 step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["train", WORDS, "--batch", "6"],
            f"Words for the job file follow --, as in: meshloom train {WORDS} -- --batch 6",
        ),
        (["calibrate", "--", "6"], "meshloom calibrate loads no job file, so nothing can follow --."),
        (
            ["verify", FILE, "--plan", "dp=2", "--against", "float64"],
            "--against is gone: verify --dtype float64 tells rounding from mistakes.",
        ),
        (
            ["verify", FILE, "--plan", "dp=2", "--blocks", "2"],
            "--blocks is gone: build the model with fewer layers where one device cannot hold it",
        ),
        (
            ["verify", FILE, "--plan", "dp=2", "--junit=verify.xml"],
            "--junit is gone: --json has the same records.",
        ),
    ],
)
def test_words_that_have_no_place_are_said(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert sentence in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize("plan", [["dp=2", "--devices", "cpu"], ["dp=2,exchange=async"]])
@pytest.mark.slow
def test_every_process_of_a_run_has_the_files_words(
    plan: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", WORDS, "--plan", *plan, "--json", str(tmp_path / "run"), *LARGER]) == 0
    found = records((tmp_path / "run").read_text())
    assert (found[0]["batch_size"], found[0]["steps"]) == (6, 2)
    said = [line for line in capfd.readouterr().err.splitlines() if "words_job.py sees" in line]
    assert len(said) >= 2
    assert all(line.endswith("sees --batch 6 --steps 2") for line in said)


@pytest.mark.processes
@pytest.mark.slow
def test_processes_and_simulated_devices_give_the_same_losses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for devices in ("simulated", "cpu"):
        assert (
            main(["train", FILE, "--plan", "dp=3", "--devices", devices, "--json", str(tmp_path / devices)])
            == 0
        )
    of = {
        devices: [r["loss"] for r in records((tmp_path / devices).read_text()) if r["event"] == "step"]
        for devices in ("simulated", "cpu")
    }
    assert of["cpu"] == pytest.approx(of["simulated"], rel=1e-6)
    assert "plan dp=3 on cpu: 3 ranks as processes" in capfd.readouterr().out


@pytest.mark.processes
@pytest.mark.slow
def test_an_own_loop_runs_on_processes_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{FILE}:own_loop", "--plan", "dp=2", "--devices", "cpu"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("own")]
    assert [line.split()[1] for line in lines] == ["0", "1", "2", "3"]


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_starts_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torchrun leaves a directory of logs there
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*command, "-m", "meshloom", "train", WORDS, "--plan", "dp=2", "--json", "-", *LARGER],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = records(done.stdout)
    assert (found[0]["devices"], found[0]["batch_size"]) == ("cpu", 6)
    assert [record["step"] for record in found if record["event"] == "step"] == [1, 2]
