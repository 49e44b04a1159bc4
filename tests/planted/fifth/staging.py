"""Bugs of pipelines: what stages send, lend, draw, keep and write back."""

from __future__ import annotations

from tests.planted.fifth.listing import edit

edit(
    "skip_overwritten",
    "pipeline/runtime/stage.py",
    old="known[name] = known[name] + gradient if name in known else gradient",
    new="known[name] = gradient",
    job="small_jobs/skipping:job",
    plan="pp=3,microbatches=2,cuts=mid+last",
    truth=(
        "A value that several later stages use (the skip behind bn) gets only the last arriving "
        "of their gradients instead of the sum."
    ),
    module="bn",
)

edit(
    "second_borrower",
    "parameters/pipeline_ownership.py",
    old="            for borrower in self.holders[name][1:]:",
    new="            for borrower in self.holders[name][1:2]:",
    job="small_jobs/tied_texts:three",
    plan="pp=3,microbatches=2,cuts=blocks.1+blocks.2",
    truth=(
        "Of a tied parameter that three stages use only the first borrower returns its gradient "
        "to the owner; the third stage's (the head's) is lost."
    ),
    says=(
        "those of emb.weight alone are wrong, which several stages use: what one of these stages "
        "adds is lost, or does not count once"
    ),
    module="emb",
)

edit(
    "owner_without_gradient",
    "parameters/pipeline_ownership.py",
    old="                parameter.grad = gradient if received[0] else None  # reads it: waits for the device",
    new="                continue",
    job="small_jobs/tied_texts:detached",
    plan="pp=2",
    truth=(
        "If the owner's own stage has no gradient of a tied parameter (its use is detached), the "
        "gradient that the borrowing stage returns is dropped, so the parameter is not trained."
    ),
    says=(
        "those of emb.weight alone are wrong, which several stages use: what one of these stages "
        "adds is lost, or does not count once"
    ),
    module="emb",
)

edit(
    "deferred_bias",
    "pipeline/runtime/stage.py",
    old="self._pending.append(lambda: self._accumulator.add(weight, bias, rows, inputs))",
    new="self._pending.append(lambda: self._accumulator.add(weight, None, rows, inputs))",
    job="small_jobs/shared_ends:job",
    plan="pp=2,microbatches=3,schedule=zb-h1",
    truth=(
        "In schedules that split the backward the deferred half computes only the weights' "
        "gradients of linear layers, the biases get none."
    ),
    says=(
        "these are all biases, and weights have theirs, so that what computes gradients of biases is left out"
    ),
)

edit(
    "count_not_written",
    "pipeline/runtime/stage.py",
    old="                self._buffers[name].copy_(value)",
    new="                self._buffers[name].copy_(value) if value.is_floating_point() else None",
    job="small_jobs/skipping:job",
    plan="pp=2",
    truth=(
        "Stages write back only floating point buffers: batch norm's count num_batches_tracked "
        "stays, so the cumulative average (momentum=None) weighs wrongly."
    ),
    says=(
        "bn.num_batches_tracked has the value that it had before the step: what forwards write "
        "there is not kept"
    ),
    module="bn",
)

edit(
    "draws_from_start",
    "pipeline/stages/stages.py",
    old="            if node.draw != next_draw:",
    new="            if next_draw and node.draw != next_draw:",
    job="small_jobs/shared_ends:job",
    plan="pp=2,microbatches=2,cuts=layers.3",
    truth=(
        "A stage does not pass over the numbers of the draws of earlier stages, so its dropouts "
        "use other draws (those of the first stage) than one device."
    ),
    says="draws with another seed than draw 3 of the chunk has: random numbers are others from there on",
    module="drop.3",
)

edit(
    "strides_ignored",
    "pipeline/runtime/run.py",
    old=(
        "            if value.stride() != meta.stride:\n"
        "                value = _empty(meta, value.device).copy_(value)"
    ),
    new="            value = value.contiguous()",
    job="small_jobs/mixing:job",
    plan="pp=2,microbatches=2,cuts=tokens",
    devices="cpu",
    truth=(
        "A transposed value is sent between stages in contiguous order, while the receiver fills "
        "memory with the captured strides: it arrives with its elements permuted."
    ),
    module="tokens",
)

edit(
    "kept_there",
    "pipeline/runtime/run.py",
    old=("            for message in step.stays:\n                self._deliver"),
    new=(
        "            for message in (each for each in step.stays if each.source < each.destination):\n"
        "                self._deliver"
    ),
    job="small_jobs/shared_ends:job",
    plan="pp=2,microbatches=3,schedule=zb-v,cuts=layers.1+layers.3+layers.5",
    truth=(
        "Gradients between two stages of the same rank (the fold of zb-v) are not handed over, so "
        "earlier stages get no gradient from later ones."
    ),
    module="layers.2",
)
