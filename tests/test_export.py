"""An exported checkpoint is read by the programs that it is exported for, and replaces nothing by accident."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from meshloom.checkpoint.weights import open_weights
from meshloom.cli.main import main
from tests.saving_jobs import names_in, save_step, weights_of, written_in_parallel


def equal(found: dict[str, Tensor], step: int = 7) -> bool:
    expected = weights_of(step)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], each) for name, each in expected.items()
    )


def export(run: Path, kind: str, out: Path, *more: str) -> int:
    return main(["export", str(run), "--to", kind, "--out", str(out), *more])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process reads
def test_torch_and_safetensors_and_dcp_read_what_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_step(tmp_path / "run", 7)
    out = tmp_path / "new" / "weights"
    assert export(tmp_path / "run", "torch", out.with_suffix(".pt")) == 0
    assert equal(torch.load(out.with_suffix(".pt"), weights_only=True))
    assert export(tmp_path / "run", "safetensors", out) == 0
    assert equal(load_file(out / "model.safetensors"))
    assert capsys.readouterr().out.endswith(
        f"{out} holds the weights of {tmp_path / 'run/step-00000007'} (step 7) as safetensors.\n"
    )
    assert export(tmp_path / "run", "dcp", tmp_path / "dcp") == 0
    read: dict[str, Any] = {"model": {name: torch.zeros_like(each) for name, each in weights_of(1).items()}}
    dcp.load(read, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert equal(read["model"])
    assert names_in(tmp_path / "new") == ["weights", "weights.pt"]


def test_files_and_their_index_and_configuration_are_copied(tmp_path: Path) -> None:
    def writing(weights: Any, pieces: Any) -> Any:
        return written_in_parallel(weights, pieces, file_bytes=50)

    save_step(tmp_path / "run", 7, writing=writing, config_files={"config.json": b"{}"})
    assert export(tmp_path / "run", "safetensors", tmp_path / "out") == 0
    assert names_in(tmp_path / "out") == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip
    assert json.loads((tmp_path / "out/config.json").read_text()) == {}
    opened = open_weights(tmp_path / "out")
    assert equal({name: opened.tensor(name) for name in opened.entries})


def test_nothing_is_replaced_unless_asked_and_other_files_never(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    path = save_step(run, 7)
    for kind in ("safetensors", "dcp", "torch"):
        assert export(run, kind, out, "--overwrite") == 0  # in place of the one before it
        assert export(run, kind, out) == 2
        assert f"{out} is there already. Give another path, or --overwrite" in capsys.readouterr().err
    out.unlink()
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert export(run, "torch", out, "--overwrite") == 2
    assert f"{out} also holds thesis.txt, and is not replaced." in capsys.readouterr().err
    for own in (run, path, path / "model.safetensors"):
        assert export(run, "torch", own, "--overwrite") == 2
        assert "is or holds the checkpoint itself" in capsys.readouterr().err
    assert names_in(tmp_path) == ["out", "run"] and names_in(out) == ["thesis.txt"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save_step(tmp_path / "run", 7) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert export(tmp_path / "run", "torch", tmp_path / "out") == 2
    assert "is damaged" in capsys.readouterr().err and names_in(tmp_path) == ["run"]
