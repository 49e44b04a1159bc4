"""Weights are read by name from whatever holds them, and only where they are touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshloom.checkpoint.mapped_tensors import MappedTensors
from meshloom.checkpoint.tensor_file import DTYPES
from meshloom.checkpoint.weights import open_weights
from meshloom.core.errors import CheckpointError
from tests.saving_jobs import save_step, weights_of


def assert_equals(found: MappedTensors, expected: dict[str, torch.Tensor]) -> None:
    assert found.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found.tensor(name).dtype == tensor.dtype and torch.equal(found.tensor(name), tensor)


def test_weights_of_a_file_a_directory_an_index_a_checkpoint_and_a_run(tmp_path: Path) -> None:
    weights = weights_of(3)
    save_file(weights, tmp_path / "any.safetensors", metadata={"format": "pt"})
    assert_equals(open_weights(tmp_path / "any.safetensors"), weights)
    (tmp_path / "one").mkdir()
    save_file(weights, tmp_path / "one/model.safetensors")
    assert_equals(open_weights(tmp_path / "one"), weights)
    (tmp_path / "several").mkdir()
    for number, (name, tensor) in enumerate(weights.items()):
        save_file({name: tensor}, tmp_path / f"several/{number}.safetensors")
    index = {"weight_map": {name: f"{number}.safetensors" for number, name in enumerate(weights)}}
    (tmp_path / "several/model.safetensors.index.json").write_text(json.dumps(index))
    assert_equals(open_weights(tmp_path / "several"), weights)
    path = save_step(tmp_path / "run", 3)
    assert_equals(open_weights(path), weights)
    assert_equals(open_weights(tmp_path / "run"), weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_a_tensor_without_elements_are_mapped(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).to(dtype).view(2, 3), "b": torch.ones(3).bool(), "none": torch.ones(0, 2)}
    save_file(tensors, tmp_path / "x.safetensors")
    found = MappedTensors([tmp_path / "x.safetensors"])
    for name, tensor in tensors.items():
        read = found.tensor(name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(read.clone().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_what_is_written_to_a_mapped_tensor_stays_out_of_its_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "x.safetensors")
    MappedTensors([tmp_path / "x.safetensors"]).tensor("a").fill_(7)
    assert MappedTensors([tmp_path / "x.safetensors"]).tensor("a").tolist() == [0, 0, 0]


def test_what_holds_no_weights_is_said(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(30)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"x.safetensors is no safetensors file, or it is truncated"):
        open_weights(file)
    with pytest.raises(CheckpointError, match=r"There is no .*nothing to read weights from"):
        open_weights(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in"):
        open_weights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(
        CheckpointError, match=r"names the file ../x.safetensors, which is not in its directory"
    ):
        open_weights(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match=r"is no index of weights: it needs a weight_map"):
        open_weights(tmp_path)
    file.write_bytes(whole)
    save_file({"a": torch.zeros(1)}, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match=r"a is in .*x.safetensors and in .*y.safetensors"):
        MappedTensors([file, tmp_path / "y.safetensors"])
