"""Bugs in clipping, updates, averages and frozen parameters."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

_COUNTED = "        turn.evaluations += 1\n"
_CLIPPED = """        if turn.clip_grad_norm is not None:
            over_tp = self._shards.group if self._counted is not None else None
            norm = yield from clip(
                gradients,
                turn.clip_grad_norm,
                self._exchange.owners,
                self._device,
                holders=[group for group in (over_tp, self._stages) if group is not None],
                counted=self._counted,
            )
        for target, gradient in zip(parts.targets, gradients, strict=True):
            if target is not None:
                if (
                    gradient is not None
                    and gradient.shape != target.shape
                    and gradient.layout == torch.strided
                ):
                    gradient = gradient.view(target.shape)
                target.grad = gradient
"""
_FETCHED = """        if parts.from_slices and turn.looks_at_whole:
            yield from parts.from_slices.fetch(gradients)
"""

SIXTH.edit(
    "each_stage_clips_its_own",
    "optimizer/updater.py",
    old="holders=[group for group in (over_tp, self._stages) if group is not None],",
    new="holders=[over_tp] if over_tp is not None else [],",
    job="letters:dropping",
    plan="pp=2,microbatches=3",
    truth="Each stage clips by the norm of its own gradients instead of the whole model's.",
    says="a part of the model is left out, such as parameters that other ranks own",
    module=None,
)
SIXTH.edit(
    "averages_stay_after_evaluation",
    "optimizer/averages.py",
    old="own = [each.read().clone() for each in slices]",
    new="own = [each.read() for each in slices]",
    job="letters:averaged",
    plan="dp=2,microbatches=2,zero=1",
    truth="What is put back after an evaluation of averages is no copy, so training goes on from the averages.",
    says="averages stay in place of parameters",
    module=None,
)
SIXTH.edit(
    "frozen_get_zeros",
    "core/losses/frozen.py",
    old="return [None if name in frozen else each for name, each in zip(names, gradients, strict=True)]",
    new="return [each.zero_() if name in frozen and each is not None else each for name, each in zip(names, gradients, strict=True)]",
    job="coarse:thawing",
    plan="pp=2,microbatches=2",
    truth="Frozen parameters have gradients of zeros instead of none, so optimizers count their steps and move them by momentum.",
    says="a gradient under the plan and none on one device, as the job freezes it in this step",
    module="two",
)
SIXTH.edit(
    "whole_gradients_before_clipping",
    "optimizer/updater.py",
    old=_COUNTED + _CLIPPED + _FETCHED,
    new=_COUNTED + _FETCHED + _CLIPPED,
    job="pupils:whole",
    plan="dp=2,zero=2",
    truth="Optimizers of whole parameters get gradients as they were before clipping.",
    says="the checkpoint itself differs from one device: mean of inside.weight",
    module=None,
)
