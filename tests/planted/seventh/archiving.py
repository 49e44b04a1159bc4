"""Bugs in checkpoints."""

from __future__ import annotations

from tests.planted.seventh import SEVENTH

SEVENTH.edit(
    "state_of_whole_parameters_on_rank_0",
    "optimizer/assignment.py",
    old="        first = along_dp[0] == here and along_tp[0] == shards.rank\n",
    new="        first = here == 0 and shards.rank == 0\n",
    job="mlp:whole",
    plan="dp=2,zero=1",
    truth=(
        "Only rank 0 saves the optimizer's state of parameters that one rank keeps whole, so those that rank 1 keeps (all but mid.weight) "
        "go on without state after a resume."
    ),
    says="with no state of the steps before",
    module="inp",
)
SEVENTH.edit(
    "first_columns_written_in_a_row",
    "checkpoint/writing/parallel.py",
    old="        if not single and (start, stop) != (0, size):\n",
    new="        if not single and start:\n",
    job="mlp:plain",
    plan="tp=2,tp_placements=inp:column+mid:row+out:replicated",
    truth=(
        "The first rank's columns of a matrix (mid.weight, divided by rows of its input) are written to a checkpoint one after another, as "
        "if they were whole rows: after a resume that layer is wrong."
    ),
    says="the checkpoint itself differs from one device: mid.weight",
    module="mid",
)
SEVENTH.edit(
    "last_replicas_copy_is_awaited",
    "train/run_checkpoints.py",
    old="            replica.before_update = partial(self._finish_copy, replica.context.rank)\n",
    new="            replica.before_update = lambda: self._finish_copy(replica.context.rank)\n",
    job="mlp:background",
    plan="dp=2,zero=1",
    truth=(
        "With a save in the background every replica's update waits for the copy of the last one, so the first replica's slices of the "
        "optimizer's state may be saved after the next update."
    ),
    says="What is copied for the thread that writes is something else",
    module=None,
)
SEVENTH.edit(
    "averages_start_anew_with_each",
    "optimizer/averages.py",
    old=(
        "        if not self.started:\n"
        "            self._start()\n"
        "        load_copies(self.held, path, shape, read, AVERAGE)\n"
    ),
    new=("        self._start()\n        load_copies(self.held, path, shape, read, AVERAGE)\n"),
    job="mlp:averaged",
    plan="dp=2",
    truth=(
        "Each average that is read from a checkpoint starts all others anew from the parameters, so after a resume all but the last one are"
        " the parameters' values."
    ),
    says="optimizer/inp.bias/average of the parameter has other values",
    module=None,
)
