"""The recipe of mixed precision: autocast, a scaler, accumulation and clipping, in one loop."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
batch_size, in_size, out_size, num_layers, epochs = 16, 64, 10, 3, 2
use_amp = True


def make_net(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers.append(torch.nn.Linear(in_size, in_size))
        layers.append(torch.nn.ReLU())
    layers.append(torch.nn.Linear(in_size, out_size))
    return torch.nn.Sequential(*layers)


images, labels = load_digits(return_X_y=True)
loader = DataLoader(
    TensorDataset(torch.tensor(images[:1024], dtype=torch.float32) / 16, torch.tensor(labels[:1024])),
    batch_size,
    shuffle=False,
)
loss_fn = torch.nn.CrossEntropyLoss()
net = make_net(in_size, out_size, num_layers)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled=use_amp)

for epoch in range(epochs):
    for input, target in loader:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=use_amp):
            output = net(input)
            loss = loss_fn(output.float(), target)
        scaler.scale(loss).backward()

        # Unscales the gradients of the optimizer's assigned params in-place
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    print(epoch, loss.item())
