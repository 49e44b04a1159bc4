"""What a server knows of its job: its slices, what workers must agree with, where the run begins."""

from __future__ import annotations

from functools import partial

import torch

from meshloom.asynchronous.messaging.codec import ServerState
from meshloom.asynchronous.messaging.handshake import RunDescription, digest_of, facts_of
from meshloom.asynchronous.state.checkpoints import Start
from meshloom.asynchronous.state.parameters import Content, Parameters
from meshloom.asynchronous.state.push_shares import PushShares
from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.asynchronous.state.worker_model import WorkerModel
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.role import Role
from meshloom.parameters.file_weights import build_filled_model


class ServedJob:
    """The part of server `role.number`.

    state: names, shapes and dtypes of what it holds. digest, description: by which workers are compared, and
        what they are told. start, first: where the run begins, and this server's snapshot then.
    """

    def __init__(self, role: Role, job: Job, plan: Plan, settings: AsynchronousSettings) -> None:
        shares = PushShares(job, plan)
        workers = WorkerModel(job, plan, build_filled_model(job, torch.device("cpu"), settings.dtype))
        self._hold_part = partial(
            Parameters, job, role.number, plan.servers, whole=workers.whole, device=torch.device("cpu"),
            dtype=settings.dtype,
        )  # fmt: skip
        self._parameters: Parameters | None = None
        self.state = ServerState.of(workers.division, dict(workers.model.named_buffers()))[role.number]
        facts = facts_of(job, plan, workers.model, shares.num_samples)
        self.digest = digest_of(facts)
        ports = [int(address.rpartition(":")[2]) for address in role.addresses]
        self.description = RunDescription(plan=str(plan), facts=facts, ports=ports)
        self.start = Start.find(settings, job, plan, shares, workers.model)
        self.first = self.start.snapshot(workers, role.number)

    @property
    def learning_rates(self) -> list[float]:
        """Of every group of every optimizer that has one; none before there are parameters."""
        return self._parameters.learning_rates() if self._parameters is not None else []

    def hold(self, content: Content | None) -> Parameters:
        """The parameters of a snapshot; None: as the job builds them. They take the place of those before."""
        self._parameters = held = self._hold_part(content=content)
        return held
