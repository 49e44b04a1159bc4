"""Bugs between and in stages."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "thrown_away_normals_too_few",
    "parameters/construction/draw_stream.py",
    old="rest = target.numel + (16 if kind in _NORMAL and target.numel % 16 else 0)",
    new="rest = target.numel",
    job="gpt:untied",
    plan="pp=2,cuts=blocks.1",
    truth=(
        "A rank that passes over the draws of a normal tensor it does not hold passes over 16 numbers too few where its size "
        "is no multiple of 16, so initial values of all later tensors on that stage are not those of one device."
    ),
    module="blocks.1.attn.q",
)
EIGHTH.edit(
    "conjugate_sent_as_it_lies",
    "comm/shm/operands.py",
    old="if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():",
    new="if tensor.is_contiguous() and not tensor.is_neg():",
    job="shapes:waves",
    plan="pp=2,cuts=turn,microbatches=2",
    devices="cpu",
    truth=(
        "A conjugated view is handed to the shared memory as it lies, so the next stage receives the numbers without "
        "conjugation."
    ),
    says="what _conj of the model or loss",
    module="turn",
)
EIGHTH.edit(
    "bias_gradient_replaced",
    "program/operators/fused_grad_accumulation.py",
    old="lambda total: total.add_(rows.sum(0))",
    new="lambda total: total.copy_(rows.sum(0))",
    job="gpt:untied",
    plan="pp=2,microbatches=3,schedule=zb-h1",
    truth=(
        "Where a layer accumulates its gradients itself, the bias's gradient of each microbatch replaces that of those "
        "before instead of being added."
    ),
    says="are those of each replica's last microbatch alone",
    module="blocks.2.down",
)
EIGHTH.edit(
    "buffer_from_batch_not_written",
    "pipeline/stages/stages.py",
    old="own = {node.name for node in nodes if node.name not in self.free or number == 0}",
    new="own = {node.name for node in nodes if node.name not in self.free}",
    job="states:newest",
    plan="pp=2,cuts=mid,microbatches=3",
    truth=(
        "In pipelines a buffer whose new value depends on the batch alone (the mean of the inputs) is written by no stage: "
        "it keeps its initial value."
    ),
    says="newest has the value that it had before the step",
)
