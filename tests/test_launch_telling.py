"""A rank without its launcher does not go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


def test_a_rank_whose_launcher_is_gone_ends_when_it_tells_something():
    read, write = os.pipe()
    os.close(read)
    code = "import os\nfrom meshloom.launch.events import send_event\nsend_event({'event': 'joining'})\nprint('still here')"
    environment = {**os.environ, "MESHLOOM_REPORT_FD": str(write)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        env=environment,
        pass_fds=[write],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(write)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
