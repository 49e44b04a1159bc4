"""The examples run, in small form, the way their docstrings say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshloom.cli.main import main

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/19_own_script.py"
OTHERS = [ROOT / "examples" / f"{each}.py" for each in ("12_gan", "15_resnet", "20_transformers_trainer")]
LOOPS = {*OTHERS, SCRIPT}  # which hold no job
EXAMPLES = sorted({*(ROOT / "examples").glob("[0-9]*.py")} - LOOPS)

COOKBOOK = ["13_small_gpt", "14_lora", "16_speech", "17_recommendation", "18_diffusion"]

alone = pytest.mark.long  # one process that takes one core
together = pytest.mark.processes


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, (
        f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


def records(text: str) -> dict[str, list[dict[str, object]]]:
    """Records of `--json -` by their event."""
    found: dict[str, list[dict[str, object]]] = {}
    for line in text.splitlines():
        record = json.loads(line)
        found.setdefault(record["event"], []).append(record)
    return found


@alone
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_every_example_trains_on_simulated_devices(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            ["train", str(example), "--plan", "dp=2", "--devices", "simulated", "--steps", "1", "--json", "-"]
        )
        == 0
    )
    assert len(records(capsys.readouterr().out)["step"]) == 1


@alone
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for name in COOKBOOK for plan in ("dp=2", "tp=2", "pp=2,microbatches=2")],
)
def test_the_cookbook_verifies(
    name: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    words = ["--plan", plan, "--devices", "simulated", "--steps", "2", "--quick"]
    assert main(["verify", str(ROOT / f"examples/{name}.py"), *words]) == 0
    assert "EQUAL" in capsys.readouterr().out


@alone
@pytest.mark.slow
def test_the_first_example_of_the_readme_trains_and_is_equal_to_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    source = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "job.py").write_text(source)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", "job.py", "--plan", "dp=2", "--devices", "simulated", "--steps", "2", "--json", "-"])
        == 0
    )
    assert len(records(capsys.readouterr().out)["step"]) == 2
    assert main(["verify", "job.py", "--plan", "dp=2,tp=2", "--devices", "simulated", "--steps", "2"]) == 0
    assert "EQUAL" in capsys.readouterr().out


@together
@pytest.mark.parametrize("name", ["01_gpt_bytes", "02_digits"])
@pytest.mark.slow
def test_real_input_trains_on_processes_and_the_loss_falls(name: str, tmp_path: Path):
    steps = {"01_gpt_bytes": 4, "02_digits": 30}[name]
    plan = ["--plan", "dp=2,microbatches=2", "--devices", "cpu", "--steps", str(steps)]
    done = run(
        "-m", "meshloom", "train", str(ROOT / "examples" / f"{name}.py"), *plan, "--json", "-", cwd=tmp_path
    )
    losses = [record["loss"] for record in records(done.stdout)["step"]]
    assert len(losses) == steps
    assert losses[-1] < losses[0]
    assert len(records(done.stdout)["evaluation"]) == 1


@alone
@pytest.mark.slow  # tests/test_verify.py verifies such plans
def test_digits_verify_with_synchronised_statistics(tmp_path: Path):
    plan = ["--plan", "dp=4,sync_batch_norm=true", "--devices", "simulated", "--steps", "2"]
    run("-m", "meshloom", "verify", str(ROOT / "examples/02_digits.py"), *plan, cwd=tmp_path)


@pytest.mark.slow
@alone
def test_data_parallel_shows_the_mean_of_four_gradients(tmp_path: Path):
    lines = run(str(ROOT / "examples/03_data_parallel.py"), cwd=tmp_path).stdout.splitlines()
    rows = {
        line[:34].strip(): [float(value) for value in line[34:].split()]
        for line in lines
        if len(line) == 34 + 3 * 12
    }
    ranks = [rows[f"rank {rank}, its 16 samples"] for rank in range(4)]
    # printed with 6 digits
    assert rows["divided by dp = 4"] == pytest.approx(
        [sum(values) / 4 for values in zip(*ranks, strict=True)], abs=2e-6
    )
    # float32, sums in another order
    assert rows["one device, all 64 samples"] == pytest.approx(rows["divided by dp = 4"], abs=2e-6, rel=1e-6)
    assert all(rows[f"rank {rank}, after"] == rows["rank 0, after"] for rank in range(4))
    assert rows["rank 0, after"] != rows["all ranks, before"]


@together
@pytest.mark.slow
def test_own_loop_takes_the_same_decisions_simulated_and_under_torchrun(tmp_path: Path):
    example = str(ROOT / "examples/04_own_loop.py")
    simulated = run(example, cwd=tmp_path).stdout.splitlines()
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--log-dir",
        str(tmp_path),
        "--nproc-per-node",
        "4",
    ]
    processes = run(*torchrun, example, cwd=tmp_path).stdout.splitlines()
    assert len(simulated) == len(processes)
    for one, other in zip(simulated, processes, strict=True):
        held_out = float(one.split()[-1]), float(other.split()[-1])
        # hundreds of float32 steps whose sums are taken in two orders
        assert held_out[0] == pytest.approx(held_out[1], abs=0.01)
    assert held_out[0] < 0.2


@together
def test_a_script_of_its_own_prints_under_a_plan_what_it_prints_by_itself(tmp_path: Path):
    words = ["--epochs", "2", "--out", "digits.pt"]
    alone = run(str(SCRIPT), *words, cwd=tmp_path).stdout
    (tmp_path / "digits.pt").unlink()
    plan = ["--plan", "dp=2", "--devices", "cpu"]
    assert run("-m", "meshloom", "run", str(SCRIPT), *plan, "--", *words, cwd=tmp_path).stdout == alone
    assert (tmp_path / "digits.pt").exists() and alone.count("accuracy") == 2


@pytest.mark.slow
@together
@pytest.mark.parametrize("example", sorted(LOOPS), ids=lambda path: path.stem)
def test_loops_are_verified(example: Path, tmp_path: Path):
    words = ["verify", str(example), "--plan", "dp=2", "--devices", "cpu"]
    assert "EQUAL" in run("-m", "meshloom", *words, cwd=tmp_path).stdout


@pytest.mark.slow
@alone
def test_a_script_and_its_parallel_form_have_the_same_losses(tmp_path: Path):
    done = run(str(ROOT / "examples/05_from_a_script.py"), cwd=tmp_path)
    assert done.stdout.endswith("The losses are the same up to rounding.\n")


@alone
@pytest.mark.slow  # tests/test_user_rules.py compares the same
def test_an_own_operator_has_the_losses_of_one_device_with_its_rule_and_without(tmp_path: Path):
    lines = run(str(ROOT / "examples/07_own_operator.py"), cwd=tmp_path).stdout.splitlines()
    rows = {line[:20].strip(): [float(value) for value in line[20:].split()] for line in lines}
    assert len(rows) == 6 and all(len(losses) == 6 for losses in rows.values())
    for losses in rows.values():
        # float32, sums in another order, 6 steps of AdamW
        assert losses == pytest.approx(rows["tp=1  with the rule"], rel=1e-4)


@pytest.mark.slow
@alone
def test_tensor_parallel_shows_one_product_twice_and_verifies_a_transformer(tmp_path: Path):
    lines = run(str(ROOT / "examples/06_tensor_parallel.py"), cwd=tmp_path).stdout.splitlines()

    def matrix(name: str, num_rows: int, after: str = "") -> list[list[float]]:
        start = next(number for number, line in enumerate(lines) if line.startswith(after))
        at = next(
            number for number, line in enumerate(lines) if number >= start and line.strip().startswith(name)
        )
        return [[float(value) for value in line[46:].split()] for line in lines[at : at + num_rows]]

    x, w, d_y = matrix("X  ", 2), matrix("W  ", 4), matrix("dY  ", 2)
    y = [
        [sum(a * row[column] for a, row in zip(sample, w, strict=True)) for column in range(4)]
        for sample in x
    ]
    assert matrix("all-gather: Y", 2) == y
    assert matrix("all-reduce: Y", 2) == y
    assert matrix("all-reduce: dX", 2) == [
        [sum(a * b for a, b in zip(gradient, row, strict=True)) for row in w] for gradient in d_y
    ]
    whole = [[sum(x[sample][i] * d_y[sample][o] for sample in range(2)) for o in range(4)] for i in range(4)]
    updated = [[w[i][o] - 0.5 * whole[i][o] / 2 for o in range(4)] for i in range(4)]
    name = "meshloom, rank {}: W_{} after a step"
    columns = [matrix(name.format(rank, rank), 4, after="Split by columns") for rank in range(2)]
    rows = [matrix(name.format(rank, rank), 2, after="Split by rows") for rank in range(2)]
    assert [one + other for one, other in zip(*columns, strict=True)] == updated
    assert rows[0] + rows[1] == updated
    second = [
        line
        for line in lines
        if line.startswith(("  blocks.0-1.", "  blocks.1.")) and "weight" in line and "[" not in line
    ]
    assert len(second) == 6
    assert sum(line.count("1 all_reduce") for line in second) == 4  # two forward, two backward
    assert not [
        line for line in second if "all_gather" in line or "reduce_scatter" in line or "all_to_all" in line
    ]


@pytest.mark.slow
@together
def test_layers_on_devices_send_what_is_predicted_and_lose_what_one_device_loses(tmp_path: Path):
    first_half = f"import runpy; runpy.run_path({str(ROOT / 'examples/08_layers_on_devices.py')!r})['train_and_compare']()"
    words = [line.split() for line in run("-c", first_half, cwd=tmp_path).stdout.splitlines()]
    held = {
        line[2]: int(line[3].replace(",", ""))
        for line in words
        if line[:1] == ["rank"] and line[-1:] == ["parameters"]
    }
    assert held == {
        "first": 64 * 1024 + 1024 + 1024 * 1024 + 1024,
        "second": 1024 * 1024 + 1024 + 1024 * 10 + 10,
    }
    epochs = [[float(word) for word in line] for line in words if len(line) == 4 and line[0].isdecimal()]
    assert [int(epoch[0]) for epoch in epochs] == [1, 2, 3, 4]
    # float32, sums in another order
    assert all(two == pytest.approx(one, rel=1e-4) for _, two, one, _ in epochs)
    assert epochs[-1][1] < 0.8 * epochs[0][1]
    sent = [line[-2:] for line in words if line[2:3] == ["->"]]
    assert sent == [[f"{1024 * 256 * 4:,}"] * 2] * 2


@together
# starts the command line, which starts processes; what it measures depends on what else runs
@pytest.mark.slow
def test_layers_on_devices_show_bounds_beside_what_was_measured(tmp_path: Path):
    words = [
        line.split()
        for line in run(str(ROOT / "examples/08_layers_on_devices.py"), cwd=tmp_path).stdout.splitlines()
    ]
    ratios = [float(line[-1]) for line in words if line[-2:-1] == ["="]]
    assert len(ratios) in (3, 4)  # on one core nothing is measured
    assert ratios[0] == 1.6  # 2 ranks, 4 microbatches: 2 * 4 / (4 + 1)
    assert 0.5 < ratios[2] <= ratios[1] <= 2.0


@pytest.mark.slow
@alone
def test_the_grid_takes_one_devices_step(tmp_path: Path):
    lines = run(str(ROOT / "examples/09_grid.py"), cwd=tmp_path).stdout.splitlines()
    words = [line.split() for line in lines]
    for name in ("loss", "norm of gradient", "parameters"):
        differences = [float(line.split()[-1]) for line in lines if line.strip().startswith(name)]
        assert len(differences) == 2 and max(differences) < 1e-10  # float64
    whole = sum([8 * 32 + 32, 2 * (4 * 32 * 32 + 4 * 32 + 2 * 128 * 32 + 128 + 32 + 4 * 32), 32 * 10 + 10])
    held = [[int(size.replace(",", "")) for size in line[::2]] for line in words if line[1:2] == ["held"]]
    assert [len(row) for row in held] == [2, 2, 4, 4]
    # norms and some biases are on both ranks of tp
    assert all(sum(row) == pytest.approx(whole, rel=0.06) and sum(row) >= whole for row in held)
    assert [line[-1] for line in words if line[:1] in (["dp"], ["pp"], ["tp"])] == ["none"] * 12


@pytest.mark.slow
@alone
def test_waiting_pays_with_even_workers_and_not_with_a_slow_one(tmp_path: Path):
    lines = run(
        str(ROOT / "examples/10_parameter_server.py"), "picture.png", cwd=tmp_path
    ).stdout.splitlines()
    losses = {
        (line[:10].strip(), line[10:30].strip()): [float(each) for each in line.split()[-4:]]
        for line in lines[1:-1]
    }
    assert len(losses) == 8
    for speeds in ("even", "one slow"):
        # after 30 s
        waiting = [loss[2] for (of, name), loss in losses.items() if of == speeds and name != "asynchronous"]
        assert (max(waiting) < losses[speeds, "asynchronous"][2]) == (speeds == "even")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@alone
def test_a_fine_tuned_model_loads_back_into_transformers_with_equal_outputs(tmp_path: Path):
    lines = run(str(ROOT / "examples/11_fine_tuning.py"), cwd=tmp_path).stdout.splitlines()
    before, after = (float(each) for each in lines[0].removeprefix("loss ").split(" -> "))
    assert after < before - 0.5
    assert lines[1].startswith("from_pretrained('runs/fine_tuned/step-00000020')")
    assert lines[1].endswith("largest difference of its logits 0")
    assert (tmp_path / "runs/gpt2_bytes/model.safetensors").exists()
