"""Which ranks along pp hold which parameters and buffers: those whose stages use them.

    embedding      rank 0 owns it      rank 3 borrows it (a tied head)
    blocks.0       rank 0 owns it
    blocks.7                           rank 3 owns it

Every parameter has one owner, which updates it and holds its optimizer state. Other ranks that use it borrow
it: once a step they send their gradients to the owner, which adds them up in rank order, and receive the new
value. So it is clipped, counted and saved once, with any optimizer. On all other ranks only its shape
remains, as a tensor on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group, Work
from meshloom.parameters.model import replace_tensors
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class PipelineOwnership:
    """The owner and the borrowers of each parameter and buffer along pp, as one rank sees them.

    holders: parameter or buffer -> ranks along pp that hold it, the owner first; {}: the only rank holds all. group: the ranks along pp.
    """

    def __init__(self, holders: Mapping[str, tuple[int, ...]], group: Group) -> None:
        self.holders = holders
        self._group = group
        # every name of a tensor in the model -> its name in `holders`
        self._first: dict[str, str] = {}
        self._sent = 0  # bytes

    @property
    def rank(self) -> int:
        """This rank's number along pp."""
        return self._group.rank

    def owns(self, name: str) -> bool:
        """Whether this rank updates and saves it."""
        return not self.holders or self.owner(name) == self.rank

    def owner(self, name: str) -> int:
        """The rank along pp that updates and saves it."""
        return self.holders[self._first.get(name, name)][0]

    @property
    def lent(self) -> list[str]:
        """Names of what several ranks hold, in the same order on all ranks."""
        return [name for name, ranks in self.holders.items() if len(ranks) > 1]

    def release(self, model: nn.Module) -> None:
        """Replaces what this rank does not hold by tensors on the meta device, under all names."""

        def shape_of(names: list[str], tensor: Tensor) -> Tensor | None:
            known = next(name for name in names if name in self.holders)
            self._first.update(dict.fromkeys(names, known))
            return None if self.rank in self.holders[known] else torch.empty_like(tensor, device="meta")

        if self.holders:
            replace_tensors(model, shape_of)

    def return_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Adds the borrowers' gradients to the owners', and clears the borrowers'. parameters: those that
        this rank holds."""
        arriving: list[tuple[Work, Tensor, nn.Parameter]] = []
        sending: list[tuple[Work, Tensor]] = []
        self._sent += sum(
            each.nbytes + each.element_size()
            for name, each in self._lent_here(parameters)
            if not self.owns(name)
        )
        for name, parameter in self._lent_here(parameters):
            for borrower in self.holders[name][1:]:
                if borrower == self.rank:
                    flagged = parameter.new_zeros(parameter.numel() + 1)
                    if parameter.grad is not None:
                        flagged[0] = 1
                        flagged[1:] = parameter.grad.reshape(-1)
                    sending.append((self._group.send(flagged, self.owner(name)), flagged))
                    parameter.grad = None
                elif self.owns(name):
                    received = parameter.new_empty(parameter.numel() + 1)
                    arriving.append((self._group.recv(received, borrower), received, parameter))
        for work, received, parameter in arriving:
            work.wait()
            gradient = received[1:].view(parameter.shape)  # zeros if the borrower has none
            if parameter.grad is None:
                parameter.grad = gradient if received[0] else None  # reads it: waits for the device
            elif parameter.grad.layout == torch.strided:
                parameter.grad.add_(gradient)  # it may be a view of the exchange's bucket
            else:
                parameter.grad = parameter.grad + gradient
        for work, _ in sending:
            work.wait()

    def lend(self, parameters: Mapping[str, nn.Parameter], kept: Mapping[str, Tensor]) -> None:
        """Sends the owners' values to the borrowers. parameters: those that this rank holds. kept: what it
        keeps of them, all or a slice."""
        works: list[tuple[Work, Tensor, Tensor | None]] = []
        for name, tensor in [(name, kept[name].detach()) for name, _ in self._lent_here(parameters)]:
            if not self.owns(name):
                value = tensor.new_empty(tensor.shape)
                works.append((self._group.recv(value, self.owner(name)), value, tensor))
                continue
            value, borrowers = tensor.contiguous(), self.holders[name][1:]
            self._sent += value.nbytes * len(borrowers)
            works += [(self._group.send(value, borrower), value, None) for borrower in borrowers]
        for work, value, tensor in works:
            work.wait()
            if tensor is not None:
                tensor.copy_(value)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes so far: for every `return_gradients` a gradient with a flag to each owner, for every `lend` a
        value to each borrower."""
        return ExpectedBytes(so_far=Traffic.along("pp", send=self._sent))

    def _lent_here(self, parameters: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
        """The trainable parameters that this rank and others hold."""
        return [
            (name, parameters[name])
            for name in self.lent
            if name in parameters and parameters[name].requires_grad
        ]


def held(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors that are not on the meta device."""
    return {name: tensor for name, tensor in tensors if not tensor.is_meta}
