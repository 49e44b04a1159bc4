"""`autograd.Function`s and hooks as people write them, and weights made anew in every forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, sgd

DATA = (normal(21, 7), integers(22, 5))


def _cross_entropy(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def _of(model: Any, **more: Any) -> Job:
    return job_of(model, _cross_entropy, DATA, **more)


class Binarize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[x.ge(1)] = 0
        grad_input[x.le(-1)] = 0
        return grad_input


class BinaryLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean(1, keepdim=True).detach()
        return F.linear(Binarize.apply(x), Binarize.apply(self.weight) * scale, self.bias)


def binary_network() -> Job:
    return _of(
        lambda: nn.Sequential(nn.Linear(7, 11), nn.Tanh(), BinaryLinear(11, 11), nn.Tanh(), nn.Linear(11, 5))
    )


class UniformQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        n = float(2**bits - 1)
        return torch.round(x * n) / n

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        return grad_output.clone(), None


class DoReFa(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = torch.tanh(self.weight)
        weight = weight / 2 / torch.max(torch.abs(weight)) + 0.5
        weight = 2 * UniformQuantize.apply(weight, 3) - 1
        return F.linear(UniformQuantize.apply(torch.clamp(x, 0, 1), 4), weight, self.bias)


def dorefa() -> Job:
    return _of(lambda: nn.Sequential(nn.Linear(7, 9), nn.ReLU(), DoReFa(9, 9), nn.ReLU(), nn.Linear(9, 5)))


class LSQ(torch.autograd.Function):
    """A learnt step size, whose gradient is a sum over everything that it quantised."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, step: Tensor, g: float, low: int, high: int) -> Tensor:
        ctx.save_for_backward(value, step)
        ctx.other = g, low, high
        return (value / step).round().clamp(low, high) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        value, step = ctx.saved_tensors
        g, low, high = ctx.other
        q = value / step
        small, big = (q < low).to(grad.dtype), (q > high).to(grad.dtype)
        middle = 1.0 - small - big
        step_grad = ((small * low + big * high + middle * (-q + q.round())) * grad * g).sum().unsqueeze(dim=0)
        return middle * grad, step_grad, None, None, None


class LSQLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.alpha = nn.Parameter(self.weight.detach().abs().mean().view(1) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = LSQ.apply(self.weight, self.alpha, 1.0 / (self.weight.numel() * 7) ** 0.5, -8, 7)
        return F.linear(x, weight, self.bias)


def learned_step_size() -> Job:
    return _of(
        lambda: nn.Sequential(nn.Linear(7, 9), nn.GELU(), LSQLinear(9, 13), nn.GELU(), nn.Linear(13, 5))
    )


class GradientReversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lambda_: float) -> Tensor:
        ctx.lambda_ = lambda_
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.neg() * ctx.lambda_, None


class DomainAdversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 9), nn.ReLU())
        self.classes, self.domain = (
            nn.Linear(9, 5),
            nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 2)),
        )

    def forward(self, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.classes(features), self.domain(GradientReversal.apply(features, alpha))


def _adversarial(model: Any, batch: Any) -> Tensor:
    x, y = batch
    classes, domain = model(x, 0.3)
    is_source = (x[:, 0] > 0).long()
    return F.cross_entropy(classes[is_source == 1], y[is_source == 1], reduction="sum") / len(
        y
    ) + F.cross_entropy(domain, is_source)


def gradient_reversal() -> Job:
    return job_of(DomainAdversarial, _adversarial, DATA)


class SwishImplementation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, i: Tensor) -> Tensor:
        result = i * torch.sigmoid(i)
        ctx.save_for_backward(i)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        i = ctx.saved_tensors[0]
        sigmoid_i = torch.sigmoid(i)
        return grad_output * (sigmoid_i * (1 + i * (1 - sigmoid_i)))


class MemoryEfficientSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SwishImplementation.apply(x)


def efficient_swish() -> Job:
    return _of(
        lambda: nn.Sequential(
            nn.Linear(7, 15),
            MemoryEfficientSwish(),
            nn.Linear(15, 15),
            MemoryEfficientSwish(),
            nn.Linear(15, 5),
        )
    )


class SparsemaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int = -1) -> Tensor:
        ctx.dim = dim
        max_val, _ = x.max(dim=dim, keepdim=True)
        x = x - max_val
        srt, _ = torch.sort(x, descending=True, dim=dim)
        cumsum = srt.cumsum(dim) - 1
        rhos = torch.arange(1, x.size(dim) + 1, dtype=x.dtype)
        support = rhos * srt > cumsum
        size = support.sum(dim=dim).unsqueeze(dim)
        tau = cumsum.gather(dim, size - 1) / size.to(x.dtype)
        output = torch.clamp(x - tau, min=0)
        ctx.save_for_backward(size, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        size, output = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[output == 0] = 0
        v_hat = grad_input.sum(dim=ctx.dim) / size.to(output.dtype).squeeze(ctx.dim)
        return torch.where(output != 0, grad_input - v_hat.unsqueeze(ctx.dim), grad_input), None


class SparseAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.k = nn.Embedding(17, 9), nn.Linear(9, 7), nn.Linear(9, 7)
        self.v, self.out = nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return self.out((x + SparsemaxFunction.apply(scores, -1) @ self.v(x)).mean(1))


def sparsemax_attention() -> Job:
    return job_of(SparseAttention, _cross_entropy, (integers(23, 17, 6), DATA[1]))


class Extractor(nn.Module):
    """Features of inner layers, taken by forward hooks into a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 11), nn.ReLU(), nn.Linear(11, 5))
        self.features: dict[str, Tensor] = {}
        for name in ("1", "3"):
            getattr(self.net, name).register_forward_hook(self.save(name))

    def save(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            self.features[name] = output

        return hook

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(x), self.features


def _with_features(model: Any, batch: Any) -> Tensor:
    y, features = model(batch[0])
    return F.cross_entropy(y, batch[1]) + 1e-2 * sum(each.pow(2).mean() for each in features.values())


def features_by_hooks() -> Job:
    return job_of(Extractor, _with_features, DATA)


class Teacher(nn.Module):
    """A frozen teacher in evaluation mode beside its student; both give logits and hidden states."""

    def __init__(self) -> None:
        super().__init__()
        build = lambda width: nn.Sequential(nn.Linear(7, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 5))  # noqa: E731  # fmt: skip
        self.teacher, self.student = build(13), build(7)
        self.teacher.eval()
        for p in self.teacher.parameters():
            p.requires_grad = False

    def train(self, mode: bool = True) -> Teacher:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def _distill(model: Any, batch: Any, T: float = 3.0) -> Tensor:  # noqa: N803
    y, wanted = model(batch[0])
    soft = nn.KLDivLoss(reduction="batchmean")(F.log_softmax(y / T, dim=1), F.softmax(wanted / T, dim=1))
    return 0.7 * T * T * soft + 0.3 * F.cross_entropy(y, batch[1])


def distillation() -> Job:
    return job_of(Teacher, _distill, DATA, optimizer=sgd)


def spectral_norm() -> Job:
    def model() -> nn.Module:
        norm = nn.utils.spectral_norm
        return nn.Sequential(norm(nn.Linear(7, 11)), nn.LeakyReLU(0.2), norm(nn.Linear(11, 9)), nn.LeakyReLU(0.2), nn.Linear(9, 5))  # fmt: skip

    return _of(model)


def spectral_parametrization() -> Job:
    def model() -> nn.Module:
        norm = parametrizations.spectral_norm
        return nn.Sequential(norm(nn.Linear(7, 9)), nn.Tanh(), norm(nn.Linear(9, 9)), nn.Tanh(), nn.Linear(9, 5))  # fmt: skip

    return _of(model)


def weight_norm() -> Job:
    def model() -> nn.Module:
        norm = parametrizations.weight_norm
        return nn.Sequential(norm(nn.Linear(7, 9)), nn.ELU(), norm(nn.Linear(9, 11)), nn.ELU(), nn.Linear(11, 5))  # fmt: skip

    return _of(model)


def pruned() -> Job:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 11), nn.ReLU(), nn.Linear(11, 5))
        for layer in (net[0], net[2]):
            prune.l1_unstructured(layer, name="weight", amount=0.4)
        return net

    return _of(model)


class Skew(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(x.triu(1) - x.triu(1).transpose(-1, -2))


def orthogonal_parametrization() -> Job:
    def model() -> nn.Module:
        layers = [nn.Linear(9, 9) for _ in range(2)]
        for layer in layers:
            parametrize.register_parametrization(layer, "weight", Skew())
        return nn.Sequential(nn.Linear(7, 9), layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Linear(9, 5))

    return _of(model)


def clipped_gradients_of_activations() -> Job:
    """A tensor hook that scales, on the output of each layer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.one(x))
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 0.5)
            x = torch.tanh(self.two(x))
            return self.head(x)

    return _of(Net)
