"""Bugs of pipelines, of recomputation, and of programs that are used where they do not hold."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "third_stage_tied",
    "parameters/pipeline_ownership.py",
    old="            for borrower in self.holders[name][1:]:",
    new="            for borrower in self.holders[name][1:2]:",
    job="language:mid",
    plan="pp=3,cuts=blocks.1+blocks.2,microbatches=2",
    devices="cpu",
    truth=(
        "Of a tied weight that three stages use, the gradient of the third (the head) never comes to "
        "the owner."
    ),
    says="What embed.weight in its use as head.weight adds to its gradient is left out",
    module="embed",
)
edit(
    "skip_gradient_overwritten",
    "pipeline/runtime/stage.py",
    old="            known[name] = known[name] + gradient if name in known else gradient",
    new="            known[name] = gradient",
    job="convolutions:unet",
    plan="pp=3,cuts=mid+fuse,microbatches=2",
    truth=(
        "The gradient of a value that is sent to two later stages is only that of the stage that "
        "returns it last; the other's is lost."
    ),
    says=(
        "so do the gradients of d2 and all behind it, but none of d1 and before: what stages send "
        "back is wrong"
    ),
    module="d1",
)
edit(
    "norm_first_microbatch",
    "pipeline/runtime/stage.py",
    old="                self._buffers[name].copy_(value)",
    new="                self._buffers[name].copy_(value) if microbatch == 0 else None",
    job="convolutions:job",
    plan="pp=2,cuts=two,microbatches=2",
    devices="cpu",
    truth=(
        "Running statistics keep the first microbatch's update only; those of later microbatches are dropped."
    ),
    says="one.norm1.running_mean is what one device has of the first chunk alone",
    module="one.norm1",
)
edit(
    "deferred_weights_kept",
    "pipeline/runtime/stage.py",
    old="        pending, self._pending = self._pending, []",
    new="        pending = list(self._pending)",
    job="blocks:job",
    plan="pp=2,microbatches=3,schedule=zb-h1",
    truth=(
        "Deferred weight gradients are not forgotten once taken: each later microbatch computes those "
        "of all before again, so they count several times."
    ),
    says=(
        "have chunk 0 3 times, chunk 1 2 times: values of another microbatch are used, or one is used again"
    ),
    module="inp",
)
edit(
    "later_stage_draws_again",
    "pipeline/stages/stages.py",
    old="    next_draw = 0\n",
    new="    next_draw = next((each.draw for each in nodes if each.draw is not None), 0)\n",
    job="language:job",
    plan="pp=2,cuts=blocks.1,microbatches=2",
    truth=(
        "Later stages do not skip the draws of the stages before them, so their dropout repeats the "
        "first stage's random numbers."
    ),
    says="draws with another seed than draw 2 of the chunk has: random numbers are others from there on",
    module="blocks.1.attn",
)
edit(
    "weight_of_first_chunk",
    "replica/program_engine.py",
    old="loss_sums.add(returned, chunks[microbatch])",
    new="loss_sums.add(returned, chunks[0])",
    job="blocks:job",
    plan="pp=2,microbatches=4",
    devices="cpu",
    truth=(
        "Every microbatch's mean is weighted with the number of samples of the first microbatch, "
        "though they are of different sizes."
    ),
    says="has weight 2 instead of 1: the mean is weighted wrongly",
)
edit(
    "recompute_reads_new_buffer",
    "program/run/segment_runner.py",
    old="{name: values[name].clone() for name in self._changing}",
    new="{name: values[name] for name in self._changing}",
    job="moving_buffers:power",
    plan="recompute=full,microbatches=2",
    truth=(
        "Recomputation in the backward reads a buffer as this forward has left it, not as it found it "
        "(a copy is missing)."
    ),
    says="under a plan that recomputes, other values there, of parameters or buffers",
    module="scale1",
)
edit(
    "average_not_lent",
    "replica/metrics.py",
    old=(
        "        replica.updating = replica.plan.dp > 1  # until what this rank does not own is back, too\n        try:\n"
        "            yield from replica.engine.refresh_borrowed()\n"
    ),
    new="        replica.updating = replica.plan.dp > 1\n        try:\n",
    job="language:averaged",
    plan="pp=2,cuts=blocks.1,microbatches=2",
    truth=(
        "When averaged parameters are evaluated, the last stage's borrowed copy of the tied weight is "
        "not the average."
    ),
    says="it is as in steps, and its owner has its average: averages are not lent",
    module="head",
)
edit(
    "batch_of_first_microbatch",
    "pipeline/runtime/microbatches.py",
    old="            lambda microbatch: self._batches[microbatch],",
    new="            lambda microbatch: self._batches[0],",
    job="blocks:even",
    plan="pp=2,microbatches=2",
    truth=(
        "Stages read the first microbatch's data for every microbatch, so the other samples are never "
        "trained on."
    ),
    says="Losses of chunks are those of other chunks (chunk 1 has that of chunk 0)",
    module="inp",
)
edit(
    "recompute_draws_anew",
    "program/run/segment_runner.py",
    old="    seed_torch(seed)\n    try:\n",
    new="    try:\n",
    job="moving_buffers:denoiser",
    plan="dp=2,recompute=full",
    truth=(
        "Recomputation in the backward does not start from the forward's seed, so dropout has another "
        "mask there."
    ),
    says="under a plan that recomputes, other draws or values there",
    module="drop",
)
edit(
    "text_values_any",
    "program/ir/batch_values.py",
    old="    return all(\n        wanted in (None,",
    new="    return any(\n        wanted in (None,",
    job="tasks:job",
    plan="pp=2",
    truth=(
        "A program that was read for one text in the batch (task=copy) is used for batches with another text."
    ),
    says="it is the program for batches in which task of the batch is 'copy', and the chunk has 'swap'",
    module="swap",
)
edit(
    "python_draws_of_first",
    "program/store/drawn_batches.py",
    old="(yield from self.with_draws(batch, moment, loss))",
    new="(yield from self.with_draws(batch, batches[0][1], loss))",
    job="blocks:scaled",
    plan="pp=2,microbatches=2",
    truth="Every microbatch gets what Python's random drew for the step's first microbatch.",
    says="of chunk 1 what its loss draws with random or numpy, or makes of the step, is",
    module="inp",
)
