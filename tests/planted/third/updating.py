"""Bugs of updates: norms, schedules, groups, averages."""

from __future__ import annotations

import torch

from tests.planted.third.planting import DIVIDED, Planter, bug


@bug("wide", "dp=2", causes="clipping")
def norm_without_tail(p: Planter) -> None:
    """The gradient's norm leaves out what is over of each gradient after whole blocks of 1,024 elements: it is too small, so too little is clipped."""
    from meshloom.optimizer import clipping

    p.wrap(clipping, "_block_norms", lambda original: lambda gradient: original(gradient)[:1])


@bug("gpt", DIVIDED, causes="clipping")
def norm_counts_copies(p: Planter) -> None:
    """The gradient's norm counts what is replicated along tp once per rank: too large, so too much is clipped."""
    from meshloom.optimizer import updater

    p.set(updater, "_counted_here", lambda owned, shards, device: [True for _ in owned])


@bug("gpt", "pp=2,microbatches=2", causes="clipping")
def norm_of_stage(p: Planter) -> None:
    """Each stage clips by the norm of its own gradients: stages are scaled differently."""
    from meshloom.optimizer import updater

    def make(original):
        def clip(gradients, largest, owners, device, *, holders=(), counted=None):
            return original(gradients, largest, owners, device, holders=(), counted=counted)

        return clip

    p.wrap(updater, "clip", make)


@bug("residual", "dp=2,zero=1", causes="clipping")
def norm_of_slice(p: Planter) -> None:
    """Each owner clips by the norm of its own slices."""
    from meshloom.optimizer import updater

    def make(original):
        def clip(gradients, largest, owners, device, *, holders=(), counted=None):
            return original(gradients, largest, None, device, holders=holders, counted=counted)

        return clip

    p.wrap(updater, "clip", make)


@bug("residual", "dp=2", causes="optimizer")
def second_schedule_twice(p: Planter) -> None:
    """The scheduler of the second optimizer is stepped twice in each step."""
    from meshloom.optimizer.updater import Updater

    def make(original):
        def update(self, *args, **kwargs):
            norm = yield from original(self, *args, **kwargs)
            for each in self._turn.schedulers[1:]:
                each.step()
            return norm

        return update

    p.wrap(Updater, "update", make)


@bug("gpt", "dp=2", causes="optimizer")
def schedule_before_step(p: Planter) -> None:
    """Schedulers are stepped before the optimizer: each update has the next step's learning rate."""
    from meshloom.optimizer.updater import Updater

    def make(original):
        def update(self, *args, **kwargs):
            turn, schedulers = self._turn, self._turn.schedulers
            for each in schedulers:
                each.step()
            turn.schedulers = []
            try:
                return (yield from original(self, *args, **kwargs))
            finally:
                turn.schedulers = schedulers

        return update

    p.wrap(Updater, "update", make)


@bug("gpt", "dp=2,zero=1", causes="optimizer", module="blocks.1.down")
def groups_by_slice_ndim(p: Planter) -> None:
    """Slices are flat, and groups are made anew by ndim: parameters of which an owner has a part only land in the group without weight decay."""
    from meshloom.optimizer import assignment

    def make(original):
        def replaced(optimizer, by):
            held = original(optimizer, by)
            if len(optimizer.param_groups) == 2:
                one, two = optimizer.param_groups
                moving = [each for each in one["params"] if each.ndim == 1]
                one["params"][:] = [each for each in one["params"] if each.ndim != 1]
                two["params"].extend(moving)
            return held

        return replaced

    p.wrap(assignment, "_replace", make)


@bug("averaged", "dp=2,zero=1", causes="averages")
def average_before_step(p: Planter) -> None:
    """The average of the parameters is updated with those of before the step."""
    from meshloom.optimizer.averages import ParameterAverages

    def make(original):
        def update(self):
            now = [each.data().clone() for each in self._exchange.owned]
            before = self.__dict__.get("_before", now)
            self._before = now
            if not self.started:
                self._start()
            elif now:
                torch._foreach_lerp_([each.tensor.data for each in self.held], before, 1 - self._decay)

        return update

    p.wrap(ParameterAverages, "update", make)


@bug("frozen", "dp=2", causes="None_or_zero", module="blocks.1")
def frozen_a_step_early(p: Planter) -> None:
    """Which parameters are frozen is looked up for the next step: they are frozen a step early and thawed a step early."""
    from meshloom.core.losses.frozen import FrozenParameters

    p.wrap(FrozenParameters, "at", lambda original: lambda self, step: original(self, step + 1))


@bug("adafactor", "dp=3,zero=1", causes="clipping", says="is given other gradients")
def flag_read_as_gradient(p: Planter) -> None:
    """A keeper of whole parameters takes the flag before a later owner's slice for its first element, so gradients of that slice are shifted by one."""
    from meshloom.optimizer.full_from_slices import FullFromSlices, _flagged

    def fetch(self, gradients):
        yield from self.prepare()
        found = {part: gradients[at] for part, at in zip(self._mine, self._positions, strict=True)}
        received = yield from self._move(
            self._sent,
            lambda part: _flagged(found[part], part.length, self._parameters[part.parameter]),
            num_extra=1,
        )
        for part, flagged in received:
            parameter = self._parameters[part.parameter]
            if part.start == 0:
                parameter.grad = torch.zeros_like(parameter.detach(), memory_format=torch.contiguous_format)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter.detach(), memory_format=torch.contiguous_format)
            parameter.grad.view(-1)[part.start : part.stop] = flagged[1:] if part.start == 0 else flagged[:-1]
        if self._only_slices:
            yield from self._fetch_values()

    p.set(FullFromSlices, "fetch", fetch)


@bug(
    "mqa",
    "tp=2,tp_placements=blocks.*.attention.q:column+blocks.*.attention.out:row",
    causes="scale",
    module="norm",
)
def shared_heads_averaged(p: Planter) -> None:
    """Gradients of key and value heads that ranks along tp share are averaged over them instead of summed."""
    from meshloom.replica import gradient_completion

    def make(original):
        def sum_over_tp(summed, shards, add_up):
            def halved(flat):
                yield from add_up(flat)
                flat.div_(shards.size)

            yield from original(summed, shards, halved)

        return sum_over_tp

    p.wrap(gradient_completion, "sum_over_tp", make)


@bug("gan", "dp=2", causes="clipping", module="critic.0")
def clip_of_other_loss(p: Planter) -> None:
    """Of two losses the first is clipped by the limit of the second, which has none."""
    from meshloom.optimizer import updater

    def make(original):
        def by_loss(job, user, *, divided):
            found = original(job, user, divided=divided)
            if len(found) == 2:
                found[0].clip_grad_norm = found[1].clip_grad_norm
            return found

        return by_loss

    p.wrap(updater, "_by_loss", make)


@bug("residual", "dp=2,precision=bf16", causes="rounding")
def masters_truncated(p: Planter) -> None:
    """Parameters become their masters truncated to bfloat16, not rounded to nearest."""
    from meshloom.optimizer.bfloat16.masters import Masters

    def publish(self):
        for master, slice_ in self.copies():
            value = master.data().float().view(torch.int32).bitwise_and(-65536).view(torch.float32)
            into = slice_.parameter.data if slice_.kept is None and slice_.is_full else slice_.data()
            into.copy_(value.view(into.shape))

    p.set(Masters, "publish", publish)


@bug("gentle", "dp=2", causes="clipping")
def clip_scales_up(p: Planter) -> None:
    """Gradients whose norm is below the limit are scaled up to it."""
    from meshloom.optimizer import updater

    def make(original):
        def clip(gradients, largest, owners, device, **rest):
            norm = yield from original(gradients, largest, owners, device, **rest)
            if norm < largest:
                for each in gradients:
                    if each is not None:
                        each.mul_(largest / (norm + 1e-6))
            return norm

        return clip

    p.wrap(updater, "clip", make)


@bug("plateau", "dp=2")
def plateau_a_step_late(p: Planter) -> None:
    """ReduceLROnPlateau is stepped with the loss of the step before."""
    from meshloom.optimizer.updater import Updater

    def make(original):
        def update(self, gradients, loss, **rest):
            before = self.__dict__.get("_loss_before", loss)
            self._loss_before = loss
            return (yield from original(self, gradients, before, **rest))

        return update

    p.wrap(Updater, "update", make)
