"""What replicas have parts of is gathered to compute with; the backward of it is the mean over replicas of the whole gradient, of which each keeps its
part."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.loops.flat_parts import gathered, reduced_to_parts
from meshloom.loops.gradient_mean import refuse_graph_of_means
from meshloom.loops.part_place import PartPlace
from meshloom.loops.part_tensor import PartParameter, plain


class Gatherer:
    """Of the replicas in `group`. keeps: what is gathered, until it changes."""

    def __init__(self, group: Group, *, keeps: bool) -> None:
        self.group, self.keeps, self.reductions = group, keeps, 0
        self.kept: dict[nn.Parameter, tuple[int, Tensor]] = {}  # by version
        self.again: tuple[Gathering, list[Tensor]] | None = None  # what a backward reads


class Gathering:
    """One gathering of parameters, for one forward, whose gradients count `weight`."""

    def __init__(self, owner: Gatherer, parameters: Sequence[nn.Parameter], weight: float = 1.0) -> None:
        self.owner, self.parameters, self.weight = owner, parameters, weight
        self.versions = [each._version for each in parameters]
        self._storages: dict[int, int] = {}

    def with_graph(self) -> Sequence[Tensor]:
        """Of each parameter; the backward leaves each replica its part of the mean of gradients."""
        return cast(Any, _Gather).apply(self, *map(plain, self.parameters))

    @torch.inference_mode(False)  # training reads what an evaluation has gathered
    @torch.no_grad()
    def wholes(self) -> list[Tensor]:
        """The same without a graph."""
        found = [plain(each.detach()) for each in self.parameters]
        kept = self.owner.kept
        missing = [
            i for i, (each, version) in enumerate(zip(self.parameters, self.versions, strict=True))
            if isinstance(each, PartParameter) and kept.get(each, (None,))[0] != version
        ]  # fmt: skip
        places = [rows_of(self.parameters[i]) for i in missing]
        new = dict(zip(missing, gathered([found[i] for i in missing], places), strict=True))
        wholes = [new[i] if i in new else kept[each][1] if each in kept else found[i] for i, each in enumerate(self.parameters)]  # fmt: skip
        if self.owner.keeps:
            kept |= {self.parameters[i]: (self.versions[i], each) for i, each in new.items()}
        return wholes

    def reduced(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The parts of the mean over replicas."""
        self.owner.reductions += 1
        if self.owner.again is not None and self.owner.again[0] is self:
            self.owner.again = None
        results: list[Tensor | None] = [None] * len(self.parameters)
        trained = [i for i, each in enumerate(self.parameters) if each.requires_grad]
        parts = [i for i in trained if isinstance(self.parameters[i], PartParameter)]
        places = [rows_of(self.parameters[i]) for i in parts]
        local = [plain(self.parameters[i].detach()) for i in parts]
        for i, each in zip(
            parts, reduced_to_parts([gradients[i] for i in parts], local, places, self.weight), strict=True
        ):
            results[i] = each
        for i in (i for i in trained if i not in parts):
            gradient, like = gradients[i], self.parameters[i].detach()
            both = torch.stack([torch.zeros_like(like) if gradient is None else gradient * self.weight, like.new_tensor(gradient is not None)])  # fmt: skip
            self.owner.group.all_reduce(both, "avg").wait()
            results[i] = both[0].clone() if both[1] else None
        return results

    @contextmanager
    def freed(self, wholes: Collection[Tensor]) -> Iterator[None]:
        """A context in which what autograd keeps of `wholes` is their place: a backward gathers them once more."""
        outer = cast(Any, torch)._C._autograd._top_saved_tensors_default_hooks(False)
        keep, read = outer or ((lambda tensor: tensor), (lambda kept: kept))
        self._storages = {each.untyped_storage().data_ptr(): i for i, each in enumerate(wholes)}

        def pack(tensor: Tensor) -> Any:
            if tensor.layout != torch.strided:
                return keep(tensor)
            i = self._storages.get(tensor.untyped_storage().data_ptr())
            if i is None or tensor.dtype != self.parameters[i].dtype or not tensor.numel():
                return keep(tensor)
            return _SavedView(i, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        def unpack(kept: Any) -> Tensor:
            if not isinstance(kept, _SavedView):
                return read(kept)
            return self._read(kept.parameter).as_strided(kept.shape, kept.stride, kept.offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            try:
                yield
            finally:
                self._storages = {}

    def _read(self, index: int) -> Tensor:
        if self.owner.again is None or self.owner.again[0] is not self:
            for each, version in zip(self.parameters, self.versions, strict=True):
                if each._version != version and isinstance(each, PartParameter):
                    raise each.place.refusal("A change in place, between a forward and its backward,")
            self.owner.again = None  # one at a time
            self.owner.again = (self, self.wholes())
        return self.owner.again[1][index]


class _SavedView(NamedTuple):
    parameter: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.gathering = gathering
        ctx.set_materialize_grads(False)
        wholes = tuple(each.detach() for each in gathering.wholes())
        frozen = [whole for whole, part in zip(wholes, parts, strict=True) if not part.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return wholes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_graph_of_means()
        return None, *ctx.gathering.reduced(gradients)


def rows_of(parameter: nn.Parameter) -> PartPlace:
    """Which replica has what."""
    place = cast(PartParameter, parameter).place.rows
    assert place is not None, "replicas divide it"
    return place
