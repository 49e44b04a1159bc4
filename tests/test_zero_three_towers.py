"""zero=3 with tp and with pp on models of several towers: what one tower gives is read by many units of another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.families import FAMILIES
from tests.verified import equals_one_device

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

TOWERS = (
    "whisper", "speech_to_text", "moonshine", "t5", "umt5", "bart", "pegasus", "clip", "siglip", "blip", "llava", "vision_encoder_decoder",
)  # fmt: skip


@pytest.mark.covering("whisper-dp=2,tp=2")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("plan", ["dp=2,tp=2,zero=3", "dp=2,pp=2,microbatches=2,zero=3"])
@pytest.mark.parametrize("family", TOWERS)
def test_units_that_read_the_same_are_gathered_and_kept(family: str, plan: str) -> None:
    equals_one_device(replace(FAMILIES[family].make_job(False), batch_size=6), plan)
