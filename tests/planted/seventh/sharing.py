"""Bugs in how replicas agree on gradients and parameters."""

from __future__ import annotations

from tests.planted.seventh import SEVENTH

SEVENTH.edit(
    "tree_of_whole_logarithm",
    "comm/collectives/tree.py",
    old='    reduce = [move for child in children for move in moved("add", child, 0, num_elements)]\n',
    new='    reduce = [move for child in children[: size.bit_length() - 1] for move in moved("add", child, 0, num_elements)]\n',
    job="mlp:plain",
    plan="dp=3,exchange=tree",
    truth=(
        "The root adds up as many children as the logarithm of the ranks rounded down, so with three ranks all sums (loss, weight, "
        "gradients) lack what the third has."
    ),
    says="All gradients are without the share of replica 2",
    module=None,
)
SEVENTH.edit(
    "server_adds_up_servers_only",
    "exchange/server.py",
    old="            for theirs in pushed[1:]:\n",
    new="            for theirs in pushed[1 : self._num_owners]:\n",
    job="mlp:weighted",
    plan="dp=3,exchange=server,servers=2",
    devices="cpu",
    truth="A server adds up what servers push and leaves out the gradients of the one rank that is only a worker (dp=2), for all parameters.",
    says="All gradients are without the share of replica 2",
    module=None,
)
SEVENTH.edit(
    "zero_one_flags_of_wrong_entries",
    "exchange/slices.py",
    old=(
        "                    self._positions.append((index, start - first, stop - first, number))\n"
        "                number += 1\n"
    ),
    new=(
        "                    self._positions.append((index, start - first, stop - first, number))\n"
        "                    number += 1\n"
    ),
    job="mlp:resting",
    plan="dp=3,zero=1",
    truth=(
        "Entries before a rank's share are not counted, so rank 2 looks up the flag of mid.weight, which is frozen, for its slice of "
        "inp.weight: that slice has no gradient and is not updated."
    ),
    says="mid.bias, out.weight: a gradient on one device and none under the plan",
    module="out",
)
SEVENTH.edit(
    "zero_two_every_round_is_first",
    "exchange/buckets/rounds.py",
    old="        self._started.append(_Round(bucket, flat, out, work, is_first=not bucket.sent))\n",
    new="        self._started.append(_Round(bucket, flat, out, work, is_first=not self._started))\n",
    job="gpt:tokens",
    plan="dp=2,zero=2,microbatches=2,overlap=false",
    truth=(
        "Whether a round is a bucket's first is read from the queue, which overlap=false has emptied, so the second microbatch's sums "
        "overwrite those of the first: its gradients are lost, of all parameters."
    ),
    says="those of each replica's last microbatch alone",
    module=None,
)
SEVENTH.edit(
    "flags_unread_where_any_arrived",
    "exchange/buckets/flags.py",
    old="    if all(here):\n",
    new="    if any(here):\n",
    job="sparse:seldom",
    plan="dp=2,zero=3",
    truth=(
        "A rank on which some gradient has arrived does not look at what others have used, so the layer `rare`, which only the second "
        "replica uses, has no gradient in the slice of the first and is not updated there."
    ),
    says="rare.weight, rare.bias: a gradient on one device and none under the plan",
    module="rare",
)
SEVENTH.edit(
    "bucket_zeroes_what_last_chunk_left_out",
    "exchange/buckets/buckets.py",
    old=("            if not entry.arrived:\n                view.zero_()\n"),
    new=("            if not entry.counted:\n                view.zero_()\n"),
    job="sparse:seldom",
    plan="dp=2,microbatches=2",
    truth=(
        "Before a bucket is sent, the place of a parameter is cleared that has had no gradient in the last microbatch, although it has one "
        "of an earlier: the gradient of `rare` is zero."
    ),
    says="0 times one device's: they are lost. So would be those of",
    module="rare",
)
SEVENTH.edit(
    "sparse_rows_of_last_chunk",
    "exchange/sparse_gradients.py",
    old="                arrived.append(gradient)\n",
    new="                arrived[:] = [gradient]\n",
    job="sparse:rows",
    plan="dp=2,microbatches=2",
    devices="cpu",
    truth="Of a table with sparse gradients only the last microbatch's rows are kept; those of earlier ones are lost.",
    says="those of each replica's last microbatch alone",
    module="table",
)
SEVENTH.edit(
    "round_of_one_step_more",
    "exchange/local_sgd.py",
    old="        if self.settled or not (early or self._taken >= self._local_steps):\n",
    new="        if self.settled or not (early or self._taken > self._local_steps):\n",
    job="gpt:tied",
    plan="dp=2,exchange=local_sgd,microbatches=2",
    truth=(
        "A round ends one step late: after the first step each replica keeps parameters of its own, updated with the gradient of its own "
        "share, and the mean is taken after the second."
    ),
    says="which the mean at the end of a round takes back: it is not taken",
    module=None,
)
SEVENTH.edit(
    "shared_frozen_by_number",
    "exchange/shared.py",
    old="            if number % group.size == group.rank:\n",
    new="            if number == group.rank:\n",
    job="mlp:tuned",
    plan="dp=2",
    devices="cpu",
    truth=(
        "Into the one copy of parameters only as many frozen ones are written as there are ranks: the third and fourth, weight and bias of "
        "`inner`, stay zero."
    ),
    says="they are zeros there, as ranks are not given what is built",
    module="inner",
)
SEVENTH.edit(
    "row_norms_of_own_part",
    "replica/buffers/row_limits.py",
    old='        groups["dp"] = self._exchange.owners if self._exchange.only_slices else None\n',
    new='        groups["dp"] = None  # a rank has all of its rows\n',
    job="sparse:limited",
    plan="dp=2,zero=3",
    truth=(
        "Norms of rows are not added up over slices, so the one row of the table that lies on the border of two ranks' slices is scaled by "
        "the norm of the part that each has."
    ),
    says="rows are limited to the norm of 1.2 by other norms than their own",
    module="table",
)
