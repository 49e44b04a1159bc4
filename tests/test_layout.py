"""Files are safetensors as the library reads them, whatever memory the tensors lie in."""

from __future__ import annotations

import zlib

import pytest
import safetensors.torch
import torch
from torch import nn

from meshloom.checkpoint.format import Piece, meta_text, read_meta
from meshloom.checkpoint.tensor_file import DTYPES, write_tensors
from meshloom.core.errors import CheckpointError


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_back_by_the_library(dtype, tmp_path):
    tensor = torch.arange(6).to(dtype).view(2, 3)
    tensors = {"scalar": tensor[0, 1], "turned": tensor.t(), "none": tensor[:0]}
    tensors |= {"wide": torch.ones(3, dtype=torch.float64), "byte": torch.ones(3).bool()}
    facts = write_tensors(tmp_path / "x.safetensors", tensors)
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(
            read[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        )
    text = (tmp_path / "x.safetensors").read_bytes()
    assert facts == {"bytes": len(text), "crc32": zlib.crc32(text)}


def test_tied_parameters_load_strictly(tmp_path):
    def build():
        model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = build(), build()
    write_tensors(tmp_path / "x.safetensors", model.state_dict())
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "x.safetensors"), strict=True)
    assert other[0].weight is other[1].weight and torch.equal(other[0].weight, model[0].weight)


def test_slices_of_one_bucket_are_written_by_themselves(tmp_path):
    bucket = torch.arange(1000.0)
    facts = write_tensors(tmp_path / "x.safetensors", {"a": bucket[:3], "b": bucket[3:5].view(1, 2)})
    assert facts["bytes"] < 300
    assert safetensors.torch.load_file(tmp_path / "x.safetensors")["b"].tolist() == [[3.0, 4.0]]


def test_no_tensors_at_all(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {})
    assert safetensors.torch.load_file(tmp_path / "x.safetensors") == {}


def test_dtype_that_the_format_lacks(tmp_path):
    with pytest.raises(
        CheckpointError, match="buffer is torch.complex128, and a checkpoint holds only F64, F32"
    ):
        write_tensors(tmp_path / "x.safetensors", {"buffer": torch.ones(1, dtype=torch.complex128)})


def test_what_is_no_tensor(tmp_path):
    with pytest.raises(
        CheckpointError, match="norm._extra_state is of type dict, and a checkpoint holds tensors only"
    ):
        write_tensors(tmp_path / "x.safetensors", {"norm._extra_state": {}})


def test_piece_is_as_long_as_it_says():
    with pytest.raises(AssertionError):
        Piece("key", torch.ones(3), 0, 2, (5,))


def test_meta_is_read_as_written_or_not_at_all(tmp_path):
    body = {"values": [0.1, float("inf"), None, "µ", 2**70], "step": 3}
    text = meta_text(body)
    (tmp_path / "meta.json").write_text(text)
    assert read_meta(tmp_path) == body
    for damaged in (text[:-5], text.replace('"step": 3', '"step": 4'), "[]", "{}", "3"):
        (tmp_path / "meta.json").write_text(damaged)
        assert read_meta(tmp_path) is None
