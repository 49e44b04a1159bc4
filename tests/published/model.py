"""One published model of the set: its configuration at the size that people train, and batches as long as
they train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.job_functions import Loss
from tests.jobs import Samples, own_loss

# number of samples -> their tensors, the first dim of each being the samples
Make = Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model and what a chunk of its training has.

    build: without arguments, as a user would. make: samples, without values worth the name: models are read
    by shapes. chunk: samples of a microbatch. dense: a dense transformer, of which 99 % of parameters and
    FLOPs can be divided. huge: also described under dp=8,pp=8,tp=8.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    make: Make
    chunk: int
    size: str
    loss: Callable[[Any, Any], Loss]
    dense: bool
    huge: bool

    def job(self, num_chunks: int) -> Job:
        """Its job, in which a batch is so many chunks."""
        return Job(
            model=self.build,
            loss=self.loss,
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
            data=lambda: Samples(**self.make(num_chunks * self.chunk)),
            batch_size=num_chunks * self.chunk,
            steps=1,
        )


def published(
    name: str,
    kind: str,
    size: str,
    build: Callable[[], nn.Module],
    make: Make,
    *,
    chunk: int,
    loss: Callable[[Any, Any], Loss] = own_loss,
    dense: bool = False,
    huge: bool = False,
) -> Published:
    """A model of the set. size: what a sample is, in words."""
    return Published(
        name=name,
        kind=kind,
        build=build,
        make=make,
        chunk=chunk,
        size=size,
        loss=loss,
        dense=dense,
        huge=huge,
    )


def from_transformers(
    name: str,
    kind: str,
    size: str,
    model: str,
    make: Make,
    settings: Mapping[str, Any] | None = None,
    *,
    config: str | None = None,
    chunk: int,
    dense: bool = False,
    huge: bool = False,
) -> Published:
    """A model class of `transformers` with its default configuration, but for `settings`."""

    def build() -> nn.Module:
        import transformers  # here, because listing the set need not wait for it

        kind_of_model = getattr(transformers, model)
        return kind_of_model(
            (getattr(transformers, config) if config else kind_of_model.config_class)(**(settings or {}))
        )

    return published(name, kind, size, build, make, chunk=chunk, dense=dense, huge=huge)


def tokens(length: int, **others: int) -> Make:
    """Words [samples, length] and as many labels. others: name -> length of further words."""

    def make(samples: int) -> dict[str, Tensor]:
        lengths = {"input_ids": length, "labels": length, **others}
        return {
            name: torch.ones(samples, 1, dtype=torch.long).expand(samples, each)
            for name, each in lengths.items()
        }

    return make


def pictures(height: int, width: int, *labels: int) -> Make:
    """Pictures [samples, 3, height, width], and a class each, or one for every place of [labels]."""

    def make(samples: int) -> dict[str, Tensor]:
        pixels = torch.zeros(samples, 1, 1, 1).expand(samples, 3, height, width)
        return {"pixel_values": pixels, "labels": torch.zeros(samples, *labels, dtype=torch.long)}

    return make
