"""Bugs in pipelines."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

SIXTH.edit(
    "skips_keep_one_gradient",
    "pipeline/runtime/stage.py",
    old="known[name] = known[name] + gradient if name in known else gradient",
    new="known[name] = gradient",
    job="ladder:job",
    plan="pp=2,microbatches=4,schedule=interleaved,cuts=up.1+down.0+down.1",
    truth="Of a value that several later stages use, the gradient of the stage whose message comes last replaces the others instead of being added.",
    says="what a stage computes or keeps for backward, or is sent there, is wrong",
    module="up.1",
)
SIXTH.edit(
    "tied_gradient_replaced",
    "parameters/pipeline_ownership.py",
    old="parameter.grad.add_(gradient)  # it may be a view of the exchange's bucket",
    new="parameter.grad.copy_(gradient)  # it may be a view of the exchange's bucket",
    job="letters:dropping",
    plan="pp=2,microbatches=3",
    truth="The owner of a tied parameter replaces its own gradient by the borrower's instead of adding it.",
    says="a tied gradient is lost, or added again",
    module="letters",
)
SIXTH.edit(
    "deferred_biases_forgotten",
    "pipeline/runtime/stage.py",
    old="self._pending.append(lambda: self._accumulator.add(weight, bias, rows, inputs))",
    new="self._pending.append(lambda: self._accumulator.add(weight, None, rows, inputs))",
    job="ladder:dropping",
    plan="pp=2,microbatches=3,schedule=zb-h1",
    truth="Backwards in two halves never compute the gradients of linear layers' biases, which stay as they are.",
    says="a gradient on one device and none under the plan",
    module="join",
)
SIXTH.edit(
    "stages_draw_from_the_start",
    "pipeline/stages/stages.py",
    old="    next_draw = 0\n    for node in nodes:",
    new="    next_draw = next((node.draw for node in nodes if node.num_draws), 0)\n    for node in nodes:",
    job="letters:dropping",
    plan="pp=2,microbatches=3",
    truth="A later stage does not pass over the draws of the stages before it, so it drops what an earlier layer drops.",
    says="draws with another seed than draw 5 of the chunk has",
    module="layers.2.drop",
)
