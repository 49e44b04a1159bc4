"""Reports gradients to the exchange once they are complete on ranks that share a replica's parameters, and makes those alike that
several ranks have computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from meshloom.comm.pieces import place
from meshloom.core.job import NamedParameters
from meshloom.exchange.exchange import Exchange, Ready
from meshloom.parameters.pipeline_ownership import PipelineOwnership
from meshloom.parameters.shards import Shards
from meshloom.replica.team_sums import TeamSums


class GradientCompletion:
    """Of the parameters that this rank updates, `owned`:

    used by one rank along pp        with the last backward that uses it
    used by several                  once the other ranks' gradients have come to the owner
    in `summed`, used in parts       once they are summed over tp
    """

    def __init__(
        self,
        owned: NamedParameters,
        ownership: PipelineOwnership,
        shards: Shards,
        summed: Sequence[str],
        hook: Callable[[nn.Parameter], Ready | None],
    ) -> None:
        lent, in_parts = set(ownership.lent), set(summed)
        self._lends = bool(lent)
        self.completes_late = bool(lent or in_parts)  # whether `finish` has something to do
        self._ownership, self._shards = ownership, shards
        self._hooks = {id(each): ready for _, each in owned if (ready := hook(each)) is not None}
        self._summed = [(name, each) for name, each in owned if name in in_parts]
        self._lent = [each for name, each in owned if name in lent and name not in in_parts]
        self._at_once = [
            each
            for name, each in owned
            if name not in lent and name not in in_parts and id(each) in self._hooks
        ]
        # id of a parameter -> to call when the last backward that uses it has ended
        self.ready: Mapping[int, Ready] = {id(each): self._hooks[id(each)] for each in self._at_once}

    def watch(self, accumulated: Ready) -> ExitStack:
        """From now on `accumulated` hears of additions to gradients that backward completes. Closing what is
        returned ends it."""
        undo = ExitStack()
        for parameter in self._at_once:
            undo.callback(parameter.register_post_accumulate_grad_hook(accumulated).remove)
        return undo

    def finish(
        self,
        parameters: Mapping[str, nn.Parameter],
        add_up: Callable[[Tensor], None],
        *,
        computed: bool,
    ) -> None:
        """After the backwards. parameters: all that this rank holds. add_up: over tp. computed: whether the
        replica had chunks."""
        if self._lends:
            self._ownership.return_gradients(parameters)
            self._tell(self._lent)
        if computed and self._summed:
            found = [(name, each.grad) for name, each in self._summed if each.grad is not None]
            sum_over_tp(found, self._shards, add_up)
            self._tell([each for _, each in self._summed])

    def _tell(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and (ready := self._hooks.get(id(parameter))):
                ready(parameter)


def sum_over_tp(
    summed: Sequence[tuple[str, Tensor]], shards: Shards, add_up: Callable[[Tensor], None]
) -> None:
    """Add up over tp in place, in one flat all-reduce, the gradients of what several ranks used, each for its part.

    What some of them hold in parts (key/value heads that two ranks share) is added up in its place in the
    whole.
    """
    for dtype in sorted({gradient.dtype for _, gradient in summed}, key=str):
        mine = [(name, gradient) for name, gradient in summed if gradient.dtype == dtype]
        whole = [
            place(shards.pieces[name], shards.rank, gradient) if name in shards.pieces else gradient
            for name, gradient in mine
        ]
        flat = torch.cat([each.reshape(-1) for each in whole])
        add_up(flat)
        for (name, gradient), each, part in zip(
            mine, whole, flat.split([each.numel() for each in whole]), strict=True
        ):
            gradient.copy_(shards.take(name, part.view(each.shape)))


def made_alike(
    team_sums: TeamSums, replicated: Sequence[str], exchange: Exchange, gradients: list[Tensor | None]
) -> list[Tensor | None]:
    """The averaged gradients, of what this rank owns, with those of the first of the replica's ranks that hold the same. They update it each by
    itself, and would drift apart where their gradients have other last bits. replicated: names of what several ranks hold."""
    held = set(replicated)
    names = (each.name for each in exchange.ownership.owned)
    same = [each for name, each in zip(names, gradients, strict=True) if name in held]
    team_sums.alike(same)
    return gradients
