"""Contexts in which something of the process is another, for all of its ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps


def once_in_process(
    context: Callable[[], AbstractContextManager[None]],
) -> Callable[[], AbstractContextManager[None]]:
    """The context, entered by who comes first and left by who goes last: ranks of one process may enter and leave in any order.

    >>> @once_in_process
    ... @contextmanager
    ... def told():
    ...     print("in")
    ...     yield
    ...     print("out")
    >>> with told(), told():
    ...     pass
    in
    out
    """
    lock, inside, around = threading.Lock(), 0, ExitStack()

    @wraps(context)
    @contextmanager
    def shared() -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                around.enter_context(context())
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    around.close()

    return shared
