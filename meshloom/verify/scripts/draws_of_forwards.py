"""What makes a forward of shares another one than of the whole batch: draws, dropout, statistics of a batch, lower precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from meshloom.verify.reference.observers import CastWatch, generators_now
from meshloom.verify.scripts.recorder import replaced

_DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(kw_only=True)
class ForwardNotes:
    """draws: whether a forward in training has moved a generator. lowered: precisions below the parameters' that are computed
    in. batch_norms: modules that normalize by the statistics of their batch."""

    draws: bool = False
    lowered: list[str] = field(default_factory=list[str])
    batch_norms: list[str] = field(default_factory=list[str])

    def watch(self, module: nn.Module, precision: torch.dtype) -> None:
        """Note what this module's forwards do from now on."""
        inside: list[tuple[str, CastWatch]] = []

        def before(*_: object) -> None:
            watch = CastWatch(precision)
            inside.append((generators_now(_device(module)), watch))
            watch.__enter__()

        def after(*_: object) -> None:
            drawn, watch = inside.pop()
            watch.__exit__(None, None, None)
            if torch.is_grad_enabled():
                self._note(module, watch, drawn != generators_now(_device(module)))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    def _note(self, module: nn.Module, watch: CastWatch, drawn: bool) -> None:
        self.draws |= drawn
        self.lowered = sorted({*self.lowered, *(each.dtype for each in watch.casts)})
        norms = [
            name for name, each in module.named_modules() if isinstance(each, _BATCH_NORMS) and each.training
        ]
        self.batch_norms = sorted({*self.batch_norms, *norms})


@contextmanager
def without_dropout() -> Iterator[None]:
    """A context in which torch's dropout leaves what it is given, in modules and functions alike."""

    def leaves(_: Any) -> Any:
        return lambda x=None, *args, **kwargs: kwargs.get("input", x)

    def attends(attention: Any) -> Any:
        def attend(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("dropout_p", None)
            return attention(*args[:4], *[0.0 for _ in args[4:5]], *args[5:], **kwargs)

        return attend

    def recurrent(init: Any) -> Any:
        def made(self: nn.RNNBase, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.dropout = 0.0

        return made

    with ExitStack() as stack:
        for owner, name in ((functional, name) for name in _DROPOUT):
            stack.enter_context(replaced(owner, name, leaves))
        stack.enter_context(replaced(torch, "dropout", leaves))
        stack.enter_context(replaced(functional, "scaled_dot_product_attention", attends))
        stack.enter_context(replaced(nn.RNNBase, "__init__", recurrent))
        yield


def _device(module: nn.Module) -> torch.device:
    return next((each.device for each in module.parameters()), torch.device("cpu"))
