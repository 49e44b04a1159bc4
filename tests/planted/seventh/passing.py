"""Bugs in pipelines and recomputation."""

from __future__ import annotations

from tests.planted.seventh import SEVENTH

SEVENTH.edit(
    "halves_sent_as_they_lie",
    "pipeline/runtime/run.py",
    old="            if value.stride() != meta.stride:\n",
    new="            if value.is_contiguous() and value.stride() != meta.stride:\n",
    job="shapes:halves",
    plan="pp=2,microbatches=2,cuts=gate",
    truth=(
        "A value with gaps in its memory (half of the features of a larger one) is sent as consecutive memory, so the next stage receives "
        "elements of both halves."
    ),
    says="has made arrives with other values at the stage that it is sent to",
    module="gate",
)
SEVENTH.edit(
    "second_borrower_forgotten",
    "parameters/pipeline_ownership.py",
    old="            for borrower in self.holders[name][1:]:\n",
    new="            for borrower in self.holders[name][1:2]:\n",
    job="shapes:shared",
    plan="pp=3,microbatches=3,cuts=own.1+own.2",
    truth="Of a parameter that three stages use, the owner gets the gradient of the first borrower and not that of the second.",
    says="shared.weight, shared.bias alone are wrong, which several stages use",
    module="shared",
)
SEVENTH.edit(
    "weights_of_first_microbatch",
    "replica/program_engine.py",
    old="        root, loss, weight = loss_sums.add(returned, chunks[microbatch])\n",
    new="        root, loss, weight = loss_sums.add(returned, chunks[0])\n",
    job="mlp:uneven",
    plan="pp=2,microbatches=2,schedule=zb-h1",
    truth=(
        "Every microbatch's mean counts with the samples of the first one, so the second, of 6 samples and not 7, counts too much in the "
        "loss and in all gradients."
    ),
    says="Chunk 1 has weight 7 instead of 6",
    module=None,
)
SEVENTH.edit(
    "one_draw_per_operator",
    "pipeline/stages/stages.py",
    old="            next_draw = node.draw + node.num_draws\n",
    new="            next_draw = node.draw + 1\n",
    job="rnn:stacked",
    plan="pp=2,microbatches=2,cuts=mid",
    truth=(
        "Behind an operator that draws several times (an LSTM with dropout between layers) a stage passes over draws once more, so the "
        "dropout after it has another mask."
    ),
    says="dropout of drop at",
    module="drop",
)
SEVENTH.edit(
    "recomputed_with_new_buffer",
    "program/run/segment_runner.py",
    old="        held = [as_it_was.get(name, given[at]) for name, at in self._held_given]\n",
    new="        held = [given[at] for _, at in self._held_given]\n",
    job="states:centred",
    plan="microbatches=2,recompute=full",
    truth="From the second run of a segment on, what backward recomputes reads the buffer `shift` as this forward has left it and not as it found it.",
    says="other values there, of parameters or buffers, as nothing draws",
    module="out",
)
