"""An exported checkpoint is read by the programs that it is exported for, and replaces nothing by accident."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

from meshloom.checkpoint.weights import open_weights
from meshloom.cli.main import main
from meshloom.train.trainer import Trainer
from tests.precision_jobs import job_of
from tests.saving_jobs import names_in, save_step, weights_of, written_in_parallel
from tests.test_bfloat16 import masters_after


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


class Tied(nn.Module):
    """Tokens [batch, length] -> logits; the table is the last layer's weight, and a scale is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(29, 16), nn.LayerNorm(16), nn.Linear(16, 29)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)) * self.scale)


@pytest.mark.long
@pytest.mark.usefixtures("silent_export")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process reads
@pytest.mark.parametrize("plan", ["dp=2,zero=1", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("dp=2,zero=3", "pp=2,microbatches=2", "tp=2"))])  # fmt: skip
def test_masters_are_exported_as_weights(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, out = tmp_path / "run", tmp_path / "out"
    job = replace(job_of("gpt"), model=Tied)
    masters = masters_after(job, plan, out=run)
    masters["head.weight"] = masters["embed.weight"]
    found: list[dict[str, Tensor]] = []
    for kind in ("safetensors", "torch", "dcp"):
        words = ["export", str(run), "--to", kind, "--out", str(out / kind), "--masters", "--optimizer"]
        assert main(words) == 0
        assert "scale" in (said := capsys.readouterr().out) and "1 tensor without a master" in said
    found.append(load_file(out / "safetensors/model.safetensors"))
    found.append(torch.load(out / "torch", weights_only=True)["model"])
    read = {"model": {name: torch.zeros_like(each) for name, each in found[0].items()}}
    dcp.load(read, checkpoint_id=str(out / "dcp"), no_dist=True)
    found.append(read["model"])
    for each in found:
        assert each.keys() == masters.keys() and each["scale"].dtype == torch.bfloat16
        assert all(torch.equal(each[name], masters[name]) for name in masters)
    assert not torch.equal(masters["embed.weight"].to(torch.bfloat16).float(), masters["embed.weight"])
    with Trainer(replace(job, weights=out / "safetensors"), "dp=1,precision=bf16-mixed", devices="simulated") as trainer:  # fmt: skip
        assert torch.equal(trainer.replicas[0].model.state_dict()["embed.weight"], masters["embed.weight"])


@pytest.mark.long
def test_a_run_without_masters_exports_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with Trainer(job_of("mlp"), "dp=1", devices="simulated", out=tmp_path / "run") as trainer:
        trainer.fit()
    assert main(["export", str(tmp_path / "run"), "--to", "torch", "--out", str(tmp_path / "out"), "--masters"]) == 2  # fmt: skip
    assert "saved under dp=1, has no masters" in capsys.readouterr().err
