"""Bugs in buffers, counters and what forwards leave behind."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

SIXTH.edit(
    "joined_variance",
    "replica/buffers/batch_norm.py",
    old="delta.square() * (size * (total - size) / least)",
    new="delta.square() * (size * total / least)",
    job="tiles:plain",
    plan="dp=2,sync_batch_norm=true",
    truth="The variance of a batch norm that replicas share weights the difference of their means by all values instead of those before.",
    says="its statistics are not those of the whole batch",
    module="first.norm",
)
SIXTH.edit(
    "joined_running_variance_biased",
    "replica/buffers/batch_norm.py",
    old="unbiased = variance * (count / (count - 1))",
    new="unbiased = variance",
    job="duel:job",
    plan="dp=2,sync_batch_norm=true",
    truth="The running variance of a shared batch norm takes the biased variance of the batch.",
    says="divided by 10 and not by 9 (biased)",
    module="painter.1",
)
SIXTH.edit(
    "cumulative_counts_replicas",
    "replica/buffers/norm_statistics.py",
    old="scales = torch.where(self._cumulative, calls / total, 1.0)",
    new="scales = torch.where(self._cumulative, 1.0 / total, 1.0)",
    job="tiles:cumulative",
    plan="dp=2,microbatches=2",
    truth="In a cumulative average of batch statistics a replica's mean counts as one call, however many chunks it has run.",
    says="What the step adds to first.norm.running_mean is 0.5 times one device's",
    module="first.norm",
)
SIXTH.edit(
    "chunks_of_a_replica_not_decayed",
    "replica/buffers/chunk_writes.py",
    old="torch.where(a == 0, c, a * added + c)",
    new="torch.where(a == 0, c, added + c)",
    job="pupils:job",
    plan="dp=2,microbatches=2",
    truth="What a replica's earlier chunk adds to a moving average is not decayed by its later ones.",
    says="where no chunk decays what those before it on its replica have added",
    module="",
)
SIXTH.edit(
    "counter_counts_chunks",
    "replica/attributes/plain_numbers.py",
    old='        """Around one chunk\'s forward; this replica\'s in order."""\n        self.put_back()\n        yield',
    new='        """Around one chunk\'s forward; this replica\'s in order."""\n        self._start = self._start or self._now()\n        yield',
    job="tickers:of_lists",
    plan="dp=2,microbatches=2",
    truth="Chunks find a counter as the chunk before has left it instead of as the step found it, so it counts chunks.",
    says="finds the numbers in attributes (seen) that the chunk before has left",
    module="out",
)
SIXTH.edit(
    "state_passes_between_chunks",
    "replica/attributes/carried_tensors.py",
    old="        self.put_back(chunk.index)\n        before = [_mark(value) for value in self._now()]",
    new="        self.put_back(chunk.index) if chunk.index in self._found else None\n        before = [_mark(value) for value in self._now()]",
    job="tides:job",
    plan="dp=2,microbatches=2",
    truth="In the first step a chunk goes on with the state that the chunk before has left.",
    says="finds the tensors in attributes (state) that the chunk before has left",
    module="cell",
)
SIXTH.edit(
    "decay_of_the_last_chunk",
    "replica/buffers/norm_statistics.py",
    old="self.decay *= 1.0 - (module.momentum or 0.0)",
    new="self.decay = 1.0 - (module.momentum or 0.0)",
    job="tiles:job",
    plan="dp=2,microbatches=2",
    truth="Running statistics are decayed once for a replica instead of once for each of its chunks.",
    says="decays what was there before it once, and not once for each of its chunks",
    module="first.norm",
)
