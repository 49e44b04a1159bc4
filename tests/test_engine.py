"""The engine of the shared-memory transport under ThreadSanitizer: ranks are threads, and no two of them touch a byte without an order between them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[1] / "meshloom" / "comm" / "native"
STRESS = Path(__file__).with_name("native") / "stress.c"
RACES = {  # a bug planted in engine.c: the text, and what takes its place
    "a descriptor is published before it is written": (
        "atomic_store_explicit(&own->started, number + 1, memory_order_release)",
        "atomic_store_explicit(&own->started, number + 1, memory_order_relaxed)",
    ),
    "an operation is finished before it is read": ("finished, number + 1, memory_order_release", "finished, number + 1, memory_order_relaxed"),
    "a chunk is done before it is written": ("claim->done, 1, memory_order_acq_rel", "claim->done, 1, memory_order_relaxed"),
    "a letter is taken before it is read": ("&letter->full, 0, memory_order_release", "&letter->full, 0, memory_order_relaxed"),
}


def build(directory: Path, engine: str) -> Path:
    """The stress program with this text of the engine."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("There is no C compiler.")
    (directory / "probe.c").write_text("int main(void) { return 0; }")
    (directory / "engine.c").write_text(engine)
    words = [compiler, "-std=c11", "-g", "-O1", "-fsanitize=thread", "-Wno-tsan", f"-I{NATIVE}"]
    probe = subprocess.run([*words, directory / "probe.c", "-o", directory / "probe"], capture_output=True, text=True)
    if probe.returncode or subprocess.run([directory / "probe"], capture_output=True).returncode:
        pytest.skip(f"ThreadSanitizer does not run here. {probe.stderr.strip()}")
    made = directory / "stress"
    subprocess.run([*words, STRESS, directory / "engine.c", NATIVE / "reduce.c", "-o", made, "-lpthread", "-lm"], check=True)
    return made


def stress(program: Path, ranks: int, batches: int, seed: int) -> None:
    done = subprocess.run([program, str(ranks), str(batches), str(seed)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[:5000]
    assert done.stderr == ""
    assert done.stdout == f"{ranks} ranks, {batches * 6} calls: as computed.\n"


def test_calls_of_three_ranks_have_no_race(tmp_path: Path) -> None:
    stress(build(tmp_path, (NATIVE / "engine.c").read_text()), 3, 300, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_calls_have_no_race(tmp_path: Path) -> None:
    program = build(tmp_path, (NATIVE / "engine.c").read_text())
    for ranks in (3, 4, 5, 8):
        for seed in range(1, 4):
            stress(program, ranks, 2000, seed)


@pytest.mark.slow
@pytest.mark.parametrize("bug", RACES)
def test_a_planted_race_is_found(bug: str, tmp_path: Path) -> None:
    right, wrong = RACES[bug]
    engine = (NATIVE / "engine.c").read_text()
    assert right in engine
    program = build(tmp_path, engine.replace(right, wrong))
    done = subprocess.run([program, "4", "300", "1"], capture_output=True, text=True, timeout=250)
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
