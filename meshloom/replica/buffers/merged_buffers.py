"""Buffers stay equal on all replicas: every chunk reads them as the step found them, and what chunks leave is merged.

What each replica's chunks leave is gathered once a step and merged in chunk order on every replica, in the same
arithmetic, so that the results have the same bits. Of torch's norm layers that is what one device has that runs all
chunks in order; of other buffers it is what the job declares (docs/contract.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from meshloom.comm.group import Group
from meshloom.core.buffer_rules import BufferRule, rule_of
from meshloom.core.device.readback import Readback, Readbacks, on_device
from meshloom.core.errors import JobError
from meshloom.core.modules.named_leaves import is_within, modules_of
from meshloom.program.ir.written_parameters import named_buffers
from meshloom.replica.buffers.declared_buffers import Decay, DeclaredBuffers, Rule
from meshloom.replica.buffers.norm_statistics import BUFFERS, NormStatistics, is_counter, norm_buffers, tracks
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class RunningStatistics:
    """The buffers of `model` over a training step.

    group: the replicas, in chunk order: replica r runs chunks r * m to r * m + m - 1; None: there is one.
    num_chunks: m. With one chunk a step there is nothing to do but for rules that are functions; without any buffers
    nothing is communicated. One replica's running statistics follow each other by themselves.
    synchronised: microbatch j of all replicas is one chunk, and batch norm layers see to their own statistics.
    rules: of the job. merges: whether there is anything to do. changing: where a program runs instead of the layers' own forwards, the buffers that it changes, and the
        only ones here; decays: of its running statistics, the share that a chunk keeps. opaque: the paths of
        modules whose own forwards the program runs. compiled: layers' forwards are compiled.
    """

    def __init__(
        self, model: nn.Module, group: Group | None, *, num_chunks: int = 1, synchronised: bool = False, rules: Mapping[str, BufferRule],
        changing: Collection[str] | None = None, decays: Mapping[str, float] | None = None, opaque: Collection[str] = (), compiled: bool = False,
    ) -> None:  # fmt: skip
        self._group = group if group is not None and group.size > 1 else None
        self._joined = synchronised
        known = decays or {}

        def is_opaque(name: str) -> bool:
            return any(is_within(name, path) for path in modules_of(opaque))

        def is_declared(path: str) -> bool:
            return any(rule_of(f"{path}.{key}" if path else key, rules) is not None for key in BUFFERS)

        def rule(name: str) -> Rule | None:
            if (declared := rule_of(name, rules)) is not None:
                return declared
            if name in known:
                return Decay(known[name])
            # of joined chunks each replica counts a part
            return "sum" if is_counter(model, name) and not synchronised else None

        layers = [
            (name, module)
            for name, module in model.named_modules()
            if tracks(module)
            and not is_declared(name)
            and ((changing is None and not synchronised) or is_opaque(name))
        ]
        own = [module for module in model.modules() if isinstance(module, _BatchNorm)] if synchronised else []
        self._norms = NormStatistics(layers if self._group else [], compiled=compiled)
        handled = norm_buffers([module for _, module in layers] + own)
        here: list[str] = []
        if changing is not None:
            if not self._group:  # they follow each other
                changing = {
                    each for each in changing if each not in known or rule_of(each, rules) is not None
                }
            here = [name for name, each in named_buffers(model) if not each.is_meta and is_opaque(name)]
        alone = num_chunks * (self._group.size if self._group else 1) == 1
        self._others = DeclaredBuffers(
            model, handled, rule, num_chunks=num_chunks, alone=alone, changing=changing, perhaps=here
        )
        if synchronised:
            _check_joined(self._others.declared)
        self.merges = self._others.length > 0 or (not alone and self._norms.length > 0)
        self._moved = 0  # elements gathered so far because some buffer changed
        self._notes: list[str] = []
        self._noted: set[str] = set()
        tensors = (*model.buffers(), *model.parameters())
        self._device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
        self._readbacks = Readbacks(self._device)
        self._evaluated: Readback | None = None

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Around one chunk's forward and backward; this replica's chunks in order."""
        if not self.merges:
            yield
            return
        with self._others.collecting(), self._norms.collecting():
            yield

    def finish(self, *, alike: bool = False) -> None:
        """After the step's last chunk: bring every replica's buffers to one device's values. alike: replicas have run the same chunks, which count once."""
        if not self.merges:
            return
        self._note_evaluated()  # of the step before
        facts = on_device(self._others.facts(), torch.int64, self._device)
        statistics = self._norms.take().to(self._device).view(torch.int64)
        replicas = 1 if alike else None
        parts = self._gather(torch.cat([statistics, facts]))[:replicas]
        split = self._norms.length
        if split:
            with torch.no_grad():
                headers = self._norms.apply(parts[:, :split].contiguous().view(torch.float64))
            self._evaluated = self._readbacks.read(headers)
            if not self._evaluated.waits:
                self._note_evaluated()
        undeclared = self._others.agree(parts[:, split:].tolist() if self._others.length else [])
        if undeclared:
            self._note(_undeclared(undeclared, joined=self._joined))
        moving, maps = self._others.moving_length, parts[:, :0]
        self._moved += moving
        if moving:
            maps = self._gather(self._others.take())[:replicas]
        self._others.apply(maps)

    def take_notes(self) -> list[str]:
        """What the user should be told, each once; empties the list. What layers did in a step on a GPU is told after the
        next one: nobody waits for it."""
        notes, self._notes = self._notes, []
        return notes

    def expected_bytes(self) -> ExpectedBytes:
        """Of `finish`. Which buffers change is known once they have."""
        if not self.merges or self._group is None:
            return ExpectedBytes()
        always, moved = (
            Traffic.along("dp", all_gather=8 * length)
            for length in (self._norms.length + self._others.length, self._moved)
        )
        return ExpectedBytes(per_step=always, so_far=moved)

    def _gather(self, part: Tensor) -> Tensor:
        """All replicas' `part` [n], as [replicas, n]."""
        if self._group is None:
            return part.view(1, -1)
        everyone = part.new_empty(self._group.size * len(part))
        self._group.all_gather(everyone, part).wait()
        return everyone.view(self._group.size, -1)

    def _note_evaluated(self) -> None:
        headers, self._evaluated = self._evaluated, None
        for name in self._norms.evaluated(headers.values()) if headers else ():
            self._note(
                f"{name} ran in evaluation mode within a training step, where it reads running statistics of before the step, "
                "not of the chunk before."
            )

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._notes.append(text)


def _undeclared(names: list[str], *, joined: bool) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    which = "chunk" if not joined else "chunk's last replica"
    return (
        f"Of {', '.join(names[:3])}{more} a step keeps what its last {which} left. Another rule is said by the job, like "
        f'Job(buffers={{"{names[0]}": "sum"}}) or ml.ema(0.99) (docs/contract.md).'
    )


def _check_joined(declared: Mapping[str, Rule]) -> None:
    """Raise `JobError` for a rule that parts of a chunk do not have."""
    for name, rule in declared.items():
        if rule != "last":
            raise JobError(
                f'Job(buffers=...) gives {name} the rule {rule!r}, and with sync_batch_norm each replica sees a part of every chunk. Declare "last", or leave '
                "sync_batch_norm out."
            )
