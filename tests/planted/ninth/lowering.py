"""Bugs in precisions."""

from __future__ import annotations

from tests.planted.ninth import NINTH

NINTH.edit(
    "cast_of_trainable_parts",
    "exchange/units/unit_access.py",
    old="        number = unit.parts.index(part)\n",
    new="        number = (unit.parts if trained is None else unit.trainable_parts).index(part)\n",
    job="lowered:adapters",
    plan="dp=2,zero=3,precision=bf16-mixed",
    truth=(
        "With zero=3 and autocast, the cast of a trained weight that backward wants back is read from another part of "
        "its unit (the frozen one, since the number counts trained parts only), so backward multiplies by wrong weights "
        "and gradients of what comes before are wrong; outputs are right."
    ),
)

NINTH.edit(
    "masters_rounded_on_resume",
    "replica/replica_state.py",
    old="masters.take_parameters({name for name in masters.parts if copy_key(name, MASTER) not in keys})",
    new='masters.take_parameters({name for name in masters.parts if f"{name}/{MASTER}" not in keys})',
    job="lowered:small_steps",
    plan="dp=2,precision=bf16",
    truth=(
        "On resuming under precision=bf16 the saved float32 masters are looked for under a wrong key and overwritten by "
        "the rounded bfloat16 parameters, so what they had gained below bfloat16's digits is lost."
    ),
    says="optimizer/0.bias/master of bfloat16 has other values",
)

NINTH.edit(
    "rounding_draws_of_slice",
    "optimizer/bfloat16/stochastic.py",
    old="index = torch.arange(slice_.start, slice_.stop, device=value.device)",
    new="index = torch.arange(slice_.stop - slice_.start, device=value.device)",
    job="lowered:adam",
    plan="dp=2,zero=1,precision=bf16-stochastic",
    truth=(
        "Under bf16-stochastic the draws of a rank's slice are numbered from the slice's own beginning instead of the "
        "parameter's, so the second part of a divided parameter is rounded by other draws than on one device."
    ),
    says="they are rounded by other draws",
    module="2",
)

NINTH.edit(
    "scale_starts_anew",
    "replica/replica_state.py",
    old="if replica.sums.scale is not None and SCALE in checkpoint.values:",
    new="if replica.sums.scale is not None and SCALE in keys:",
    job="lowered:overflowing",
    plan="dp=2,precision=fp16-mixed",
    truth=(
        "On resuming under fp16-mixed the saved loss scale is looked for among the tensors and not restored: it starts "
        "at 65536 again, gradients overflow and steps are skipped."
    ),
    says="loss_scale.scale is 65536.0 instead of 1024.0",
)

NINTH.edit(
    "statistics_without_affine",
    "optimizer/bfloat16/lowered.py",
    old="return isinstance(module, _NormBase) and module.running_mean is not None",
    new="return isinstance(module, _NormBase) and module.affine",
    job="lowered:statistics",
    plan="dp=2,precision=bf16",
    truth=(
        "Under precision=bf16 a batch norm without weight and bias gets its running statistics in bfloat16, where small "
        "changes are lost."
    ),
    says="computes something else than on one device, as with other settings or in another precision",
    module="1",
)
