"""The engine of the shared-memory transport under ThreadSanitizer: ranks are threads, and no two of them touch a byte without an order between them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[1] / "meshloom" / "comm" / "native"
STRESS = Path(__file__).with_name("native") / "stress.c"
SIZES = b"#include <stddef.h>\nsize_t ml_element_bytes(int dtype) { return dtype >= 0; }"  # for reduce.c alone, of one-byte types
RACES = {  # a planted bug: a text of the engine, and what takes its place
    "a descriptor is published before it is written": (
        "atomic_store_explicit(&own->started, number + 1, memory_order_release)",
        "atomic_store_explicit(&own->started, number + 1, memory_order_relaxed)",
    ),
    "an operation is finished before it is read": ("finished, number + 1, memory_order_release", "finished, number + 1, memory_order_relaxed"),
    "a chunk is done before it is written": ("claim->done, 1, memory_order_acq_rel", "claim->done, 1, memory_order_relaxed"),
    "a letter is taken before it is read": ("&letter->full, 0, memory_order_release", "&letter->full, 0, memory_order_relaxed"),
}


def engine_files() -> list[Path]:
    """All but the Python module."""
    return [path for path in sorted(NATIVE.glob("*.c")) if path.name != "module.c"]


def build(directory: Path, right: str = "", wrong: str = "") -> Path:
    """The stress program with the engine, in which `wrong` stands where `right` stood."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("There is no C compiler.")
    (directory / "probe.c").write_text("int main(void) { return 0; }")
    files = [directory / path.name for path in engine_files()]
    for path, copy in zip(engine_files(), files, strict=True):
        copy.write_text(path.read_text().replace(right, wrong) if right else path.read_text())
    words = [compiler, "-std=c11", "-g", "-O1", "-fsanitize=thread", "-Wno-tsan", f"-I{NATIVE}"]
    probe = subprocess.run([*words, directory / "probe.c", "-o", directory / "probe"], capture_output=True, text=True)
    if probe.returncode or subprocess.run([directory / "probe"], capture_output=True).returncode:
        pytest.skip(f"ThreadSanitizer does not run here. {probe.stderr.strip()}")
    made = directory / "stress"
    subprocess.run([*words, STRESS, *files, "-o", made, "-lpthread", "-lm"], check=True)
    return made


def stress(program: Path, ranks: int, batches: int, seed: int) -> None:
    done = subprocess.run([program, str(ranks), str(batches), str(seed)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[:5000]
    assert done.stderr == ""
    assert done.stdout == f"{ranks} ranks, {batches * 6} calls: as computed.\n"


def test_averages_of_small_integers_over_many_ranks(tmp_path: Path) -> None:
    """The number of ranks need not fit into the type of the elements."""
    compiler = shutil.which("gcc") or shutil.which("cc") or pytest.skip("There is no C compiler.")
    library = tmp_path / "reduce.so"
    subprocess.run(
        [compiler, "-std=c11", "-shared", "-fPIC", f"-I{NATIVE}", NATIVE / "reduce.c", "-x", "c", "-", "-o", library], input=SIZES, check=True
    )
    for number, kind in ((7, ctypes.c_int8), (11, ctypes.c_uint8)):  # ML_I8, ML_U8
        for ranks in (127, 128, 200, 256):
            inputs = [(kind * 1)(0) for _ in range(ranks - 1)] + [(kind * 1)(127)]
            output = (kind * 1)()
            sources = (ctypes.c_void_p * ranks)(*(ctypes.addressof(each) for each in inputs))
            ctypes.CDLL(str(library)).ml_reduce(number, 1, output, sources, ranks, ctypes.c_size_t(1))  # ML_AVG
            assert output[0] == 127 // ranks


@pytest.mark.parametrize("path", engine_files(), ids=lambda path: path.name)
def test_the_compiler_has_nothing_to_say(path: Path) -> None:
    compiler = shutil.which("gcc") or pytest.skip("There is no gcc.")
    words = [compiler, "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wmissing-prototypes", "-Werror", "-fsyntax-only", path]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_calls_of_three_ranks_have_no_race(tmp_path: Path) -> None:
    stress(build(tmp_path), 3, 300, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_calls_have_no_race(tmp_path: Path) -> None:
    program = build(tmp_path)
    for ranks in (3, 4, 5, 8):
        for seed in range(1, 4):
            stress(program, ranks, 2000, seed)


@pytest.mark.slow
@pytest.mark.parametrize("bug", RACES)
def test_a_planted_race_is_found(bug: str, tmp_path: Path) -> None:
    right, wrong = RACES[bug]
    assert sum(path.read_text().count(right) for path in engine_files()) == 1
    program = build(tmp_path, right, wrong)
    done = subprocess.run([program, "4", "300", "1"], capture_output=True, text=True, timeout=250)
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
