"""Tries a wheel or an sdist as a new user would: in a fresh environment, outside of the checkout.

    python tests/installing.py dist/meshloom-*.tar.gz [--compiled]

--compiled: ranks of one machine must share memory there, by the compiled engine; otherwise they must not, as CC=/bin/false
has it. A job is trained by two processes and verified.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOB = """
import torch
from torch import nn
import meshloom as ml

job = ml.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    data=lambda: torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))),
    batch_size=16,
    steps=4,
)
"""

# what a user's script goes on with -> what a type checker finds there
TYPED = {
    "ml.log('x', 1.0)": "",
    "ml.Job(steps='ten')": "reportCallIssue",
    "trainer.stepp": "reportAttributeAccessIssue",
    "text: str = trainer.next_step": "reportAssignmentType",
}
WITH_TYPES = """
with ml.Trainer(job, "dp=2") as trainer:
    number: int = trainer.next_step
    for batch in trainer.batches():
        loss: float = trainer.step(batch)
"""


def check_types(python: Path, directory: Path) -> None:
    """Raises `AssertionError` if pyright, of this environment, does not find the package's types in that of `python`."""
    for line, wrong in TYPED.items():
        (directory / "typed.py").write_text(f"{JOB}{WITH_TYPES}    {line}\n")
        words = [sys.executable, "-m", "pyright", "--pythonpath", str(python), "typed.py"]
        found = subprocess.run(words, cwd=directory, capture_output=True, text=True)
        assert (found.returncode == 0) == (not wrong) and wrong in found.stdout, found.stdout
        assert "reportMissing" not in found.stdout, found.stdout


def limits_without(package: str, directory: Path) -> list[str]:
    """pip's words for the tested versions of everything but one package, in a file of this directory."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (limits := directory / "constraints.txt").write_text(
        "\n".join(line for line in lines if not line.startswith(f"{package}=="))
    )
    return ["--constraint", str(limits)]


def make_environment(directory: Path, interpreter: str = sys.executable) -> Path:
    """The interpreter of a fresh environment in this directory, or of the one that is there."""
    python = directory / "env/bin/python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", directory / "env"], check=True)
    return python


def try_installed(
    package: Path, directory: Path, *, compiled: bool, interpreter: str = sys.executable, torch: str = ""
) -> Path:
    """The interpreter of the environment in which it was tried. torch: its version, if not the tested one.

    Raises `CalledProcessError` or `AssertionError` if it cannot be used."""
    python = make_environment(directory, interpreter)
    limits = limits_without("torch", directory) if torch else ["--constraint", str(ROOT / "constraints.txt")]
    packages = [package.resolve(), *([f"torch=={torch}"] if torch else [])]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *limits, *packages], check=True)
    (directory / "job.py").write_text(JOB)

    def meshloom(*words: str) -> str:
        found = subprocess.run(
            [directory / "env/bin/meshloom", *words], cwd=directory, capture_output=True, text=True
        )
        assert found.returncode == 0, f"meshloom {' '.join(words)}: {found.stdout}{found.stderr}"
        return found.stdout

    print(meshloom("--version").strip())
    page = meshloom("doctor")
    assert ("ranks of one machine share memory" in page) == compiled, page
    text = meshloom(
        "train", "job.py", "--plan", "dp=2", "--devices", "cpu", "--oversubscribe", "--out", "run"
    )
    assert ("communicating through shared memory" in text) == compiled, text
    assert "EQUAL to one device" in meshloom("verify", "job.py", "--plan", "tp=2", "--devices", "simulated")
    assert (directory / "run/metrics.csv").exists()
    check_types(python, directory)
    print(
        f"{package.name}: installed, trained, verified and type-checked, {'with' if compiled else 'without'} the compiled engine"
    )
    return python


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        try_installed(Path(sys.argv[1]), Path(made), compiled="--compiled" in sys.argv)
