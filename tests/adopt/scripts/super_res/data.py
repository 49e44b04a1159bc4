import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset


class Patches(Dataset):
    def __init__(self, upscale_factor, first, last):
        images = torch.tensor(load_digits().images, dtype=torch.float32)[first:last] / 16
        self.images = images.unsqueeze(1)
        self.upscale_factor = upscale_factor

    def __getitem__(self, index):
        target = self.images[index]
        input = torch.nn.functional.avg_pool2d(target, self.upscale_factor)
        return input, target

    def __len__(self):
        return len(self.images)


def get_training_set(upscale_factor):
    return Patches(upscale_factor, 0, 600)


def get_test_set(upscale_factor):
    return Patches(upscale_factor, 600, 700)
