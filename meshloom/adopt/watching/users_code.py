"""The user's own code while a script runs: which lines ran, what functions returned, and who called."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from meshloom.adopt.watching.draws import is_batch, tensors_of
from meshloom.adopt.watching.passes import SeenFrame


class UsersCode:
    """What Python tells: the user's lines that ran in the first step, by file, the tensors that the user's functions returned,
    frames, and the names of functions and constructors that made what is trained."""

    def __init__(self, script: Path) -> None:
        self._script, self._folder = script.resolve(), script.parent.resolve()
        self.lines: dict[str, set[int]] = {}
        self.in_first_step = True
        self.made: dict[types.CodeType, dict[str, Any]] = {}
        self._known: dict[str, bool] = {}
        self._returned = WeakIdKeyDictionary()  # of a tensor, the latest value that had it
        self._returns = 0

    def is_users(self, file: str) -> bool:
        """Whether a file is the script, or beside it or below."""
        known = self._known.get(file)
        if known is None:
            real = bool(file) and not file.startswith("<")  # <frozen runpy>, <string>
            inside = real and Path(file).resolve().is_relative_to(self._folder)
            known = self._known[file] = inside and "site-packages" not in file
        return known

    def trace(self, frame: types.FrameType, event: str, value: Any) -> Any:
        """For `sys.settrace`."""
        if not self.is_users(frame.f_code.co_filename):
            return None
        frame.f_trace_lines = self.in_first_step
        return self._trace_users

    def _trace_users(self, frame: types.FrameType, event: str, value: Any) -> Any:
        if event == "line":
            self.lines.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        elif event == "return":
            if is_batch(value):
                self._keep(frame.f_code.co_name, value)
            if frame.f_code.co_name == "__init__" or _makes_optimizer(value):
                self.made[frame.f_code] = dict(frame.f_locals)
        return self._trace_users

    def _keep(self, name: str, value: Any) -> None:
        leaves, structure = tree_flatten(value)
        held = [weakref.ref(each) if isinstance(each, Tensor) else each for each in leaves]
        self._returns += 1
        for each in tensors_of(value):
            self._returned[each] = self._returns, name, held, structure

    def returned_with(self, tensors: Sequence[Tensor]) -> tuple[str, Any] | None:
        """The function that returned one of the tensors last, and what it returned; None if none did, or a part of it is gone."""
        found = [self._returned[each] for each in tensors if each in self._returned]
        if not found:
            return None
        _, name, held, structure = max(found, key=lambda each: each[0])
        leaves = [each() if isinstance(each, weakref.ref) else each for each in held]
        if any(each is None for each, kept in zip(leaves, held, strict=True) if kept is not None):
            return None
        return name, tree_unflatten(leaves, structure)

    def users_frames(self, frame: types.FrameType | None) -> list[SeenFrame]:
        """The user's frames from the script to `frame`."""
        frames: list[SeenFrame] = []
        while frame is not None:
            if self.is_users(frame.f_code.co_filename):
                path = Path(frame.f_code.co_filename).resolve()
                values = dict(frame.f_locals)
                owner = None if isinstance(values.get("self"), nn.Module) else values.pop("self", None)
                seen = SeenFrame(
                    path, frame.f_code.co_name, frame.f_lineno, values, frame.f_globals,
                    owner=owner, attributes=dict(getattr(owner, "__dict__", {})), made=self.made,
                )  # fmt: skip
                frames.insert(0, seen)
                if frame.f_code.co_name == "<module>" and path == self._script:
                    break
            frame = frame.f_back
        return frames


def _makes_optimizer(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(each, Optimizer | nn.Module) for each in value)


def caller(depth: int) -> types.FrameType:
    """The frame that called the function that asks, 1, or the one `depth` calls above."""
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        assert frame is not None
        frame = frame.f_back
    assert frame is not None
    return frame


def clipping(clips: list[tuple[str, float, float, int]], clip: Callable[..., Any]) -> Callable[..., Any]:
    """A function that clips, and notes what it is given."""

    def clipped(parameters: Any, bound: float, *rest: Any, **named: Any) -> Any:
        norm = named.get("norm_type", rest[0] if rest else 2.0) if "norm" in clip.__name__ else 0.0
        clips.append((clip.__name__, float(bound), float(norm), caller(2).f_lineno))
        return clip(parameters, bound, *rest, **named)

    def by_name(parameters: Any, *rest: Any, **named: Any) -> Any:
        names = [each for each in ("max_norm", "clip_value") if each in named]
        return clipped(parameters, *([named.pop(names[0])] if names else []), *rest, **named)

    return by_name
