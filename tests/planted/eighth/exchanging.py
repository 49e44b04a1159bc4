"""Bugs in exchanges of gradients and parameters."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "pull_always_from_first_server",
    "exchange/server.py",
    old="group.broadcast(share_of(flat, server, num_servers), server) for flat in flats for server in servers",
    new="group.broadcast(share_of(flat, server, num_servers), 0) for flat in flats for server in servers",
    job="mlps:job",
    plan="dp=3,exchange=server,servers=2",
    truth=(
        "After an update every share of a bucket is broadcast by rank 0, so what the second server has updated is "
        "overwritten with rank 0's old values: the second half of each bucket of parameters is never trained."
    ),
    module="out",
)
EIGHTH.edit(
    "refilled_cast_from_start_of_unit",
    "exchange/units/unit_casts.py",
    old="values = unit.values[each.part][each.entry.start : each.entry.stop]",
    new="values = unit.values[each.part][: each.entry.stop - each.entry.start]",
    job="precise:again",
    plan="dp=2,zero=3,precision=bf16-mixed",
    truth=(
        "Under zero=3 with autocast, the bfloat16 cast of a parameter that is filled again, as its unit runs a second time "
        "in the loss, is filled with the beginning of the unit's flat tensor and not with the parameter: the second run "
        "computes with wrong weights."
    ),
    module="blocks.0.b",
)
EIGHTH.edit(
    "flags_by_minimum",
    "comm/reductions.py",
    old="torch.maximum(total, other, out=total)",
    new="torch.minimum(total, other, out=total)",
    job="mlps:seldom",
    plan="dp=2,exchange=ring,zero=1",
    truth=(
        "With explicit algorithms the maximum over ranks of the flags of used parameters is a minimum, so a parameter that "
        "only one replica used in a step counts as unused and gets no gradient."
    ),
    says="a gradient on one device and none under the plan",
    module="rare",
)
EIGHTH.edit(
    "local_share_divided_by_all",
    "replica/loss_sums.py",
    old="weight = float(self._of_own.values()[1])",
    new="weight = float(self._global.values()[1])",
    job="gpt:plain",
    plan="dp=2,exchange=local_sgd",
    truth=(
        "With local steps each replica divides its own gradient sum by the weight of the global batch instead of its own "
        "share's, so every step is half as long (dp=2)."
    ),
    says="All gradients are 1/dp = 1/2 of one device's",
    module="head",
)
EIGHTH.edit(
    "sparse_rows_keep_loss_scale",
    "exchange/sparse_gradients.py",
    old="for total in sums if divides(weight) else ():",
    new="for total in sums if isinstance(weight, float) and weight != 1.0 else ():",
    job="tables:job",
    plan="dp=2,precision=fp16-mixed",
    truth=(
        "Gradients of sparse tables are not divided by the divisor where that is a tensor on the device (with a loss scale): "
        "the table is updated with gradients that are still multiplied by the scale."
    ),
    says="The gradients of users.weight are 65536 times one device's",
    module="users",
)
EIGHTH.edit(
    "buckets_overlap_in_window",
    "comm/windows.py",
    old="        at += round_up(num_bytes, _ALIGNMENT)",
    new="        at += num_bytes // _ALIGNMENT * _ALIGNMENT",
    job="mlps:job",
    plan="dp=2,bucket_bytes=600",
    devices="cpu",
    truth=(
        "Buckets in shared memory begin at the last multiple of 64 bytes before the end of the one before, so the last "
        "elements of a bucket and the first ones of the next lie in the same memory."
    ),
    says="some of their elements are right, so that ranks are not given what is built, or a part of it is in another place",
    module="mid",
)
