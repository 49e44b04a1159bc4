"""Published models at the sizes that people train, described by shapes alone; nothing is downloaded."""

from __future__ import annotations

from tests.published.decoders import DECODERS
from tests.published.encoders import ENCODERS
from tests.published.experts import EXPERTS
from tests.published.model import Published
from tests.published.own import OWN
from tests.published.speech import SPEECH
from tests.published.vision import VISION

__all__ = ["PUBLISHED", "Published"]

PUBLISHED: dict[str, Published] = {
    each.name: each for each in (*DECODERS, *EXPERTS, *ENCODERS, *SPEECH, *VISION, *OWN)
}
