"""The files in docs/clusters start ranks that train: batch scripts under stand-ins for Slurm's commands,
manifests as Kubernetes would read them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshloom.launch.environment import read_launched_rank
from tests import slurm, two_hosts
from tests.documents import blocks_of
from tests.kubernetes import Pod, pods_of_job, pods_of_pytorch_job

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "docs/clusters"
DIGITS = str(ROOT / "examples/02_digits.py")
HERE = "127.0.0.[1-2]"  # two names of this machine


def _environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Slurm's commands, then meshloom and torchrun, at the front of PATH."""
    slurm.install(tmp_path, sys.executable)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "STAND_IN_NODES": HERE,
        "TMPDIR": str(tmp_path),
        **more,
    }


def _submit(
    script: str, options: list[str], words: list[str], tmp_path: Path, **more: str
) -> list[dict[str, Any]]:
    """The records of a batch script that ends well."""
    command = ["sbatch", *options, str(CLUSTERS / script), *words, "--devices", "cpu", "--json", "-"]
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(tmp_path, **more), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _verified(records: list[dict[str, Any]]) -> str:
    """What the ranks ran on, if all is equal to one device."""
    assert records[-1]["passed"]
    return records[-1]["devices"]


def _trained(records: list[dict[str, Any]], steps: int) -> str:
    assert len([record for record in records if record["event"] == "step"]) == steps
    return next(record["why"] for record in records if record["event"] == "start")


VERIFY = ["verify", DIGITS, "--quick", "--steps", "1", "--plan"]
TRAIN = ["train", DIGITS, "--steps", "3", "--plan"]


@pytest.mark.slow
@pytest.mark.processes
def test_srun_starts_a_rank_for_each_task(tmp_path: Path):
    records = _submit(
        "several_nodes.sbatch", ["--ntasks-per-node=1"], [*VERIFY, "dp=2,sync_batch_norm=true"], tmp_path
    )
    assert "2 ranks as processes 1 on each machine" in _verified(records)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("words", [[*VERIFY, "dp=2,pp=2,microbatches=2"], [*TRAIN, "dp=4"]])
def test_two_nodes_of_two_tasks(words: list[str], tmp_path: Path):
    records = _submit("several_nodes.sbatch", ["--nodes=2", "--ntasks-per-node=2"], words, tmp_path)
    ran = _verified(records) if words[0] == "verify" else _trained(records, 3)
    assert "4 ranks as processes 2 on each machine" in ran


@pytest.mark.processes
@pytest.mark.slow
def test_srun_starts_torchruns_that_start_ranks(tmp_path: Path):
    records = _submit("torchrun.sbatch", [], [*VERIFY, "dp=4"], tmp_path, RANKS_PER_NODE="2")
    assert "4 ranks as processes 2 on each machine" in _verified(records)


@pytest.mark.processes
@pytest.mark.slow
def test_on_one_node_meshloom_starts_the_ranks(tmp_path: Path):
    records = _submit("one_node.sbatch", [], [*TRAIN, "dp=2"], tmp_path)
    assert "2 ranks as processes on" in _trained(records, 3)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("script", ["several_nodes.sbatch", "torchrun.sbatch"])
def test_a_wrong_plan_ends_every_rank_with_a_sentence(script: str, tmp_path: Path):
    command = [
        "sbatch",
        "--nodes=2",
        "--ntasks-per-node=1",
        str(CLUSTERS / script),
        *TRAIN,
        "dp=5",
        "--devices",
        "cpu",
    ]
    environment = _environment(tmp_path, RANKS_PER_NODE="1")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "The plan needs 5 ranks (dp=5), but 2 processes were started." in done.stderr


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("script", ["several_nodes.sbatch", "torchrun.sbatch"])
def test_nodes_with_networks_of_their_own(script: str, tmp_path: Path):
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    tasks = "2" if script == "several_nodes.sbatch" else "1"
    with two_hosts.two_hosts() as names:
        first, last = (address.rpartition(".") for address in two_hosts.ADDRESSES)
        nodes = f"{first[0]}.[{first[2]}-{last[2]}]"
        more = {
            "STAND_IN_NODES": nodes,
            "STAND_IN_NAMESPACES": " ".join(names),
            "GLOO_SOCKET_IFNAME": two_hosts.WIRE,
            "RANKS_PER_NODE": "2",
        }
        ran = _verified(_submit(script, [f"--ntasks-per-node={tasks}"], [*VERIFY, "dp=4"], tmp_path, **more))
    assert ran.endswith("through shared memory on each of 2 machines and over Gloo between them")


@pytest.mark.processes
@pytest.mark.slow
def test_the_lines_of_torchrun_work_between_two_machines(tmp_path: Path):
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    (block,) = [
        each
        for each in blocks_of((CLUSTERS / "README.md").read_text())
        if each.kind == "code" and "--nnodes" in each.text
    ]
    instead = {"first.example.com": two_hosts.ADDRESSES[0], "job.py": DIGITS}
    with two_hosts.two_hosts() as names:
        commands = [
            [
                "ip",
                "netns",
                "exec",
                name,
                *(instead.get(word, word) for word in line.split()),
                "--steps",
                "3",
                "--devices",
                "cpu",
                "--json",
                "-",
            ]
            for name, line in zip(names, block.text.splitlines(), strict=True)
        ]
        told = _environment(tmp_path, GLOO_SOCKET_IFNAME=two_hosts.WIRE)
        records = _records_of_first([(command, told) for command in commands], tmp_path)
    assert _trained(records, 3).endswith(
        "through shared memory on each of 2 machines and over Gloo between them"
    )


def _records_of_first(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], tmp_path: Path
) -> list[dict[str, Any]]:
    """Run all commands, each in its environment, at the same time until all end well; what the first one
    writes."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for words, told in commands:
            processes.append(
                subprocess.Popen(
                    words, cwd=tmp_path, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(
        errors for _, errors in said
    )
    return [json.loads(line) for line in said[0][0].splitlines()]


def _read(name: str) -> dict[str, Any]:
    """The documents of a manifest by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((CLUSTERS / name).read_text())}


def _train_in(pods: list[Pod], tmp_path: Path) -> list[dict[str, Any]]:
    """Run every pod's command here; the records of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    first = {"/jobs/job.py": DIGITS, "/runs/train": str(tmp_path / "runs")}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    commands = [
        (
            [
                *(first.get(word, word) for word in pod.words),
                "--devices",
                "cpu",
                "--steps",
                "3",
                "--json",
                "-",
            ],
            {**_environment(tmp_path), **pod.environment, **here},
        )
        for pod in pods
    ]
    records = _records_of_first(commands, tmp_path)
    assert (tmp_path / "runs/step-00000003/meta.json").is_file()
    return records


@pytest.mark.processes
@pytest.mark.slow
def test_the_pods_of_an_indexed_job_train(tmp_path: Path):
    pods = pods_of_job(_read("indexed_job.yaml")["Job"])
    assert "2 ranks as processes" in _trained(_train_in(pods, tmp_path), 3)


@pytest.mark.processes
@pytest.mark.slow
def test_the_pods_of_a_pytorch_job_train(tmp_path: Path):
    pods = pods_of_pytorch_job(_read("pytorch_job.yaml")["PyTorchJob"])
    assert "2 ranks as processes" in _trained(_train_in(pods, tmp_path), 3)


def test_the_service_of_an_indexed_job_names_its_pods():
    documents = _read("indexed_job.yaml")
    service, job = documents["Service"], documents["Job"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]


@pytest.mark.parametrize(
    ("name", "kind", "pods_of"),
    [("indexed_job", "Job", pods_of_job), ("pytorch_job", "PyTorchJob", pods_of_pytorch_job)],
)
def test_every_pod_has_a_rank_of_its_own_and_the_plan_has_as_many_ranks(name: str, kind: str, pods_of: Any):
    pods = pods_of(_read(f"{name}.yaml")[kind])
    ranks = [read_launched_rank(pod.environment) for pod in pods]
    assert [rank and rank.rank for rank in ranks] == list(range(len(pods)))
    assert {rank and (rank.size, rank.address) for rank in ranks} == {(len(pods), pods[0].name)}
    assert [rank and rank.hosts_store for rank in ranks] == [True] + [False] * (len(pods) - 1)
    assert pods[0].words[pods[0].words.index("--plan") + 1] == f"dp={len(pods)}"


@pytest.mark.parametrize("script", sorted(CLUSTERS.glob("*.sbatch")), ids=lambda path: path.name)
def test_scripts_are_bash_and_are_explained(script: Path):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"]({script.name})" in (CLUSTERS / "README.md").read_text()
