"""Bugs of what modules keep: buffers, numbers, modes, hooks."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "writes_composed",
    "replica/buffers/chunk_writes.py",
    old="torch.where(a == 0, c, a * added + c)",
    new="torch.where(a == 0, c, added + c)",
    job="moving_buffers:student",
    plan="dp=2,microbatches=2",
    devices="cpu",
    truth=(
        "Of a moving average in a buffer, what a replica's first chunk adds is not decayed by its "
        "second chunk."
    ),
    says="what one device has where no chunk decays what those before it on its replica have added",
    module="centre",
)
edit(
    "number_per_chunk",
    "replica/attributes/plain_numbers.py",
    old="        self.put_back()\n        yield\n        for number",
    new=(
        "        if self._start is None:\n"
        "            self._start = self._now()\n"
        "        yield\n"
        "        for number"
    ),
    job="remembered:cooling",
    plan="dp=2,microbatches=2",
    devices="cpu",
    truth=(
        "A replica's second chunk finds a number in an attribute as its first chunk has left it, and "
        "not as before the step: it changes once a chunk."
    ),
    says="a forward that finds the numbers in attributes (cool.temperature) that the chunk before has left",
    module="cool",
)
edit(
    "evaluated_parts_train",
    "core/moments/modes.py",
    old="return model if model.training else model.train()",
    new="return model.train()",
    job="pictures:still",
    plan="dp=2",
    truth="A batch norm that the model function put into evaluation mode trains in training mode.",
    says="it is in training mode, and in evaluation mode on one device",
    module="bn2",
)
edit(
    "hooks_lost",
    "core/modules/built.py",
    old="                register(hook)\n",
    new="",
    job="pictures:outside",
    plan="dp=2",
    truth=(
        "Hooks of parameters of a model built outside of the job are lost when it is copied: the "
        "gradient is not scaled."
    ),
    says="those of a forward whose parameters have no hooks: hooks that the job has put on parameters are lost",
    module="backbone.2",
)
