"""Bugs in checkpoints and resuming."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

SIXTH.edit(
    "loss_scale_under_another_name",
    "replica/replica_state.py",
    old="scaling = {} if scale is None else {SCALE: scale.to_dict()}",
    new='scaling = {} if scale is None else {"scale": scale.to_dict()}',
    job="coarse:job",
    plan="dp=2,zero=1,precision=fp16-mixed",
    truth="The loss scale is saved under a name that resuming does not look for, so a resumed run begins with the first scale and skips steps once more.",
    says="The loss scale is not in the checkpoint",
    module=None,
)
SIXTH.edit(
    "averages_not_resumed",
    "optimizer/optimizer_state.py",
    old="self.averages.load(path, shape, read) if self.averages else None",
    new="self.averages.load(path, shape, read) if self.averages and self.averages.started else None",
    job="letters:averaged",
    plan="dp=2,microbatches=2,zero=1",
    truth="A resumed run leaves out the averages of parameters, which begin anew.",
    says="average of the parameter is lost",
    module=None,
)
SIXTH.edit(
    "by_metric_keeps_nothing",
    "core/moments/by_metric.py",
    old="        return self.scheduler.state_dict()",
    new="        return {}",
    job="shopping:job",
    plan="dp=2,zero=1",
    truth="A scheduler that goes by a metric is saved without its state, so a resumed run has forgotten the best value.",
    says="factor in scheduler 1 is not in the checkpoint",
    module=None,
)
