"""Gives a module other parameters and buffers while it runs: those of a program's run, which may be gathered, of another
precision, or a copy for one microbatch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class ModuleTensors:
    """The places of a module's tensors. names: of each tensor, all names that share it."""

    def __init__(self, module: nn.Module, names: Sequence[Sequence[str]]) -> None:
        modules = dict(module.named_modules(remove_duplicate=False))
        self._places = [
            [_Place(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in tied]
            for tied in names
        ]
        self._recurrent = [each for each in module.modules() if isinstance(each, nn.RNNBase)]

    @contextmanager
    def _replaced_by(self, tensors: Sequence[Tensor], left: dict[int, Tensor]) -> Iterator[None]:
        """The module has `tensors` inside. A buffer that it replaces there is written to the tensor that was given, or, if its number is in
        `left`, put there: a backward may have saved what was given."""
        with ExitStack() as around:
            moved = False
            for places, tensor in zip(self._places, tensors, strict=True):
                for place in places:
                    before = place.get()
                    if before is not tensor:
                        moved = True
                        around.callback(place.put, before)
                        place.put(tensor)
            if moved:
                self._list_weights()
                around.callback(self._list_weights)
            yield
            with torch.no_grad():
                for number, (places, tensor) in enumerate(zip(self._places, tensors, strict=True)):
                    for place in places:
                        if (now := place.get()) is not tensor:
                            if number in left:
                                left[number] = now
                            else:
                                tensor.copy_(now)
                            place.put(tensor)

    @contextmanager
    def running_on(
        self, state: Sequence[Tensor], written: Collection[int], trained: Collection[int] = ()
    ) -> Iterator[None]:
        """The module has `state` inside, of the tensors numbered in `written` and `trained` copies: its backward may save
        these, and others write the tensors before it. Then the tensors get what the module made of the copies.

        trained: parameters that are, to which it writes around autograd.
        """
        copied = {*written, *trained}
        own = [each.clone() if number in copied else each for number, each in enumerate(state)]
        left = {number: own[number] for number in written}
        with self._replaced_by(own, left):
            yield
        with torch.no_grad():
            for number in written:
                state[number].copy_(left[number])
            for number in trained:
                state[number].data.copy_(own[number])

    def _list_weights(self) -> None:
        """Recurrent layers keep a list of their weights, besides."""
        for each in self._recurrent:
            names: Any = each._flat_weights_names  # pyright: ignore[reportPrivateUsage]
            each._flat_weights = [getattr(each, name, None) for name in names]  # pyright: ignore[reportPrivateUsage]


class _Place:
    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._scripted: Any = (
            getattr(module, "_c", None) if isinstance(module, torch.jit.ScriptModule) else None
        )
        self._held: Any = None
        if self._scripted is None:
            kinds = (vars(module)["_parameters"], vars(module)["_buffers"])
            self._held = next(each for each in kinds if name in each)

    def get(self) -> Tensor:
        return self._scripted.getattr(self._name) if self._scripted is not None else self._held[self._name]

    def put(self, tensor: Tensor) -> None:
        if self._scripted is not None:
            self._scripted.setattr(self._name, tensor)
        else:
            self._held[self._name] = tensor
