"""Model families that the tests share: tiny jobs of distinct architectures, built from random starts, nothing
downloaded.

`FAMILIES` can be trained; `REFUSED` must be refused in one sentence. All have six samples, batches of three
and two steps.
"""

from __future__ import annotations

from tests.families.decoders import DECODERS
from tests.families.encoder_decoders import ENCODER_DECODERS
from tests.families.encoders import ENCODERS
from tests.families.experts import EXPERTS
from tests.families.family import Family
from tests.families.layers import LAYERS
from tests.families.multimodal import MULTIMODAL
from tests.families.own import OWN
from tests.families.own import REFUSED as _REFUSED
from tests.families.speech import SPEECH
from tests.families.state_space import STATE_SPACE
from tests.families.vision import VISION

__all__ = ["FAMILIES", "REFUSED", "Family"]


def _by_name(*groups: list[Family]) -> dict[str, Family]:
    families = [family for group in groups for family in group]
    by_name = {family.name: family for family in families}
    assert len(by_name) == len(families), "two families have one name"
    return by_name


FAMILIES = _by_name(
    DECODERS, ENCODERS, ENCODER_DECODERS, VISION, SPEECH, STATE_SPACE, EXPERTS, MULTIMODAL, LAYERS, OWN
)
REFUSED = _by_name(_REFUSED)
