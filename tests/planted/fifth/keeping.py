"""Bugs of averages, of copies that ranks share, and of what is saved and resumed."""

from __future__ import annotations

from tests.planted.fifth.listing import edit

edit(
    "average_stays",
    "optimizer/averages.py",
    old="own = [each.read().clone() for each in slices]",
    new="own = [each.read() for each in slices]",
    job="small_jobs/wide_rows:averaged",
    plan="dp=2",
    truth=(
        "After an evaluation the averages stay in place of the parameters, because no copy of "
        "these was kept: training goes on from the averages."
    ),
    says="averages stay in place of parameters",
)

edit(
    "average_unseen",
    "optimizer/averages.py",
    old=("        _set(slices, [each.tensor.data for each in self.held])\n        yield from self.publish()"),
    new=("        _set(slices, [each.tensor.data for each in self.held])\n        yield"),
    job="small_jobs/wide_rows:averaged",
    plan="dp=2,zero=1",
    truth=(
        "For an evaluation each replica puts only the averages of its own slices in place of "
        "parameters; they are not published, so it evaluates a mixture of averages and "
        "parameters."
    ),
    says="averages that other ranks keep do not come in their place",
    module="inp",
)

edit(
    "first_average_loaded",
    "optimizer/averages.py",
    old=("            self._start()\n        load_copies("),
    new=("            self._start()\n            load_copies("),
    job="small_jobs/wide_rows:averaged",
    plan="dp=2",
    devices="cpu",
    truth=(
        "On resuming only the first parameter's average is loaded from the checkpoint; the others start anew."
    ),
    says="optimizer/mid.weight/average of the parameter has other values",
)

edit(
    "frozen_not_copied",
    "exchange/shared.py",
    old="            if number % group.size == group.rank:",
    new="            if number == group.rank:",
    job="small_jobs/frozen_pairs:job",
    plan="dp=2",
    devices="cpu",
    truth=(
        "In the one copy for all replicas only as many frozen parameters as there are replicas "
        "get their values; the others (those of b) stay zero."
    ),
    says=(
        "b.weight, b.bias had other values on the ranks than on one device before the first step: "
        "they are zeros there, as ranks are not given what is built"
    ),
    module="b",
)

edit(
    "slice_from_zero",
    "exchange/shared.py",
    old="                    within = start - entry.start, stop - entry.start",
    new="                    within = 0, stop - start",
    job="small_jobs/wide_rows:by_momentum",
    plan="dp=2",
    devices="cpu",
    truth=(
        "Of a parameter that lies across two ranks' shares of the shared copy, the second rank "
        "fills its part with the values of the parameter's beginning: wrong initial values."
    ),
    says=(
        "some of their elements are right, so that ranks are not given what is built, or a part "
        "of it is in another place"
    ),
    module="mid",
)

edit(
    "borrowed_not_averaged",
    "replica/metrics.py",
    old=(
        "        replica.updating = replica.plan.dp > 1  # until what this rank does not own is back, too\n        try:\n"
        "            yield from replica.engine.refresh_borrowed()\n"
    ),
    new="        replica.updating = replica.plan.dp > 1\n        try:\n",
    job="small_jobs/tied_texts:averaged",
    plan="pp=2",
    truth=(
        "In an evaluation of averages the borrower of a tied parameter (the head in the last "
        "stage) keeps the parameter itself: the average is not lent."
    ),
    says="emb.weight of the stage of rank 1 along pp, which borrows it, is another value than on rank 0, which owns it",
    module="emb",
)

edit(
    "average_not_loaded",
    "optimizer/optimizer_state.py",
    old="                self.averages.load(path, shape, read) if self.averages else None\n",
    new="                pass\n",
    job="jobs/growing_batches:job",
    plan="dp=2",
    truth=(
        "The averages of parameters are not restored from a checkpoint; they start anew from the parameters."
    ),
    says="optimizer/head.weight/average of the parameter is lost",
)

edit(
    "loss_scale_not_restored",
    "replica/replica_state.py",
    old="replica.sums.scale = LossScale.from_dict(checkpoint.values[SCALE])",
    new="replica.sums.scale = LossScale()",
    job="jobs/tied_halves:overflowing",
    plan="dp=2,precision=fp16-mixed",
    truth=(
        "After resuming the loss scale of float16 begins anew at 65536 instead of that of the checkpoint."
    ),
    says="loss_scale.scale is 65536.0 instead of 256.0",
)

edit(
    "rates_not_restored",
    "optimizer/state_pieces.py",
    old="        for key, value in from_json(values).items():\n",
    new=(
        "        for key, value in from_json(values).items():\n"
        '            if key == "lr":\n'
        "                continue\n"
    ),
    job="jobs/grouped_heads:job",
    plan="dp=2",
    truth="Learning rates of the optimizer's groups are not restored from a checkpoint.",
    says="updater.optimizers[0].groups[0].lr is 0.005 instead of 0.00499229333433282",
)

edit(
    "second_schedule_not_restored",
    "optimizer/optimizer_state.py",
    old='            for scheduler, saved in zip(self._schedulers, values["schedulers"], strict=True):',
    new='            for scheduler, saved in zip(self._schedulers[:1], values["schedulers"], strict=False):',
    job="jobs/growing_batches:job",
    plan="dp=2",
    truth=(
        "Only the first scheduler's state is restored from a checkpoint; the second (StepLR) "
        "begins at step 0."
    ),
    says="updater.schedulers[1].last_epoch is 0 instead of 2",
)

edit(
    "attributes_not_restored",
    "replica/replica_state.py",
    old=("        finish_updater()\n        finish_left()\n"),
    new="        finish_updater()\n",
    job="jobs/flowing:job",
    plan="dp=2",
    truth="Numbers that forwards leave in attributes (calls) are not restored from a checkpoint.",
    says="calls is None instead of 1",
)
