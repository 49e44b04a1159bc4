"""How far a loader has come in its data, and the states of generators that its epochs began with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map

from meshloom.core.modules.held_generators import Generator, held_generators
from meshloom.core.random import generators, preserved_draws, put_generators


class DataPlace:
    """Of a loader. seed: of the draws of its samples. order: the script's batch sampler; None of a stream.

    epoch: the next one to begin. own: batches are handed to the script by a loader of ours, and not by one that was made from its parts.
    """

    def __init__(self, seed: int, order: Any) -> None:
        self.seed, self.order = seed, order
        self.epoch = 0
        self.own = False
        self._begun: dict[str, Any] = {}
        self._handed = 0
        self._resumed: Mapping[str, Any] | None = None

    @property
    def is_resumed(self) -> bool:
        """Whether the next epoch is the rest of one that was begun elsewhere."""
        return self._resumed is not None

    def state_dict(self) -> dict[str, Any]:
        """epoch, the batches of it that the script has had, and what its order depends on."""
        if self._resumed is not None:
            return dict(self._resumed)
        begun = self._begun or {"epoch": self.epoch, **self._order_now(between=True)}
        return {"seed": self.seed, "batches": self._handed if self._begun else 0, **begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next epoch goes on from there."""
        self.epoch, self.seed = state["epoch"], state["seed"]
        self._begun = {}
        self._resumed = dict(state)
        if self.order is not None and state["generators"] is None:  # between two epochs
            self._put_order(state)
            self._resumed = None

    @contextmanager
    def beginning(self) -> Iterator[tuple[int, int]]:
        """A context in which an epoch's order is drawn: its number, and how many of its batches the script has had. Draws of a resumed one
        are those that it had; the script's own generators are restored."""
        resumed, self._resumed = self._resumed, None
        now = resumed or {"batches": 0, "epoch": self.epoch, **self._order_now(between=False)}
        self._begun = {key: now[key] for key in ("epoch", "generators", "held", "sampler")}
        self._handed = now["batches"]
        self.epoch = now["epoch"] + 1
        if resumed is None:
            yield now["epoch"], 0
            return
        self._put_order(resumed)
        if resumed["generators"] is None:
            yield now["epoch"], now["batches"]
            return
        with preserved_draws():
            put_generators(_as_told(resumed["generators"]))
            yield now["epoch"], now["batches"]

    def hand(self) -> None:
        """The script has the next batch."""
        self._handed += 1

    def end(self) -> None:
        """The epoch has no more."""
        self._begun = {}

    def _put_order(self, state: Mapping[str, Any]) -> None:
        put_states(held_generators(self.order), state["held"])
        if state["sampler"] is not None:
            self.order.load_state_dict(state["sampler"])

    def _order_now(self, *, between: bool) -> dict[str, Any]:
        """between: two epochs, where the generators that all draw from are the script's to restore."""
        is_stream = self.order is None
        return {
            "generators": None if between or is_stream else _told(generators()),
            "held": states_of(held_generators(self.order)),
            "sampler": self.order.state_dict() if hasattr(self.order, "state_dict") else None,
        }


def states_of(found: Mapping[str, Generator]) -> dict[str, Any]:
    """The states of generators by name, of which arrays are lists: `torch.load` reads them with weights only."""
    return {name: _told(_state(each)) for name, each in found.items()}


def put_states(found: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Go on with the draws that follow these states."""
    for name, generator in found.items():
        if name not in states:
            continue
        if isinstance(generator, numpy.random.Generator):
            generator.bit_generator.state = states[name]
        elif isinstance(generator, random.Random):
            generator.setstate(_tuples(states[name]))
        else:
            generator.set_state(states[name])


def _state(generator: Generator) -> Any:
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _told(state: Any) -> Any:
    return tree_map(lambda each: each.tolist() if isinstance(each, numpy.ndarray) else each, state)


def _as_told(states: Any) -> tuple[torch.Tensor, Any, Any]:
    return states[0], _tuples(states[1]), tuple(states[2])


def _tuples(state: Any) -> Any:
    """As `random` wants it; a file may have made lists of them."""
    return tuple(tuple(each) if isinstance(each, list) else each for each in state)
