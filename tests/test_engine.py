"""The engine of the shared-memory transport under sanitizers.

ThreadSanitizer: ranks are threads, and no two of them touch a byte without an order between them.
AddressSanitizer and UndefinedBehaviorSanitizer: whatever stands in the memory that ranks share, nothing
outside of it is touched.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[1] / "meshloom" / "comm" / "shm" / "native"
STRESS = Path(__file__).with_name("native") / "stress.c"
HOSTILE = STRESS.with_name("hostile.c")
# for reduce.c alone, of one-byte types
SIZES = b"#include <stddef.h>\nsize_t ml_element_bytes(int dtype) { return dtype >= 0; }"
RACES = {  # a planted bug: a text of the engine, and what takes its place
    "a descriptor is published before it is written": (
        "atomic_store_explicit(&own->started, number + 1, memory_order_release)",
        "atomic_store_explicit(&own->started, number + 1, memory_order_relaxed)",
    ),
    "an operation is finished before it is read": (
        "finished, number + 1, memory_order_release",
        "finished, number + 1, memory_order_relaxed",
    ),
    "a chunk is done before it is written": (
        "claim->done, 1, memory_order_acq_rel",
        "claim->done, 1, memory_order_relaxed",
    ),
    "a letter is taken before it is read": (
        "&letter->full, 0, memory_order_release",
        "&letter->full, 0, memory_order_relaxed",
    ),
}
HOLES = {  # likewise, of what the engine checks before it believes another rank
    "a payload may lie behind the arena": (
        "place.offset % LINE == 0 && is_within(place.offset, read, group->capacity)",
        "read < UINT64_MAX",
    ),
    "a payload may lie behind the window": (
        "return is_within(place.offset, read, group->windows[place.window - 1].num_bytes)",
        "return read < UINT64_MAX",
    ),
    "a window need not exist": ("place.window > (uint32_t)group->num_windows || ", ""),
    "sizes may be any": (
        "sizes[rank] < 0 || (uint64_t)sizes[rank] > most - sum",
        "most == sum + 1 && sizes[rank] < 0",
    ),
    "a letter may lie behind the arena": (
        "!is_next || !is_within(read.offset, read.length * element, group->capacity)",
        "!is_next",
    ),
    "a letter may be any part of a message": (
        "read.first == message->next && read.length <= call->count - message->next && (read.length || !call->count)",
        "read.length || !call->count",
    ),
    "an own length is read where others can write": (
        "piece->length * element, places = (uint64_t)group->size;",
        "descriptor_of(group, group->rank, piece->first / (piece->length + 1))->length * element, places = (uint64_t)group->size;",
    ),
    "any number of letters may be there": ("posted < head || posted - head > MAIL", "posted < head"),
    "nothing is copied from nowhere": (
        "if (bytes && to != from) memmove",
        "if (to != from || bytes) memmove",
    ),
}


def engine_files() -> list[Path]:
    """All but the Python module."""
    return [path for path in sorted(NATIVE.glob("*.c")) if path.name != "module.c"]


def build(
    directory: Path, right: str = "", wrong: str = "", program: Path = STRESS, sanitizers: str = "thread"
) -> Path:
    """`program` with the engine, in which `wrong` stands where `right` stood."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("There is no C compiler.")
    (directory / "probe.c").write_text("int main(void) { return 0; }")
    files = [directory / path.name for path in engine_files()]
    for path, copy in zip(
        [*engine_files(), NATIVE / "internal.h", NATIVE / "engine.h"],
        [*files, directory / "internal.h", directory / "engine.h"],
        strict=True,
    ):
        copy.write_text(path.read_text().replace(right, wrong) if right else path.read_text())
    words = [
        compiler,
        "-std=c11",
        "-g",
        "-O1",
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
        "-Wno-tsan",
        f"-I{directory}",
        f"-I{NATIVE}",
    ]
    probe = subprocess.run(
        [*words, directory / "probe.c", "-o", directory / "probe"], capture_output=True, text=True
    )
    if probe.returncode or subprocess.run([directory / "probe"], capture_output=True).returncode:
        pytest.skip(f"-fsanitize={sanitizers} does not run here. {probe.stderr.strip()}")
    made = directory / "stress"
    subprocess.run([*words, program, *files, "-o", made, "-lpthread", "-lm"], check=True)
    return made


def times_in_engine(text: str) -> int:
    return sum(path.read_text().count(text) for path in [*engine_files(), NATIVE / "internal.h"])


def stress(program: Path, ranks: int, batches: int, seed: int) -> None:
    done = subprocess.run(
        [program, str(ranks), str(batches), str(seed)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[:5000]
    assert done.stderr == ""
    assert done.stdout == f"{ranks} ranks, {batches * 6} calls: as computed.\n"


@pytest.mark.long
def test_averages_of_small_integers_over_many_ranks(tmp_path: Path) -> None:
    """The number of ranks need not fit into the type of the elements."""
    compiler = shutil.which("gcc") or shutil.which("cc") or pytest.skip("There is no C compiler.")
    library = tmp_path / "reduce.so"
    subprocess.run(
        [
            compiler,
            "-std=c11",
            "-shared",
            "-fPIC",
            f"-I{NATIVE}",
            NATIVE / "reduce.c",
            "-x",
            "c",
            "-",
            "-o",
            library,
        ],
        input=SIZES,
        check=True,
    )
    for number, kind in ((7, ctypes.c_int8), (11, ctypes.c_uint8)):  # ML_I8, ML_U8
        for ranks in (127, 128, 200, 256):
            inputs = [(kind * 1)(0) for _ in range(ranks - 1)] + [(kind * 1)(127)]
            output = (kind * 1)()
            sources = (ctypes.c_void_p * ranks)(*(ctypes.addressof(each) for each in inputs))
            # ML_AVG
            ctypes.CDLL(str(library)).ml_reduce(number, 1, output, sources, ranks, ctypes.c_size_t(1))
            assert output[0] == 127 // ranks


@pytest.mark.parametrize("path", engine_files(), ids=lambda path: path.name)
def test_the_compiler_has_nothing_to_say(path: Path) -> None:
    compiler = shutil.which("gcc") or pytest.skip("There is no gcc.")
    words = [
        compiler,
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Wmissing-prototypes",
        "-Werror",
        "-fsyntax-only",
        path,
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_calls_of_three_ranks_have_no_race(tmp_path: Path) -> None:
    stress(build(tmp_path), 3, 300, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_calls_have_no_race(tmp_path: Path) -> None:
    program = build(tmp_path)
    for ranks in (3, 4, 5, 8):
        for seed in (1, 2):
            stress(program, ranks, 1000, seed)


@pytest.mark.slow
@pytest.mark.parametrize("bug", RACES)
def test_a_planted_race_is_found(bug: str, tmp_path: Path) -> None:
    right, wrong = RACES[bug]
    assert times_in_engine(right) == 1
    program = build(tmp_path, right, wrong)
    done = subprocess.run([program, "4", "300", "1"], capture_output=True, text=True, timeout=250)
    assert "WARNING: ThreadSanitizer: data race" in done.stderr


ADDRESSES = "address,undefined"


@pytest.mark.long
def test_nothing_but_the_module_is_visible_and_the_engine_s_names_have_its_prefix(tmp_path: Path) -> None:
    """`advance`, as one of its functions was called, is a function of glibc's too."""
    from meshloom.comm.shm import _engine

    nm, compiler = (
        shutil.which("nm") or pytest.skip("There is no nm."),
        shutil.which("gcc") or pytest.skip("There is no gcc."),
    )
    visible = subprocess.run(
        [nm, "-D", "--defined-only", str(_engine.__file__)], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[-1] for line in visible.splitlines()] == ["PyInit__engine"]
    files = [path for path in engine_files() if path.name != "reduce.c"]
    subprocess.run([compiler, "-std=c11", "-O0", "-c", *files], cwd=tmp_path, check=True)
    objects = sorted(tmp_path.glob("*.o"))
    defined = subprocess.run(
        [nm, "-g", "--defined-only", *objects], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[-1] for line in defined.splitlines() if len(line.split()) == 3]
    assert len(names) > 20
    assert not [name for name in names if not name.startswith("ml_")]


@pytest.mark.slow
def test_hostile_ranks_reach_nothing_outside_of_what_is_shared(tmp_path: Path) -> None:
    """The engine believed offsets, lengths and windows that others had written, and read its own calls where
    others can write them.

    And `memcpy` was handed NULL for tensors without elements.
    """
    attack(build(tmp_path, program=HOSTILE, sanitizers=ADDRESSES), 1000, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_hostile_calls_reach_nothing_outside(tmp_path: Path) -> None:
    program = build(tmp_path, program=HOSTILE, sanitizers=ADDRESSES)
    for seed in range(2, 5):
        attack(program, 100_000, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_calls_touch_nothing_outside(tmp_path: Path) -> None:
    program = build(tmp_path, sanitizers=ADDRESSES)
    for ranks in (3, 5, 8):
        stress(program, ranks, 1000, ranks)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.every
def test_a_planted_hole_is_found(hole: str, tmp_path: Path) -> None:
    right, wrong = HOLES[hole]
    assert times_in_engine(right) == 1
    program = build(tmp_path, right, wrong, program=HOSTILE, sanitizers=ADDRESSES)
    # a thread that spoils meanwhile may come too late in thousands of trials where cores are busy
    for seed in range(1, 7):
        done = subprocess.run([program, "20000", str(seed)], capture_output=True, text=True, timeout=250)
        if done.returncode:
            break
    assert done.returncode
    assert "AddressSanitizer" in done.stderr or "runtime error" in done.stderr


def attack(program: Path, trials: int, seed: int) -> None:
    done = subprocess.run([program, str(trials), str(seed)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[:5000]
    assert done.stdout == f"{trials} trials: nothing outside was touched.\n"
