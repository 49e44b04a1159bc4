"""A replica between its steps: gathered whole, compared with the others, saved and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint, Piece
from meshloom.checkpoint.resuming import Loader, check_together, hand_over, open_together
from meshloom.checkpoint.tensor_file import Stream
from meshloom.comm.steps import Steps
from meshloom.core.errors import CheckpointError, TrainingError
from meshloom.exchange.exchange import Give
from meshloom.optimizer.outer_state import OUTER, outer_loader, outer_pieces
from meshloom.optimizer.state import STATE
from meshloom.parameters.model import state_of
from meshloom.parameters.pipeline_ownership import held
from meshloom.parameters.replica_check import first_difference
from meshloom.replica.prepared_replica import PreparedReplica


class SavedReplica(PreparedReplica):
    """What a rank takes part in when its replica's state is looked at as a whole."""

    def settle(self) -> Steps[None]:
        """End a round of local steps, so that all replicas hold the same parameters; nothing if they do.
        Every rank calls it."""
        if (yield from self.exchange.settle(early=True)):
            self.updater.forget()
            yield from self.engine.refresh_borrowed()

    def weights(self) -> Stream | dict[str, Any]:
        """The model's `state_dict` in whole shapes, one by one where it is divided; all of it on the
        replica's first rank.

        Raises `CheckpointError` if the newest step broke off while parameters were being updated.
        """
        if self._updating:
            raise CheckpointError(
                "The newest step broke off in the middle of its update, so there is nothing whole to save. Resume from a checkpoint."
            )
        return self.engine.weights()

    def optimizer_state(self) -> Steps[tuple[list[Piece], list[Stream], dict[str, Any]]]:
        """As `Updater.state`. Replicas that take independent steps are one before: parameters by ending the
        round, the optimizer's state by its mean."""
        yield from self.settle()
        if self.exchange.independent:
            yield from self.updater.average_state(self.replicas, self.seat.readers)
        pieces, streams, values = yield from self.updater.state(self.seat.world)
        if self.exchange.state is not None:
            here = {name for name, _ in self.named} if self._stage_group else None
            outer, gathered = yield from outer_pieces(
                self.exchange.state, self.shards, self.seat.world, self.seat.device, here
            )
            pieces = pieces + outer
            if gathered:
                self._saved += gathered.traffic
                streams = [*streams, gathered.stream]
        return pieces, streams, values

    def resume(self, directory: Path, check: Callable[[Checkpoint], None]) -> Steps[Checkpoint]:
        """Go on from the checkpoint in `directory`, which rank 0 reads for all, if `check` refuses it on no
        rank.

        What travels goes over the ranks' own group, as all that concerns no step, and is not counted as the
        plan's.
        """
        world = self.seat.world
        checkpoint = yield from open_together(directory, world)
        yield from check_together(world, lambda: check(checkpoint))
        found: list[Loader] = []
        yield from check_together(world, lambda: found.append(self._loader(checkpoint)))
        wanted = (STATE, OUTER) if self.exchange.state is not None else (STATE,)
        yield from hand_over(
            checkpoint,
            [key for key in checkpoint.keys() if key.startswith(wanted)],  # noqa: SIM118
            found[0],
            world,
        )
        return checkpoint

    def each_of_state(self, take: Callable[[str, Tensor], None]) -> Steps[None]:
        """Hand `take` every parameter and buffer, whole, tied ones once, one after another: all of them on
        the replica's first rank. Every rank calls it."""

        def mine(give: Give) -> Steps[None]:
            for name, tensor in held(state_of(self.model).items()).items():
                yield from give(name, tensor.detach())

        yield from self.engine.gather(mine, cast(Any, take))

    def whole_state(self) -> Steps[dict[str, Tensor]]:
        """The same at once, by name, in the model's order."""
        whole: dict[str, Tensor] = {}
        yield from self.each_of_state(whole.__setitem__)
        return {name: whole[name] for name in state_of(self.model) if name in whole}

    def check_identical(self, step: int) -> Steps[None]:
        """Raise `TrainingError` naming the first parameter or buffer that differs between replicas."""
        found = yield from first_difference(self.model, self.replicas)
        if found is not None:
            name, replica = found
            raise TrainingError(
                f"After step {step}, {name} differs between replicas dp=0 and dp={replica}: something in the model or optimizer "
                "is not deterministic or not part of the exchange (a parameter changed outside the optimizer, a buffer written by one rank)."
            )

    def check_team(self, step: int) -> Steps[None]:
        """Raise `TrainingError` naming the first parameter or buffer that several ranks of the replica hold
        whole, and not alike."""
        wrong = yield from self.engine.check_alike()
        if wrong is not None:
            raise TrainingError(
                f"After step {step}, {wrong}: something in the model or optimizer is not deterministic."
            )

    def _loader(self, checkpoint: Checkpoint) -> Loader:
        take, finish_updater = self.updater.loading(checkpoint.values["updater"])
        momentum: dict[str, Tensor] = {}
        take_outer = outer_loader(self.named, self.shards, momentum)

        def state(key: str, whole: Tensor) -> None:
            take(key, whole.shape, lambda _, start, stop: whole.reshape(-1)[start:stop])
            take_outer(key, whole)

        def finish() -> None:
            finish_updater()
            if self.exchange.state is not None:
                self.exchange.load(momentum)

        return Loader(weight=self.shards.weights_loader(self.model), state=state, finish=finish)
