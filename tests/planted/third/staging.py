"""Bugs of pipelines and recomputation."""

from __future__ import annotations

from dataclasses import replace

from tests.planted.third.planting import Planter, bug


@bug("encdec", "pp=3,microbatches=3", causes="stages", module="encoder.1.down")
def last_gradient_wins(p: Planter) -> None:
    """A value that several later stages use keeps the gradient of the one that sends last, instead of the sum."""
    from meshloom.pipeline.runtime.stage import StageRun

    p.set(
        StageRun,
        "receive_gradients",
        lambda self, microbatch, gradients: self._live[microbatch].gradients.update(gradients),
    )


@bug("encdec", "pp=3,microbatches=3", causes="stages")
def skip_of_first(p: Planter) -> None:
    """Values that pass over a stage are cached by name, so that every microbatch gets those of the first one."""
    from meshloom.pipeline.runtime.stage import StageRun

    def make(original):
        def receive(self, microbatch, values):
            stage, kept = self._stages[microbatch], self.__dict__.setdefault("_skips", {})
            far = {each.value for each in stage.incoming if each.source != stage.number - 1}
            given = {}
            for name, value in values.items():
                if name in far:
                    if microbatch == 0:
                        kept[name] = value
                    given[name] = kept[name] if kept[name].shape == value.shape else value
                else:
                    given[name] = value
            original(self, microbatch, given)

        return receive

    p.wrap(StageRun, "receive", make)


@bug("gpt", "pp=2,microbatches=2", causes="stages", module="head")
def lent_values_stale(p: Planter) -> None:
    """The stage that borrows a tied weight gets the value of before the update: it is a step behind."""
    from meshloom.parameters.pipeline_ownership import PipelineOwnership

    def make(original):
        def lend(self, parameters, kept):
            known = self.__dict__.setdefault("_known", {})
            yield from original(self, parameters, kept)
            for name, parameter in self._lent_here(parameters):
                if not self.owns(name):
                    now = parameter.detach().clone()
                    if name in known:
                        parameter.data.copy_(known[name])
                    known[name] = now

        return lend

    p.wrap(PipelineOwnership, "lend", make)


@bug("deep", "pp=2,microbatches=3,schedule=zb-h1", causes="stages")
def deferred_inputs_overwritten(p: Planter) -> None:
    """A deferred weight gradient uses the newest input that its layer has seen, which is another microbatch's."""
    from meshloom.pipeline.runtime.stage import DeferredWeightGradients

    def add(self, weight, bias, rows, inputs):
        newest = self.__dict__.setdefault("_newest", {})
        newest[id(weight)] = inputs

        def compute():
            found = newest[id(weight)]
            self._accumulator.add(weight, bias, rows, found if found.shape == inputs.shape else inputs)

        if self.collecting:
            self._pending.append(compute)
        else:
            self._accumulator.add(weight, bias, rows, inputs)

    p.set(DeferredWeightGradients, "add", add)


@bug("gpt", "pp=2,microbatches=3", causes="stages")
def draws_of_first_microbatch(p: Planter) -> None:
    """Stages after the first draw the masks of microbatch 0 in every microbatch."""
    from meshloom.replica import program_engine

    def around_of(plan, chunks, scope):
        def around(stage, microbatch, rerun):
            chunk = chunks[microbatch] if stage == 0 else replace(chunks[microbatch], index=chunks[0].index)
            return scope.forward(chunk, rerun, stage=stage, observed=stage == plan.num_stages - 1)

        return around

    p.set(program_engine, "around_of", around_of)


@bug("gpt", "pp=2,microbatches=2", causes="tied", module="embed")
def owner_gradient_replaced(p: Planter) -> None:
    """The owner of a tied weight takes the borrower's gradient in place of its own, instead of adding them."""
    from meshloom.parameters.pipeline_ownership import PipelineOwnership

    def make(original):
        def returned(self, parameters):
            for name, parameter in self._lent_here(parameters):
                if self.owns(name) and parameter.grad is not None:
                    parameter.grad.zero_()
            yield from original(self, parameters)

        return returned

    p.wrap(PipelineOwnership, "return_gradients", make)


@bug("gpt", "dp=2,recompute=full", causes="recompute")
def first_recomputation_draws(p: Planter) -> None:
    """In the first step a segment is recomputed from a seed that is one draw too far: other masks in backward than in forward."""
    from meshloom.program.run import segment_runner

    p.wrap(segment_runner, "seed_of_draw", lambda original: lambda seed, number: original(seed, number + 1))


@bug("gpt", "pp=2,microbatches=2,recompute=full", causes="recompute")
def recomputation_seed_stale(p: Planter) -> None:
    """Recomputation draws from the seed of the first microbatch that ever ran: masks in backward are others than in forward."""
    from meshloom.program.recompute.saved_frame import Frame

    kept = {}

    def make(original):
        def close(self, seed, given, made):
            if seed is not None:
                seed = kept.setdefault(len(self._again), seed)
            original(self, seed, given, made)

        return close

    p.wrap(Frame, "close", make)


@bug("gpt", "pp=2", causes="stages", module="blocks.1.attention.q")
def sent_in_bf16(p: Planter) -> None:
    """What stages send each other is rounded to bfloat16 on the way."""
    from meshloom.pipeline.runtime.run import PipelineRun

    def make(original):
        def send(self, message, produced, sending):
            original(
                self,
                message,
                {
                    name: v.bfloat16().to(v.dtype) if v.is_floating_point() else v
                    for name, v in produced.items()
                },
                sending,
            )

        return send

    p.wrap(PipelineRun, "_send", make)


@bug("gpt4", "pp=2,microbatches=3,schedule=interleaved", causes="stages", module="blocks.1.down")
def gradients_of_other_microbatch(p: Planter) -> None:
    """Gradients that come back to a rank's second stage are those of the microbatch before."""
    from meshloom.pipeline.runtime.stage import StageRun

    def make(original):
        def receive(self, microbatch, gradients):
            kept = self.__dict__.setdefault("_before", {})
            given = dict(gradients)
            if self._stages[0].number == 1:
                for name, value in gradients.items():
                    before = kept.get(name)
                    kept[name] = value
                    if microbatch and before is not None and before.shape == value.shape:
                        given[name] = before
            original(self, microbatch, given)

        return receive

    p.wrap(StageRun, "receive_gradients", make)


@bug("residual", "dp=2,pp=2,microbatches=3", causes="missing_chunk")
def empty_microbatch_loses(p: Planter) -> None:
    """In a batch with fewer samples than chunks a replica's last filled microbatch is left out of its gradients."""
    from meshloom.replica.loss_sums import LossSums

    def make(original):
        def add(self, returned, chunk):
            root, loss, weight = original(self, returned, chunk)
            if chunk.batch < 6 and chunk.index % 3 == 1:
                root = root * 0
            return root, loss, weight

        return add

    p.wrap(LossSums, "add", make)
