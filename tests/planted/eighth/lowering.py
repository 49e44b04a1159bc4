"""Bugs in precisions."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "float16_loss_not_widened",
    "core/losses/loss_sum.py",
    old="        mean_or_sum = mean_or_sum.float()\n",
    new="        mean_or_sum = mean_or_sum.half()\n",
    job="precise:job",
    plan="dp=2,precision=fp16-mixed",
    truth=(
        "A loss in float16 stays in float16 when it is multiplied by the samples and the scale: it overflows with any large "
        "scale, so the first steps are skipped until the scale is small."
    ),
)
EIGHTH.edit(
    "statistics_lowered",
    "optimizer/bfloat16/lowered.py",
    old="return isinstance(module, _NormBase) and module.running_mean is not None",
    new="return isinstance(module, _NormBase) and module.running_mean is None",
    job="precise:normed",
    plan="dp=2,precision=bf16",
    truth=(
        "Under precision=bf16 layers with running statistics are lowered to bfloat16 as well, so running_mean and "
        "running_var are rounded to 8 binary digits in each step."
    ),
    module="norm",
)
