"""One device in a process of its own, beside rank 0's, as if it were in this one: what it compares with, and its verdict, travel as messages.

    rank 0       begin | gradient | gradient | ... | update | parameter | ...      tensors one at a time
    one device   forward, backward | compared, replaced ...  | optimizer | compared ...

Rank 0 waits for each answer, as it would compute it, so neither process works against the other. Messages are Python values, whose tensors travel as they
lie in memory. Both ends are of the same user: a process believes what it reads.

    | lengths, pickled | values, pickled | tensor | tensor | ...
"""

from __future__ import annotations

import gc
import io
import pickle
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from meshloom.core.device.flat_bytes import flat_bytes
from meshloom.core.errors import DeviceError, MeshloomError
from meshloom.core.job import Job
from meshloom.launch.child_environment import reference_environment
from meshloom.launch.failure import OUT_OF_MEMORY, own_lines
from meshloom.launch.processes.child import start_child
from meshloom.launch.processes.rank_process import signal_name
from meshloom.machine.process_memory import trim
from meshloom.verify.comparison_run import ComparisonRun, compare_here


class ReferenceProcess:
    """A process that loads the job for itself; a context, at whose end it has ended. command: what this rank was started
    with. Raises `DeviceError` if it cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        here, there = socket.socketpair()
        try:
            environment = reference_environment(there.fileno())
            # with this rank's own process group: whoever ends the rank ends both
            self._process = start_child(
                command, environment=environment, passed=[there.fileno()], own_session=False
            )
        except OSError as error:
            here.close()
            raise DeviceError(f"The process of one device cannot be started: {error.strerror}.") from error
        finally:
            there.close()
        with here:
            self._stream = here.makefile("rwb")

    def __enter__(self) -> ReferenceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(OSError):  # what was not sent
            self._stream.close()

    def compare(self, job: Job, *given: Any) -> ComparisonRun:
        """Begins a comparison there, in place of an earlier one; what is called of it is called there. The job is the one that it has loaded."""
        self.call("open", *given)
        return cast(ComparisonRun, _Remote(self))

    def call(self, name: str, *arguments: Any) -> Any:
        """What a method of its comparison returns there. Raises what that raises, and `DeviceError` if the process is
        gone."""
        try:
            send(self._stream, (name, arguments))
            error, found = receive(self._stream)
        except (EOFError, OSError):
            raise self._lost() from None
        if error is not None:
            raise error
        return found

    def _lost(self) -> DeviceError:
        code = self._process.wait()
        hint = OUT_OF_MEMORY if -code == signal.SIGKILL else ""
        how = f"was killed by {signal_name(-code)}{hint}" if code < 0 else f"ended with exit code {code}"
        return DeviceError(
            f"The process of one device, which the plan is compared with, {how}. It holds the whole model: verify the same job with fewer "
            "layers, or where there is more memory."
        )


class _Remote:
    def __init__(self, process: ReferenceProcess) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return partial(self._process.call, name)


def serve_reference(job: Job, descriptor: int) -> None:
    """Compares as rank 0 says. descriptor: of the socket to it."""
    comparison: ComparisonRun | None = None
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        while True:
            try:
                name, arguments = receive(stream)
                error: Exception | None = None
                found: Any = None
                try:
                    if name == "open":
                        if comparison is not None:  # lies in cycles, and the next one needs as much memory
                            comparison = None
                            gc.collect()
                        comparison = compare_here(job, *arguments)
                    else:
                        assert comparison is not None
                        found = getattr(comparison, name)(*arguments)
                        if not name.startswith("add_"):  # it has computed, and ranks compute next
                            trim()
                except Exception as raised:
                    error = to_send(raised)
                send(stream, (error, found))
            except (EOFError, OSError):
                return


def to_send(error: Exception) -> Exception:
    """An error that can be raised elsewhere, with the user's own lines."""
    if lines := own_lines(error):
        error.add_note(f"In the process of one device:\n{lines}")
    copy = None
    with suppress(
        pickle.PickleError, TypeError, AttributeError, ImportError, LookupError, RuntimeError, ValueError
    ):
        copy = pickle.loads(pickle.dumps(error))
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    return MeshloomError(f"One device fails with {type(error).__name__}: {error}")


def send(stream: io.BufferedIOBase, value: Any) -> None:
    """Sends a value; tensors that it holds arrive on the CPU. Raises `OSError` if the other end is gone."""
    buffers: list[pickle.PickleBuffer] = []
    content = io.BytesIO()
    _Pickler(content, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [content.getbuffer(), *(each.raw() for each in buffers)]
    pickle.dump([len(each) for each in parts], stream)
    stream.writelines(parts)
    stream.flush()


def receive(stream: io.BufferedRWPair) -> Any:
    """The next value. Raises `EOFError` or `OSError` if the other end is gone."""
    parts = [bytearray(length) for length in pickle.load(stream)]
    if any(stream.readinto(part) < len(part) for part in parts):
        raise EOFError
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.layout != torch.strided:
            return NotImplemented  # a sparse one consists of others
        tensor = obj.detach().cpu()
        flat: Any = flat_bytes(tensor).numpy()
        return _dense, (pickle.PickleBuffer(flat), tensor.dtype, tuple(tensor.shape))


def _dense(buffer: Any, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    flat = torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)
    return flat.view(tuple(shape))
