"""Bugs of checkpoints and of what goes on from them."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "ema_not_saved",
    "optimizer/optimizer_state.py",
    old="for kind, held in ((MASTER, self.masters), (AVERAGE, averages)):",
    new="for kind, held in ((MASTER, self.masters),):",
    job="tables:ema",
    plan="dp=2",
    truth="Checkpoints lack the averages of the parameters (average=): a resumed run starts them anew.",
    says="The checkpoint has no average of enter.weight, and one device has.",
)
edit(
    "groups_on_resume",
    "optimizer/state_pieces.py",
    old="for key, value in from_json(values).items():",
    new='for key, value in from_json(saved["groups"][0]).items():',
    job="tables:job",
    plan="dp=2",
    truth=(
        "On resuming all parameter groups get the settings of the first one (weight decay, learning rate)."
    ),
    says=(
        "Resumed and saved again, without a step: updater.optimizers[0].groups[1].weight_decay is 0.2 "
        "instead of 0.0."
    ),
)
edit(
    "second_schedule_resume",
    "optimizer/optimizer_state.py",
    old='for scheduler, saved in zip(self._schedulers, values["schedulers"], strict=True):',
    new='for scheduler, saved in zip(self._schedulers[:1], values["schedulers"], strict=False):',
    job="tables:job",
    plan="dp=2",
    truth=(
        "On resuming only the first scheduler's state is restored; the second optimizer's schedule "
        "begins at its start."
    ),
    says="Resumed and saved again, without a step: updater.schedulers[1].last_epoch is 0 instead of 1.",
)
edit(
    "masters_overwritten",
    "replica/replica_state.py",
    old="if copy_key(name, MASTER) not in keys})",
    new="if copy_key(name, MASTER) in keys})",
    job="half_precision:masters",
    plan="dp=2,precision=bf16",
    truth=(
        "On resuming, the float32 masters of the checkpoint are replaced by the rounded bfloat16 parameters."
    ),
    says="Resumed and saved again, without a step: optimizer/one.bias/master of bfloat16 has other values.",
)
edit(
    "scale_not_saved",
    "replica/replica_state.py",
    old="scaling = {} if scale is None else {SCALE: scale.to_dict()}",
    new="scaling: dict[str, Any] = {}",
    job="half_precision:job",
    plan="dp=2,precision=fp16-mixed",
    truth="Checkpoints lack the loss scale: a resumed run begins with 65536 again and skips steps.",
    says="The loss scale is not in the checkpoint, and 8192 on one device.",
)
edit(
    "number_not_resumed",
    "replica/attributes/plain_numbers.py",
    old="                vars(module)[name] = values[path]\n",
    new="",
    job="remembered:cooling",
    plan="dp=2",
    truth="A number in a module's attribute (temperature) is not restored on resuming.",
    says="Resumed and saved again, without a step: cool.temperature is 2.0 instead of 1.8.",
    module="cool",
)
edit(
    "stream_from_start",
    "data/stream_data.py",
    old="islice(batches, self._steps.start, None)",
    new="islice(batches, None)",
    job="stream:job",
    plan="dp=2",
    truth="A resumed run reads the stream from its beginning in place of the step's position.",
    says="the samples of chunk 0 of step 0, chunk 1 of step 0: the data does not go on where it should",
)
edit(
    "patience_anew",
    "telemetry/best_metric.py",
    old='step=int(saved["step"]), waited=int(saved["waited"]))',
    new='step=int(saved["step"]))',
    job="tables:best",
    plan="dp=2",
    truth=(
        "On resuming the count of evaluations without a better value starts at 0: training stops "
        "later than it would."
    ),
    says="right:max has waited for 1 since step 3, not for 2 since 3.",
)
edit(
    "rows_joined_backwards",
    "replica/attributes/saved_attributes.py",
    old="leaves.append(torch.cat(found, dim))",
    new="leaves.append(torch.cat(found[::-1], dim))",
    job="remembered:job",
    plan="dp=2",
    truth=(
        "On resuming under another plan, rows of a hidden state of several chunks are joined in the "
        "wrong order."
    ),
    says="rnn.hidden has other rows.",
    module="rnn",
)
