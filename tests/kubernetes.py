"""What Kubernetes, and Kubeflow's training operator, make of a manifest: the command and the environment of
every pod's container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """name: by which the others find it. words: what its container runs."""

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]


def pods_of_job(job: Mapping[str, Any]) -> list[Pod]:
    """Those of an indexed Job: pod i is NAME-i in the subdomain of its service."""
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    return [
        Pod(
            name=f"{job['metadata']['name']}-{index}.{pod['subdomain']}",
            words=_words(container),
            environment=_environment(container, index),
        )
        for index in range(spec["completions"])
    ]


def pods_of_pytorch_job(job: Mapping[str, Any]) -> list[Pod]:
    """Those of a PyTorchJob: the master is rank 0, worker i rank i + 1. All are told so."""
    replicas = [
        (kind, index, spec)
        for kind, spec in job["spec"]["pytorchReplicaSpecs"].items()
        for index in range(spec["replicas"])
    ]
    master = f"{job['metadata']['name']}-master-0"
    pods: list[Pod] = []
    for kind, index, spec in replicas:
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        told = {
            "RANK": f"{index if kind == 'Master' else index + 1}",
            "WORLD_SIZE": f"{len(replicas)}",
            "MASTER_ADDR": master,
            "MASTER_PORT": "23456",
        }
        name = f"{job['metadata']['name']}-{kind.lower()}-{index}"
        pods.append(
            Pod(name=name, words=_words(container), environment={**_environment(container, index), **told})
        )
    return pods


def _words(container: Mapping[str, Any]) -> tuple[str, ...]:
    words = (*container["command"], *container["args"])
    assert all(isinstance(word, str) for word in words)
    return words


def _environment(container: Mapping[str, Any], index: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable in container["env"]:
        if "value" in variable:
            assert isinstance(variable["value"], str), (
                f"{variable['name']} must be a string: Kubernetes refuses numbers"
            )
            found[variable["name"]] = variable["value"]
        else:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
            found[variable["name"]] = f"{index}"
    return found
