"""Bugs of buffers and of attributes."""

from __future__ import annotations

from tests.planted.fifth.listing import edit

edit(
    "cumulative_mean_by_one",
    "replica/buffers/norm_statistics.py",
    old="scales = torch.where(self._cumulative, calls / total, 1.0)",
    new="scales = torch.where(self._cumulative, 1.0 / total, 1.0)",
    job="jobs/noisy_pictures:job",
    plan="dp=2,microbatches=2",
    truth=(
        "The cumulative running statistics (momentum=None) of a replica's chunks are weighed as "
        "one call instead of the number of its calls."
    ),
    says=(
        "What the step adds to last.running_mean is 0.5 times one device's: another momentum, or "
        "a factor that is applied twice or not at all"
    ),
    module="last",
)

edit(
    "decay_of_one_call",
    "replica/buffers/norm_statistics.py",
    old="                    self.decay *= 1.0 - (module.momentum or 0.0)",
    new="                    self.decay = 1.0 - (module.momentum or 0.0)",
    job="jobs/noisy_pictures:job",
    plan="dp=2,microbatches=2",
    truth=(
        "The running statistics before the step decay by one call's momentum only, however many "
        "microbatches a replica has."
    ),
    says=(
        "is what one device has where a replica decays what was there before it once, and not "
        "once for each of its chunks"
    ),
    module="norm",
)

edit(
    "biased_variance",
    "replica/buffers/batch_norm.py",
    old="        unbiased = variance * (count / (count - 1))",
    new="        unbiased = variance",
    job="jobs/noisy_pictures:without_level",
    plan="dp=2,sync_batch_norm=true",
    truth=("Synchronised batch norm keeps the biased variance in running_var instead of the unbiased one."),
    says="as a variance of 432 values that is divided by 432 and not by 431 (biased)",
    module="norm",
)

edit(
    "earlier_chunk_not_decayed",
    "replica/buffers/chunk_writes.py",
    old="torch.where(a == 0, c, a * added + c)",
    new="torch.where(a == 0, c, added + c)",
    job="jobs/noisy_pictures:job",
    plan="dp=2,microbatches=2",
    truth=(
        "In a moving average in a buffer (level), what an earlier microbatch added is not decayed "
        "by the later ones."
    ),
    says=(
        "level is what one device has where no chunk decays what those before it on its replica have added"
    ),
    module="",
)

edit(
    "writes_in_reverse_order",
    "replica/buffers/chunk_writes.py",
    old=("                for row in parts\n            ]"),
    new=("                for row in parts.flip(0)\n            ]"),
    job="jobs/queueing:job",
    plan="dp=2",
    truth=(
        "What replicas write to a buffer is applied in reverse order: the queue has the keys of "
        "the first replica's chunk instead of the last one's."
    ),
    says="queue is what one device has of the first chunk alone",
    module="",
)

edit(
    "numbers_not_put_back",
    "replica/attributes/plain_numbers.py",
    old=('        """Around one chunk\'s forward; this replica\'s in order."""\n        self.put_back()\n'),
    new=(
        '        """Around one chunk\'s forward; this replica\'s in order."""\n'
        "        if self._start is None:\n"
        "            self.put_back()\n"
    ),
    job="jobs/flowing:job",
    plan="dp=2,microbatches=2",
    truth=(
        "A number in an attribute (calls) is not put back between the chunks of a step: the "
        "second chunk reads what the first left, and it counts chunks."
    ),
    says=(
        "All gradients are those of a forward that finds the numbers in attributes (calls) that "
        "the chunk before has left"
    ),
    module="two",
)

edit(
    "frozen_norm_put_into_training",
    "core/moments/modes.py",
    old=("            if module.training is not trains:\n                module.training = trains"),
    new=("            if trains or not module.training:\n                module.training = True"),
    job="jobs/prompted:job",
    plan="dp=2",
    truth=(
        "A module that the model function left in evaluation mode (norm) is put into training "
        "mode in every step."
    ),
    says="it is in training mode, and in evaluation mode on one device",
    module="norm",
)
