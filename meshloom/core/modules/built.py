"""Models as the job's function builds them, of which nothing lies outside.

A model function may return modules and tensors that were there before it was called:

    ANCHORS = torch.rand(9, 4)
    backbone = AutoModel.from_pretrained("...")

    def model():
        return Detector(backbone, anchors=ANCHORS)      # self.register_buffer("anchors", anchors)
        # or nn.Embedding.from_pretrained(torch.from_numpy(GLOVE), freeze=False)

On one device they are the model's own. Here a model is built more than once: by each rank of a process, by the device that they
are compared with, and to read its loss. All would train one backbone, and what one converts to another precision it would
convert for all. So each call gives copies, of values that nothing trains. What a function makes itself and keeps (`global net`)
is no copy; it may be returned once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from types import FunctionType, MethodType
from typing import Any, ClassVar, Self
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from meshloom.core.errors import JobError
from meshloom.core.modules.compiled import named_as_written
from meshloom.core.modules.known_elsewhere import DEPTH, FEW, KnownElsewhere, inside, near
from meshloom.core.modules.model_parts import ModelParts, is_foreign


@dataclass(frozen=True)
class Original:
    """What a model has a copy of. value: as it was built; nothing changes it. outside: the tensor that code outside of the
    model knows, which is `value` or lies in its memory."""

    value: Tensor
    outside: Tensor


_RETURNED: WeakSet[nn.Module] = WeakSet()  # modules that are trained, or read, and lie outside of later calls
_LEFT: MutableMapping[Tensor, None] = (
    WeakIdKeyDictionary()
)  # tensors that something else knows, which is not found outside
_ORIGINALS: WeakKeyDictionary[nn.Module, dict[str, Original]] = WeakKeyDictionary()


def built(function: Callable[[], nn.Module]) -> nn.Module:
    """What a job's model function returns, with modules under the names that they are written with, and copies of what
    lies outside of it. Raises `JobError` as `named_as_written`, and for modules outside that cannot be copied.

    >>> outside = nn.Linear(3, 2)
    >>> model = built(lambda: nn.Sequential(outside))
    >>> model[0] is outside, bool((model[0].weight == outside.weight).all())
    (False, True)
    """
    with _Made() as made:
        model = named_as_written(function())
        model = _with_copies(function, model, made)
        if made.is_outermost:
            _RETURNED.update(model.modules())
    return model


def _with_copies(function: Callable[[], nn.Module], model: nn.Module, made: _Made) -> nn.Module:
    held = ModelParts(model)
    if twice := [each for each in held.modules if each in _RETURNED]:
        name = held.names[id(twice[0])]
        raise JobError(
            f"Job(model=...) returned the same module twice{f' ({name})' if name else ''}, which it made the first time and keeps. Let the function build a "
            "new one at every call: every replica has its own."
        )
    modules, tensors = held.known_elsewhere()
    if not modules and not tensors:
        return model
    outside = KnownElsewhere(function, model, made.ids)
    there = [each for each in modules if outside.has(each) and id(each) not in made.ids]
    there += [each for each in held.parameters if outside.has(each)]
    if there:
        copied = _copied(model, held.names[id(there[0])])
        _ORIGINALS[copied] = {held.names[id(each)]: Original(each, each) for each in held.tensors}
        return copied
    known = [(each, outside.in_memory_of(each)) for each in tensors]
    _ORIGINALS.setdefault(model, {}).update(
        {held.names[id(each)]: Original(each.detach(), own) for each, own in known if own is not None}
    )
    left = [each for each, own in known if own is None and not is_foreign(each)]
    for each in left if made.is_outermost else ():
        if each in _LEFT:
            raise JobError(
                f"Job(model=...) returned the same tensor twice ({held.names[id(each)]}), from where it is not found. Let the function build a new one at "
                "every call, or give it a copy (clone): every replica has its own."
            )
        _LEFT[each] = None
    held.copy([each for each, own in known if own is not None or is_foreign(each)])
    return model


class _Made:
    """A context that knows the modules that are made within it; those within another count for both."""

    _open: ClassVar[list[_Made]] = []

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self._undo = ExitStack()

    @property
    def is_outermost(self) -> bool:
        """Whether it is within no other one."""
        return self._open[0] is self

    def __enter__(self) -> Self:
        self._open.append(self)
        if self.is_outermost:
            for name in ("__init__", "__setstate__"):
                self._undo.enter_context(
                    patch.object(nn.Module, name, self._noting(getattr(nn.Module, name)))
                )
        return self

    def __exit__(self, *_: object) -> None:
        self._open.remove(self)
        self._undo.close()

    @classmethod
    def _noting(cls, function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            for each in cls._open:
                each.ids.add(id(module))
            function(module, *args, **kwargs)

        return called


def originals(model: nn.Module) -> Mapping[str, Original]:
    """Of a model that is `built`, by name what it has copies of."""
    return _ORIGINALS.get(model, {})


def _copied(model: nn.Module, outside: str) -> nn.Module:
    """A copy of the whole model. outside: name of a module or parameter that lies there."""
    said = f"{outside or 'All of the model'} lies outside of Job(model=...), so that every call returns the same one, and cannot be copied"
    before = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
    try:
        made = copy.deepcopy(model)
    except Exception as error:
        raise JobError(f"{said} ({error}). Let the function build it.") from error
    for path, module in made.named_modules():
        for value in list(vars(module).values()):
            for each in (value, *(value.values() if isinstance(value, dict) else ())):
                if _refers_to(each, before, 0):
                    name = getattr(each, "__qualname__", type(each).__name__)
                    raise JobError(
                        f"{said}: {name} of {path or 'the model'} would refer to the first one. Let the function build it."
                    )
    for (path, old), new in zip(model.named_parameters(), made.parameters(), strict=True):
        for kind, register in (
            ("_backward_hooks", new.register_hook),
            ("_post_accumulate_grad_hooks", new.register_post_accumulate_grad_hook),
        ):
            for hook in (getattr(old, kind) or {}).values():
                if _refers_to(hook, before, 0):
                    raise JobError(
                        f"{said}: a hook of the parameter {path} would refer to the first one. Let the function build it."
                    )
                register(hook)
    return made


def _refers_to(value: Any, known: set[int], depth: int) -> bool:
    """Whether a function, which copying leaves as it is, knows one of these: in what it closes over, or by a global's name."""
    if id(value) in known:
        return depth > 0
    if depth > DEPTH:
        return False
    if isinstance(value, FunctionType):
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        return any(_refers_to(each, known, depth + 1) for each in (*near(value), *named))
    if isinstance(value, MethodType | partial):
        return any(_refers_to(each, known, depth + 1) for each in near(value))
    if depth and type(value) in (list, tuple, set, dict):
        return any(_refers_to(each, known, depth + 1) for each in islice(inside(value, depth), FEW))
    return False
