"""The fixtures of conftest.py: each kind of leak fails the test that left it, is named, and is gone for the
next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = {
    "processes": "subprocess.Popen(['sleep', '1000'], start_new_session=True).returncode = 0",
    "processes of a process": "subprocess.run(['bash', '-c', 'sleep 1000 & disown'])",
    "threads": "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "open files": "KEPT.append(open('/etc/hostname'))",
    "open files: a socket": "KEPT.append(socket.socket())",
    "segments in /dev/shm": "KEPT.append(shared_memory.SharedMemory(create=True, size=8))",
    "temporary files": "os.close(tempfile.mkstemp()[0])",
    "files in the working directory": "open('left.txt', 'w').close()",
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "grad mode": "torch.set_grad_enabled(False)",
    "number of threads": "torch.set_num_threads(2)",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "working directory": "os.chdir('/')",
    "environment variable LEFT": "os.environ['LEFT'] = '1'",
}
HEADER = """
import os, socket, subprocess, tempfile, threading, time
from multiprocessing import shared_memory
import torch
KEPT = []
"""
CLEAN = """
def test_clean(tmp_path):
    (tmp_path / "file").write_text("x")
    subprocess.run(["bash", "-c", "sleep 0.05 & disown"])  # ends in time
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    shared_memory.SharedMemory(create=True, size=8).unlink()
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled() and "LEFT" not in os.environ
"""


@pytest.mark.processes
def test_every_kind_of_leak_fails_its_own_test_alone(tmp_path: Path):
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_SECONDS = 5.0", "GRACE_SECONDS = 0.5"))
    tests = [f"def test_{number}():\n    {code}\n" for number, code in enumerate(LEAKS.values())]
    (tmp_path / "test_leaks.py").write_text("\n".join([HEADER, *tests, CLEAN]))
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:unraisableexception",
        f"--basetemp={tmp_path / 'base'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_leaks.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
        },  # the fixtures' file imports another
    )
    sections = done.stdout.split("ERROR at teardown of test_")[1:]
    assert len(sections) == len(LEAKS), done.stdout
    for number, (section, leak) in enumerate(zip(sections, LEAKS, strict=True)):
        assert section.startswith(f"{number} "), section
        assert f"\n{leak.split(' of a ')[0].split(': ')[0]}" in section, f"{leak}\n{section}"
    assert f"{len(LEAKS) + 1} passed, {len(LEAKS)} errors" in done.stdout
