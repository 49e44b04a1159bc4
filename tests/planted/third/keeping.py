"""Bugs of checkpoints and resuming."""

from __future__ import annotations

from dataclasses import replace

from tests.planted.third.planting import DIVIDED, Planter, bug


@bug("averaged", "dp=2", causes="averages|saved")
def average_not_loaded(p: Planter) -> None:
    """A resumed run begins its average anew."""
    from meshloom.optimizer.averages import ParameterAverages

    p.set(ParameterAverages, "load", lambda self, path, shape, read: None)


@bug("gpt", "dp=2", causes="optimizer|saved", module="blocks.0.n1")
def second_group_not_restored(p: Planter) -> None:
    """The optimizer state of the second group's parameters is not restored."""
    from meshloom.optimizer import optimizer_state

    def make(original):
        def state_loader(of, placed=None):
            of = [
                (
                    optimizer,
                    [
                        each
                        for each in held
                        if not any(
                            each.tensor is q for group in optimizer.param_groups[1:] for q in group["params"]
                        )
                    ],
                )
                for optimizer, held in of
            ]
            return original(of, placed)

        return state_loader

    p.wrap(optimizer_state, "state_loader", make)


@bug("gpt", "dp=2", says="what is resumed is not what was saved", module="blocks.0.n1")
def settings_of_first_group(p: Planter) -> None:
    """All groups of a resumed optimizer get the settings of the first: its learning rate and its weight decay."""
    from meshloom.optimizer import optimizer_state

    def make(original):
        def load_settings(optimizer, saved):
            return original(optimizer, {**saved, "groups": saved["groups"][:1] * len(saved["groups"])})

        return load_settings

    p.wrap(optimizer_state, "load_settings", make)


@bug("residual", "dp=2,zero=1", says="what is resumed is not what was saved")
def first_schedule_not_restored(p: Planter) -> None:
    """The first of two schedulers of a resumed run begins anew."""
    from meshloom.optimizer.optimizer_state import OptimizerState

    def make(original):
        def loading(self, values):
            before = [each.state_dict() for each in self._schedulers]
            take, finish = original(self, values)

            def both():
                finish()
                for each, state in list(zip(self._schedulers, before, strict=True))[:1]:
                    each.load_state_dict(state)

            return take, both

        return loading

    p.wrap(OptimizerState, "loading", make)


@bug("deep", "dp=2,zero=1", says="the checkpoint itself differs")
def momentum_of_other_slice(p: Planter) -> None:
    """Two pieces of optimizer state that have one size are exchanged for one another when they are saved."""
    from meshloom.optimizer import optimizer_state

    def make(original):
        def state_pieces(optimizer, held, *, self_contained=False):
            pieces, parts = original(optimizer, held, self_contained=self_contained)
            seen = {}
            for at, each in enumerate(pieces):
                key = each.key.rsplit("/", 1)[1], each.tensor.numel(), each.start, each.tensor.dtype
                if each.tensor.numel() > 4 and key in seen and seen[key] is not None:
                    other = seen[key]
                    one, two = pieces[other], each
                    pieces[other], pieces[at] = (
                        replace(one, tensor=two.tensor),
                        replace(two, tensor=one.tensor),
                    )
                    seen[key] = None
                else:
                    seen.setdefault(key, at)
            return pieces, parts

        return state_pieces

    p.wrap(optimizer_state, "state_pieces", make)


@bug("buffered", "dp=2", says="what is resumed is not what was saved")
def counter_not_restored(p: Planter) -> None:
    """Integer buffers are not restored from a checkpoint."""
    from meshloom.replica import replica_state

    def make(original):
        def loader_of(replica, checkpoint):
            loader = original(replica, checkpoint)
            return replace(
                loader,
                weight=lambda name, tensor: (
                    loader.weight(name, tensor) if tensor.is_floating_point() else None
                ),
            )

        return loader_of

    p.wrap(replica_state, "loader_of", make)


@bug("carrying", "dp=2,microbatches=2", says="what is resumed is not what was saved", module="cell")
def carried_by_next_chunk(p: Planter) -> None:
    """A resumed run gives what a chunk left in an attribute to the other chunk of its replica."""
    from meshloom.replica.attributes.carried_tensors import CarriedTensors

    def make(original):
        def resume(self, rows, values):
            return original(self, rows, {(name, index ^ 1): value for (name, index), value in values.items()})

        return resume

    p.wrap(CarriedTensors, "resume", make)


@bug("wide", "dp=2", says="the checkpoint itself differs")
def state_saved_in_bf16(p: Planter) -> None:
    """Optimizer state of over 100 elements is saved rounded to bfloat16."""
    from meshloom.optimizer import optimizer_state

    def make(original):
        def state_pieces(optimizer, held, *, self_contained=False):
            pieces, parts = original(optimizer, held, self_contained=self_contained)
            rounded = [replace(each, tensor=each.tensor.bfloat16().to(each.tensor.dtype)) for each in pieces]
            large = [each.tensor.numel() > 100 and each.tensor.is_floating_point() for each in pieces]
            return [
                other if is_large else each
                for each, other, is_large in zip(pieces, rounded, large, strict=True)
            ], parts

        return state_pieces

    p.wrap(optimizer_state, "state_pieces", make)


@bug("gpt", DIVIDED, says="the checkpoint itself differs")
def shards_at_other_rank(p: Planter) -> None:
    """State of a sharded parameter is written to the place of another rank along tp, where shards are even."""
    from meshloom.optimizer.state_pieces import StateShard

    def make(original):
        def piece(self):
            found = original(self)
            pieces = self.held.shards.pieces[self.held.name]
            other = pieces.num_ranks - 1 - self.held.shards.rank
            if pieces.local_shape(other) == pieces.local_shape(self.held.shards.rank):
                return replace(found, held=pieces.held[other])
            return found

        return piece

    p.wrap(StateShard, "piece", make)


@bug("gpt", "dp=2,zero=3", says="what is resumed is not what was saved", module="embed")
def slices_off_by_one(p: Planter) -> None:
    """A slice of a parameter that a rank keeps is restored one element late where it does not begin with the parameter."""
    from meshloom.exchange.units.unit_slices import UnitFlat

    def make(original):
        def keep(self, entry, whole):
            start, stop = self._mine(entry)
            if 0 < start < stop and self.__dict__.get("_restored"):
                values = whole.detach().reshape(-1).roll(1)[start:stop]
                self.kept[self._at(entry, start) : self._at(entry, stop)] = values
            else:
                original(self, entry, whole)

        return keep

    p.wrap(UnitFlat, "keep", make)
    from meshloom.replica import replica_state

    def make_loader(original):
        def loader(model, exchange, shards):
            for unit in exchange.units:
                for part in unit.parts:
                    part._restored = True
            return original(model, exchange, shards)

        return loader

    p.wrap(replica_state, "_loader_of_slices", make_loader)
