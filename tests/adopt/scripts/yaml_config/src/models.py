from torch import nn

MODELS = {}


def register(name):
    def wrap(cls):
        MODELS[name] = cls
        return cls

    return wrap


@register("mlp")
class MLP(nn.Module):
    def __init__(self, hidden_dims, dropout):
        super().__init__()
        dims = [64, *hidden_dims]
        layers = []
        for a, b in zip(dims, dims[1:]):
            layers += [nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout)]
        self.net = nn.Sequential(*layers, nn.Linear(dims[-1], 10))

    def forward(self, x):
        return self.net(x)


def build_model(cfg):
    cfg = dict(cfg)
    return MODELS[cfg.pop("name")](**cfg)
