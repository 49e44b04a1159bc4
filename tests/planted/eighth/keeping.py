"""Bugs in checkpoints."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "counters_lose_their_counts",
    "checkpoint/json_values.py",
    old="return Counter(dict(from_json(items)))",
    new="return Counter(key for key, _ in from_json(items))",
    job="mlps:stepped",
    plan="dp=2",
    truth=(
        "A Counter that is read from a checkpoint has each key once: MultiStepLR's milestone 5, which the job names twice, "
        "lowers the rate once in a resumed run."
    ),
)
EIGHTH.edit(
    "history_resumed_backwards",
    "optimizer/state_pieces.py",
    old="return list(read(path, 0, count).view(shape).unbind())",
    new="return list(read(path, 0, count).view(shape).flip(0).unbind())",
    job="mlps:lbfgs",
    plan="dp=2",
    truth=(
        "Lists of tensors in an optimizer's state (LBFGS's history of directions and steps) come back from a checkpoint in "
        "reverse order, so the first update after resuming is another one."
    ),
    says="optimizer/inp.weight/old_dirs.stacked has other values",
    module="inp",
)
EIGHTH.edit(
    "buffers_copied_late",
    "train/run_checkpoints.py",
    old='return not span.key.startswith(CARRIED) if span.kind == "state" else span.key in names',
    new='return not span.key.startswith(CARRIED) if span.kind == "state" else True',
    job="convs:saved",
    plan="pp=2,cuts=two",
    truth=(
        "A save in the background copies buffers as late as parameters, just before the next update; by then the next step's "
        "forwards may have moved them: the checkpoint can hold running statistics of one step later than its parameters."
    ),
    says="What is copied for the thread that writes is something else",
)
EIGHTH.edit(
    "state_read_from_the_beginning",
    "checkpoint/checkpoint.py",
    old="parts.append(tensor[position - first : end - first])",
    new="parts.append(tensor[: end - position])",
    job="mlps:job",
    plan="dp=2,zero=1",
    truth=(
        "A slice of the optimizer's state is read from the beginning of its tensor in the checkpoint, so after a resume the "
        "second part of a parameter that lies across two ranks' shares has the first part's momentum."
    ),
    says="optimizer/mid.weight/exp_avg has other values",
    module="mid",
)
