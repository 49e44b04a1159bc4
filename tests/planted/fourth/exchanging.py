"""Bugs of what ranks exchange: buckets, servers, shares of the optimizer's state and of parameters, shared memory."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "stale_unused_gradient",
    "exchange/buckets/buckets.py",
    old="            if not entry.arrived:\n                view.zero_()",
    new="            if not entry.arrived and not self._order_shared:\n                view.zero_()",
    job="blocks:branch_twice",
    plan="dp=2,zero=1",
    truth=(
        "Where this replica did not use a parameter in a step, it sends what its bucket still holds "
        "of an earlier step's gradient instead of zeros."
    ),
    says="one device's plus 1 times those of the step before: old gradients are not zeroed",
    module="branch",
)
edit(
    "last_bucket_undivided",
    "exchange/buckets/reduction.py",
    old="for bucket in buckets if divides(divisor) else ():",
    new="for bucket in buckets[:-1] if divides(divisor) else ():",
    job="blocks:sums",
    plan="dp=2,bucket_bytes=600",
    truth=(
        "The gradients of the last bucket (the model's first parameters) are not divided by the "
        "batch's weight: they are sums, not means."
    ),
    says="times one device's, the weight of the whole batch: the sum is never divided",
    module="inp",
)
edit(
    "server_forgets_last_rank",
    "exchange/server.py",
    old="            for theirs in pushed[1:]:",
    new="            for theirs in pushed[1 : self._group.size - 1]:",
    job="blocks:job",
    plan="dp=3,exchange=server,servers=2",
    truth="Servers do not add the gradients of the last rank: its share of every batch is lost.",
    says="All gradients are without the share of replica 2.",
)
edit(
    "server_odd_tail",
    "exchange/server.py",
    old="            multiple=num_servers,\n",
    new="",
    job="blocks:job",
    plan="dp=3,exchange=server,servers=3",
    devices="cpu",
    truth=(
        "Buckets are not padded to a multiple of the servers, so the last elements of a bucket belong "
        "to no server and are never updated."
    ),
    says="only the part from 97% to 100% of inp.weight differs and are zero",
    module="inp",
)
edit(
    "frozen_not_shared",
    "exchange/shared.py",
    old="            if number % group.size == group.rank:",
    new="            if number == group.rank:",
    job="blocks:biases",
    plan="dp=2",
    devices="cpu",
    truth=(
        "Of the frozen parameters only the first two get their values in the shared memory; the "
        "others are zeros there."
    ),
    says="they are zeros there, as ranks are not given what is built",
    module="blocks.0.up",
)
edit(
    "shared_slice_from_start",
    "exchange/shared.py",
    old="                    within = start - entry.start, stop - entry.start\n",
    new="                    within = 0, stop - start\n",
    job="blocks:job",
    plan="dp=2",
    devices="cpu",
    truth=(
        "A parameter that lies across the border of two ranks' shares starts with wrong values: the "
        "second rank writes its first elements again in place of the last ones."
    ),
    says="some of their elements are right, so that ranks are not given what is built, or a part of it is in another place",
    module="blocks.1.down",
)
edit(
    "used_sticks",
    "exchange/zero_three.py",
    old="                entry.used = entry.waits = False",
    new="                entry.waits = False",
    job="blocks:branch",
    plan="dp=2,zero=3",
    truth=(
        "A parameter that an earlier step used counts as used in all later ones: it gets a gradient "
        "of zeros instead of none, so momentum and weight decay change it."
    ),
    says="branch.weight, branch.bias: a gradient under the plan and none on one device, where it is unused",
    module="branch",
)
edit(
    "zero_two_never_reset",
    "exchange/buckets/rounds.py",
    old="is_first=not bucket.sent))",
    new="is_first=bool(bucket.sent)))",
    job="blocks:job",
    plan="dp=2,zero=2",
    devices="cpu",
    truth=(
        "Summed gradients are not reset between steps under zero=2: a step's gradient is added to "
        "those of all steps before."
    ),
    says="times those of the step before: old gradients are not zeroed",
)
edit(
    "rest_not_gathered_again",
    "exchange/units/unit_access.py",
    old="                unit.stays, unit.num_running = False, 0\n                self._drop(unit)\n",
    new=(
        "                unit.stays, unit.num_running = False, 0\n"
        "                if unit.module is not None:\n"
        "                    self._drop(unit)\n"
    ),
    job="blocks:job",
    plan="dp=2,zero=3",
    truth=(
        "Under zero=3 the parameters outside of the repeated blocks are not let go of after a step, "
        "so later forwards compute with their values of before the update."
    ),
    says=(
        "those of a forward of all modules that are not repeated with the weights of before the last update"
    ),
    module="inp",
)
edit(
    "pool_not_sorted",
    "exchange/buckets/pool.py",
    old="in sorted(self._taken.items()):",
    new="in self._taken.items():",
    job="blocks:sums",
    plan="dp=2,zero=2,bucket_bytes=600,microbatches=2",
    truth=(
        "The pool of zero=2 gives memory that another bucket still has (gaps are looked for in the "
        "order of taking, not of addresses), so gradients of one bucket overwrite another's."
    ),
    module="blocks.0.up",
)
edit(
    "stale_bucket",
    "exchange/buckets/scattered.py",
    old="            if not place.filled:\n                view.zero_()\n",
    new="",
    job="padded_texts:experts",
    plan="dp=2,zero=2,microbatches=2",
    truth=(
        "Under zero=2 a parameter that a chunk does not use sends what lay in the bucket's memory, "
        "such as the chunk before's gradient once more."
    ),
    says="where a chunk does not use a parameter, such as chunk 1, memory still holds the gradient of the chunk before",
    module="rare",
)
