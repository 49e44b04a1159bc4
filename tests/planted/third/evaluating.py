"""Bugs of evaluations and the loop."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.planted.third.planting import Planter, bug


@bug("residual", "dp=2", causes="weights")
def mean_of_means(p: Planter) -> None:
    """A metric is the mean of its chunks' means: chunks with fewer samples count as much as others."""
    from meshloom.replica import metrics

    p.wrap(
        metrics, "as_sum", lambda original: lambda returned, samples, **rest: original(returned, 1, **rest)
    )


@bug("residual", "dp=2", causes="data")
def last_batch_not_evaluated(p: Planter) -> None:
    """The short last batch of the evaluation data is left out."""
    from meshloom.data import job_data

    class Fewer:
        def __init__(self, of, length):
            self.of, self.length = of, length

        def __len__(self):
            return self.length

        def __getitem__(self, index):
            return self.of[index]

    def make(original):
        def map_chunks(dataset, job, plan, replica, shares, num_batches):
            size = job.evaluation_batch_size
            return original(
                Fewer(dataset, len(dataset) // size * size or len(dataset)),
                job,
                plan,
                replica,
                shares,
                num_batches,
            )

        return map_chunks

    p.wrap(job_data, "map_chunks", make)


@bug("averaged", "dp=2", causes="between_steps", module="out")
def average_stays(p: Planter) -> None:
    """After an evaluation of the average the last parameter is not put back."""
    from meshloom.optimizer.averages import ParameterAverages, _set

    def show(self):
        slices = list(self._exchange.owned)
        own = [each.data().clone() for each in slices]
        _set(slices, [each.tensor.data for each in self.held])
        yield from self.publish()
        return lambda: _set(slices[:-1], own[:-1])

    p.set(ParameterAverages, "show", show)


@bug("averaged", "dp=2,tp=2", causes="averages")
def average_not_evaluated(p: Planter) -> None:
    """Evaluations are of the parameters, not of their average."""
    from meshloom.train import evaluation

    def make(original):
        def evaluate(replica, chunks, updates, observer=None):
            state = replica.updater.state
            averages, state.averages = state.averages, None
            try:
                return (yield from original(replica, chunks, updates, observer))
            finally:
                state.averages = averages

        return evaluate

    p.wrap(evaluation, "evaluate", make)


@bug("cnn", "dp=2", causes="forward", module="b1")
def norms_train_in_evaluation(p: Planter) -> None:
    """Batch norm layers stay in training mode during an evaluation: it has their batch statistics and moves the running ones."""
    from contextlib import contextmanager

    from meshloom.core.moments.modes import Modes

    def make(original):
        @contextmanager
        def evaluation(self):
            with original(self):
                for module in self._model.modules():
                    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                        module.training = True
                yield

        return evaluation

    p.wrap(Modes, "evaluation", make)


@bug("experts", "dp=2,shares=3+1", causes="logged")
def logs_unweighted(p: Planter) -> None:
    """A logged value is the mean over chunks, whatever their samples."""
    from meshloom.replica.loss_sums import LossSums

    p.wrap(
        LossSums,
        "_add_logged",
        lambda original: lambda self, name, value, weight: original(self, name, value, 1.0),
    )


@bug("gan", "dp=2", causes="turns", module="gen.0")
def due_a_step_early(p: Planter) -> None:
    """A loss that is due every second step is due in the first, third and fifth instead of the second, fourth and sixth."""
    from meshloom.replica import replica

    def make(original):
        def turns_of(job, step):
            return original(job, step + 1)

        return turns_of

    p.wrap(replica, "turns_of", make)


@bug("stepping", "dp=2", causes="turns")
def step_number_ahead(p: Planter) -> None:
    """ml.step() tells a loss the next step's number."""
    from meshloom.replica.chunk_scope import ChunkScope

    def make(original):
        def moment(self, chunk):
            found = original(self, chunk)
            return replace(found, step=found.step + 1)

        return moment

    p.wrap(ChunkScope, "moment", make)
