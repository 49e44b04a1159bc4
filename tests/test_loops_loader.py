"""`ml.loader` and `ml.share`: each replica has its share of the script's batches, whoever iterates, and the same draws everywhere."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    get_worker_info,
)

from meshloom.core.errors import DataError, JobError
from meshloom.core.plan import Plan
from meshloom.core.random import seed_everything
from meshloom.loops import taken_shares
from meshloom.loops.loader import loader, shared_loader
from meshloom.loops.means import mean
from meshloom.loops.parallel import parallel
from meshloom.loops.ranks import leave_ranks, ranks
from meshloom.loops.share import Sharer, share
from meshloom.loops.taken_shares import TakenShare, share_of
from tests.processes import on_ranks


@pytest.fixture(autouse=True)
def _no_share_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken_shares, "_RECENT", deque(maxlen=16))
    monkeypatch.setattr(taken_shares, "_BOUND", [])


def _newest() -> TakenShare:
    return cast(TakenShare, taken_shares.bound())


class _Drawn(Dataset[Tensor]):
    """Each sample is its index and three draws, and one of a generator of its own."""

    def __init__(self, size: int = 11) -> None:
        self.size, self.rng = size, numpy.random.default_rng(0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.size:
            raise IndexError(index)
        drawn = float(torch.rand(())), random.random(), numpy.random.rand(), self.rng.random()
        return torch.tensor([index, *drawn], dtype=torch.float64)


class _Stream(IterableDataset[Tensor]):
    """`size` samples, of which each worker has every n-th."""

    def __init__(self, size: int = 11) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, self.size, every):
            yield torch.tensor([index, random.random()], dtype=torch.float64)


class _Endless(Sampler[int]):
    """Every index again and again, of which no more may be drawn than are read."""

    def __iter__(self) -> Iterator[int]:
        for number in count():
            assert number < 100
            yield number % 11


def _loader(seed: int = 3, data: Any = None, **settings: Any) -> DataLoader[Any]:
    torch.manual_seed(seed)
    settings = {"batch_size": 4, **settings}
    if not isinstance(data, IterableDataset):
        settings.setdefault("shuffle", "sampler" not in settings and "batch_sampler" not in settings)
    return DataLoader(data or _Drawn(), **settings)


def _shared(replica: int, replicas: int, collate: Any = "share", **settings: Any) -> Any:
    return shared_loader(_loader(**settings), Sharer(replica, replicas), seed=5, collate=collate)


def _joined(replicas: int, batches: int | None = None, **settings: Any) -> list[Tensor]:
    """The global batches that the replicas have together; samples that do not count left out."""
    found: list[list[Tensor]] = []
    for replica in range(replicas):
        parts: list[Tensor] = []
        for batch in islice(_shared(replica, replicas, **settings), batches):
            taken = _newest()
            assert taken.replica == replica and len(batch) == taken.rows
            parts.append(batch[: taken.sizes[replica]])
        found.append(parts)
    return [torch.cat(each) for each in zip(*found, strict=True)]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_the_shares_of_a_batch_are_the_scripts_batch_in_its_order(replicas: int):
    indices = [batch[:, 0] for batch in _loader()]
    assert _equal([batch[:, 0] for batch in _joined(replicas)], indices)


def test_a_sample_draws_the_same_under_every_plan_and_number_of_workers():
    one = _joined(1)
    assert _equal(_joined(2), one) and _equal(_joined(3, num_workers=2, persistent_workers=True), one)
    assert len({float(each) for batch in one for each in batch[:, 1:].flatten()}) == 44


def test_draws_of_samples_leave_the_scripts_generators_alone():
    torch.manual_seed(1)
    data = _Drawn()
    before = data.rng.bit_generator.state
    shared = shared_loader(DataLoader(data, batch_size=4), Sharer(1, 2), seed=5)
    iterator = iter(shared)
    states = torch.get_rng_state(), random.getstate()
    next(iterator)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert data.rng.bit_generator.state == before


def test_every_epoch_draws_anew():
    shared = _shared(0, 2, sampler=SequentialSampler(range(11)))
    one, two = torch.cat(list(shared)), torch.cat(list(shared))
    assert torch.equal(one[:, 0], two[:, 0]) and not torch.equal(one[:, 1], two[:, 1])


def test_a_sampler_without_end_is_streamed_and_an_index_that_comes_again_draws_anew():
    found = torch.cat(_joined(2, batches=6, sampler=_Endless()))
    assert found[:, 0].tolist() == [each % 11 for each in range(24)]
    assert len(set(found[:, 1].tolist())) == 24


def test_any_batch_sampler_is_shared():
    sizes = [[0, 1, 2, 3, 4], [9], [5, 6, 7]]
    found = _joined(2, batch_sampler=sizes, batch_size=1)
    assert [each[:, 0].tolist() for each in found] == sizes


def test_a_replica_without_samples_has_one_that_counts_nothing():
    batches = list(_shared(1, 2, batch_sampler=[[0, 1, 2], [7]], batch_size=1))
    assert batches[1][:, 0].tolist() == [7] and _newest().weight == 0


def test_the_face_of_a_shared_loader_is_the_scripts():
    given = _loader(data=Subset(_Drawn(), range(11)), drop_last=True)
    shared = shared_loader(given, Sharer(1, 2), seed=5)
    assert type(shared).__mro__[1] is DataLoader and len(shared) == 2 and shared.batch_size == 4
    assert (
        len(shared.dataset) == 11 and shared.dataset.indices == range(11) and shared.sampler is given.sampler
    )
    assert shared_loader(shared, Sharer(1, 2), seed=5) is shared


def test_a_subclass_stays_one_and_its_reading_ahead_is_not_the_scripts():
    class Ahead(DataLoader[Any]):
        def __iter__(self) -> Any:
            batches = super().__iter__()
            ahead = next(batches)
            for each in batches:
                yield ahead
                ahead = each
            yield ahead

    given = Ahead(_Drawn(), batch_size=4)
    shared: Any = shared_loader(given, Sharer(0, 2), seed=5)
    assert type(shared).__mro__[2] is Ahead
    sizes = [(len(batch), _newest().sizes) for batch in shared]
    assert sizes == [(2, (2, 2)), (2, (2, 2)), (2, (2, 1))]
    assert shared.state_dict()["epoch"] == 1


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_an_epoch_goes_on_under_another_plan(replicas: int, workers: int):
    whole = _shared(0, 1)
    reference = list(whole) + list(whole)
    begun = _shared(0, 2, num_workers=1)
    iterator = iter(begun)
    next(iterator)
    state = begun.state_dict()
    assert (state["epoch"], state["batches"]) == (0, 1)
    parts: list[list[Tensor]] = []
    for replica in range(replicas):
        resumed = _shared(replica, replicas, num_workers=workers, seed=3)
        list(resumed)  # whatever it has drawn before
        torch.manual_seed(3)
        resumed.load_state_dict(state)
        before = torch.get_rng_state()
        parts.append(list(resumed))
        assert torch.equal(torch.get_rng_state(), before)
    rest = [torch.cat(each) for each in zip(*parts, strict=True)]
    assert all(torch.equal(one[: len(two)], two) for one, two in zip(rest, reference[1:3], strict=True))


def test_a_state_goes_through_a_file_of_weights_and_holds_the_loaders_own_generator(tmp_path: Any):
    def made() -> Any:
        return _shared(0, 2, generator=torch.Generator().manual_seed(8))

    one = made()
    epochs = [list(one) for _ in range(3)]
    two = made()
    list(two)
    torch.save(two.state_dict(), tmp_path / "between.pt")
    next(iter(two))
    torch.save(two.state_dict(), tmp_path / "within.pt")
    for name, begun in (("between", 0), ("within", 1)):
        three = made()
        three.load_state_dict(torch.load(tmp_path / f"{name}.pt"))
        assert _equal([*epochs[1][:begun], *three], epochs[1])
        assert _equal(list(three), epochs[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streams_batches_are_shared(workers: int):
    found = _joined(2, data=_Stream(), num_workers=workers)
    alone = [batch[:, 0] for batch in _loader(data=_Stream(), num_workers=workers)]
    assert _equal([batch[:, 0] for batch in found], alone)
    draws = {int(each[0]): float(each[1]) for batch in found for each in batch}
    assert draws == {int(each[0]): float(each[1]) for batch in _joined(3, data=_Stream()) for each in batch}


def test_a_stream_in_workers_of_a_loader_that_others_made_draws_anew_in_every_epoch():
    each = _shared(0, 1, data=_Stream())
    again = DataLoader(each.dataset, batch_size=4, collate_fn=each.collate_fn, num_workers=1)
    one, two = torch.cat(list(again)), torch.cat(list(again))
    assert torch.equal(one[:, 0], two[:, 0]) and not set(one[:, 1].tolist()) & set(two[:, 1].tolist())


def _halve(worker: int) -> None:
    info = cast(Any, get_worker_info())
    info.dataset.size = 3 + worker


def test_a_worker_is_given_its_part_of_a_stream():
    def indices(replica: int, replicas: int) -> list[list[float]]:
        shared = _shared(replica, replicas, data=_Stream(), num_workers=2, worker_init_fn=_halve)
        return [batch[:, 0].tolist() for batch in shared]

    assert indices(0, 1) == [[0, 2], [1, 3]]
    assert [indices(0, 2), indices(1, 2)] == [[[0], [1]], [[2], [3]]]


def test_a_streams_epochs_go_on():
    settings: dict[str, Any] = {"data": _Stream(), "num_workers": 1, "persistent_workers": True}
    one, two = _shared(0, 2, data=_Stream()), _shared(0, 2, **settings)
    epochs = [list(one), list(one)]
    assert _equal(list(two), epochs[0])
    iterator = iter(two)
    next(iterator)
    state = two.state_dict()
    for each in (_shared(0, 2, data=_Stream()), two):
        each.load_state_dict(state)
        assert _equal(list(each), epochs[1][1:])


def _padded(samples: list[Tensor]) -> dict[str, Any]:
    return {
        "rows": pad_sequence([torch.full((int(each[0]) + 1,), float(each[0])) for each in samples], True),
        "names": [str(int(each[0])) for each in samples],
        "mix": random.random(),
    }


@pytest.mark.parametrize("data", [_Drawn, _Stream])
def test_the_whole_batch_is_collated_where_it_is_asked_for(data: Any):
    one = list(_shared(0, 1, "share", data=data(), collate_fn=_padded))
    two = [list(_shared(replica, 2, "whole", data=data(), collate_fn=_padded)) for replica in range(2)]
    for whole, *parts in zip(one, *two, strict=True):
        assert torch.equal(torch.cat([each["rows"] for each in parts]), whole["rows"])
        assert [name for each in parts for name in each["names"]] == whole["names"]
        assert {each["mix"] for each in parts} == {whole["mix"]}
    share_only = list(_shared(0, 2, "share", data=data(), collate_fn=_padded))
    assert any(
        mine["rows"].shape != whole["rows"].shape for mine, whole in zip(share_only, two[0], strict=True)
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_is_made_of_the_parts_shares(workers: int):
    def again(each: Any) -> DataLoader[Any]:
        return DataLoader(
            each.dataset, batch_sampler=each.batch_sampler, collate_fn=each.collate_fn, num_workers=workers
        )

    settings: dict[str, Any] = {"data": _Drawn(10)}
    parts = [list(again(_shared(replica, 2, **settings))) for replica in range(2)]
    assert _equal([torch.cat(each) for each in zip(*parts, strict=True)], _joined(2, **settings))
    assert _newest().sizes == (1, 1)
    prepared = shared_loader(again(_shared(0, 2)), Sharer(0, 2), seed=5)  # one replica's share of a share
    assert [len(each) for each in prepared] == [2, 2, 2] and _newest().sizes == (2, 1)


def test_a_share_that_its_rows_do_not_tell_is_refused_in_a_loader_that_others_made(monkeypatch: Any):
    each = _shared(0, 2)
    with pytest.raises(DataError, match=r"one of 3 samples is uneven over dp=2 \(2\+1\)"):
        next(iter(DataLoader(each.dataset, batch_sampler=each.batch_sampler)))  # before anything is trained
    sizes = _shared(0, 2, batch_sampler=[[0, 1, 2, 3], [4, 5, 6]], batch_size=1)
    with pytest.raises(DataError, match=r"one of 3 samples is uneven over dp=2 \(2\+1\)"):
        list(DataLoader(sizes.dataset, batch_sampler=sizes.batch_sampler))
    stream = _shared(0, 2, data=_Stream())
    monkeypatch.setattr("meshloom.loops.loader_parts.get_worker_info", object)
    with pytest.raises(DataError, match=r"one of 3 samples is uneven over dp=2 \(2\+1\)"):
        stream.collate_fn([torch.zeros(2)] * 3)


def test_accelerate_shares_before_and_after_it_prepares():
    accelerate = pytest.importorskip("accelerate")
    from accelerate.data_loader import DataLoaderShard

    one = accelerate.Accelerator(cpu=True)
    alone = [batch[:, 0] for batch in _loader(data=_Drawn(10))]
    before = [list(one.prepare_data_loader(_shared(replica, 2, data=_Drawn(10)))) for replica in range(2)]
    assert _equal([torch.cat(each)[:, 0] for each in zip(*before, strict=True)], alone)
    skipping = accelerate.skip_first_batches(_shared(0, 2, data=_Drawn(10)), 1)
    assert _equal(list(skipping), before[0][1:])
    after: list[list[Tensor]] = []
    for replica in range(2):
        prepared = shared_loader(one.prepare_data_loader(_loader()), Sharer(replica, 2), seed=5)
        assert type(prepared).__mro__[2] is DataLoaderShard
        sizes: list[tuple[int, ...]] = []
        after.append([])
        for batch in prepared:
            sizes.append(_newest().sizes)
            after[-1].append(batch)
        assert sizes == [(2, 2), (2, 2), (2, 1)] and prepared.end_of_dataloader
    assert _equal([torch.cat(each)[:, 0] for each in zip(*after, strict=True)], [b[:, 0] for b in _loader()])


@pytest.mark.slow  # to import
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_shares(monkeypatch: Any):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which Lightning sets
    lightning = pytest.importorskip("lightning.pytorch")
    seen: list[Tensor] = []

    class Sees(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Tensor) -> Tensor:
            seen.append(batch[:, 0])
            return self.weight * batch.mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, enable_model_summary=False, **settings
    )
    trainer.fit(Sees(), _shared(1, 2, sampler=SequentialSampler(range(11))))
    assert [each.tolist() for each in seen] == [[2, 3], [6, 7], [10]]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"batch_size": 1}, "Batch size 1 is the global one; dp=2 needs 2 or more"),
        ({"batch_size": None, "shuffle": False}, "batch_size=None"),
        (
            {"sampler": DistributedSampler(_Drawn(), 2, 0)},
            "has a DistributedSampler, which gives each of 2 ranks",
        ),
        ({"in_order": False, "num_workers": 1}, "in_order=False"),
    ],
)
def test_what_cannot_be_shared_is_one_sentence(settings: dict[str, Any], sentence: str):
    with pytest.raises(DataError, match=sentence):
        _shared(0, 2, **settings)


def test_batches_that_are_all_smaller_than_the_replicas_are_refused():
    with pytest.raises(DataError, match="Batch size 1 is the global one; dp=2"):
        list(_shared(0, 2, batch_sampler=[[0], [1], [2]], batch_size=1))
    sizes = [[0], [1], [2, 3], [4], [5], [6]]
    assert len(list(_shared(0, 2, batch_sampler=sizes, batch_size=1))) == 6


def test_a_structure_is_shared_by_its_batch_dims():
    batch: OrderedDict[str, Any] = OrderedDict(
        data=torch.arange(10).view(2, 5),
        mask=torch.ones(3, 3),
        targets=[{"boxes": torch.full((each, 4), each)} for each in range(5)],
        pair=(torch.arange(5), None, "name", 0.5, torch.tensor(2)),
        array=numpy.arange(5),
    )
    parts = [Sharer(replica, 2).share(batch, dim={"data": 1, "mask": None}) for replica in range(2)]
    assert torch.equal(torch.cat([each["data"] for each in parts], 1), batch["data"])
    assert [len(each["targets"]) for each in parts] == [3, 2] and parts[1]["targets"][0]["boxes"].shape == (
        3,
        4,
    )
    assert parts[1]["pair"][0].tolist() == [3, 4] and parts[1]["pair"][1:4] == (None, "name", 0.5)
    assert parts[0]["array"].tolist() == [0, 1, 2] and parts[0]["mask"] is batch["mask"]
    assert type(parts[0]) is OrderedDict and _newest() == TakenShare((3, 2), 1)
    assert share_of(parts[1]["data"]) == TakenShare((3, 2), 1) and share_of(batch["data"]) is None


def test_a_share_is_empty_outside_of_grad_mode_alone():
    x = torch.arange(2)
    assert Sharer(2, 3).share(x).tolist() == [1] and _newest().weight == 0
    with torch.no_grad():
        assert Sharer(2, 3).share(x).tolist() == []


def test_mistakes_of_sharing_are_sentences():
    with pytest.raises(
        DataError, match=r"of 8 samples has entries of other lengths.*x 8, mask 3.*dim=\{'mask': None\}"
    ):
        Sharer(0, 2).share({"x": torch.zeros(8, 2), "mask": torch.ones(3, 3)})
    mine = Sharer(0, 2).share(torch.zeros(8, 2))
    with pytest.raises(DataError, match="1 is a replica's share already, of 8 samples"):
        Sharer(0, 2).share((torch.zeros(4), mine))
    with pytest.raises(DataError, match="is a replica's share already, of 4 samples"):
        Sharer(0, 2).share(next(iter(_shared(0, 2))))
    sharer = Sharer(0, 2)
    for _ in range(2):
        sharer.share(torch.zeros(1))
    with pytest.raises(DataError, match="Batch size 1 is the global one"):
        sharer.share(torch.zeros(1))


def test_one_replica_has_the_same_object():
    batch, items = [torch.zeros(3)], DataLoader(_Drawn(), batch_size=None)
    assert Sharer(0, 1).share(batch) is batch
    assert shared_loader(items, Sharer(0, 1), seed=5) is items


def test_a_batch_of_an_unknown_class_is_handed_on_and_its_rows_are_not_guessed():
    class Nested:
        def __init__(self, samples: Any) -> None:
            self.tensor = torch.stack(list(samples))

    found = list(_shared(1, 2, collate_fn=Nested))
    assert [len(each.tensor) for each in found] == [2, 2, 1]
    with pytest.raises(DataError, match="is a Nested, which holds tensors and of which no rows are known"):
        list(_shared(1, 2, "whole", collate_fn=Nested))


def test_a_time_first_hidden_state_is_no_list_of_samples():
    x, hidden = torch.zeros(7, 2), (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    found = Sharer(0, 2).share((x, hidden), dim=1)
    assert found[0].shape == (7, 1) and [each.shape for each in found[1]] == [(1, 1, 3)] * 2
    images = tuple(torch.zeros(3, 5 + each) for each in range(2))
    assert len(Sharer(0, 2).share((torch.zeros(2), images))[1]) == 1


def _trains(size: int, plan: str) -> list[Any]:
    ranks(plan)
    torch.manual_seed(0)
    shared = loader(_loader(data=_Drawn(11)))
    batches = [batch[:, 0].tolist() for batch in shared]
    mine = share(torch.arange(5)).tolist()
    try:
        loader(_loader(data=_Drawn(11 + ranks().everyone.rank)))
        refused = ""
    except JobError as error:
        refused = str(error)
    try:
        loader(_loader(seed=ranks().everyone.rank))
    except DataError as error:
        refused += str(error)
    leave_ranks(well=True)
    return [batches, mine, refused]


@pytest.mark.processes
def test_ranks_of_a_replica_have_the_same_share_and_what_differs_is_named():
    found = on_ranks(_trains, 4, 4, str(Plan(dp=2, tp=2)))
    alone = [batch[:, 0].tolist() for batch in _loader()]
    by_rank = [each[0] for each in found]
    assert sum(each == by_rank[0] for each in by_rank) == 2
    assert sorted(map(str, by_rank)) == sorted(
        str([batch[part] for batch in alone]) for part in 2 * [slice(0, 2), slice(2, 4)]
    )
    assert sorted(each[1] for each in found) == 2 * [[0, 1, 2]] + 2 * [[3, 4]]
    assert all(
        "gives 11 samples on rank 0" in each[2] and "12 samples on rank 1" in each[2] for each in found
    )
    assert all("torch's seed is 0 on rank 0" in each[2] for each in found)


def _trained(batches: Any, model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for _ in range(2):
        for batch in batches:
            loss = (model(batch) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(mean(loss.detach())))
    return losses


def _model() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Linear(5, 1, dtype=torch.float64)


def _trains_on_shares(data: Any) -> list[float]:
    ranks("dp=2")
    seed_everything(0)
    model = parallel(_model())
    batches = loader(_loader(data=data))
    found = _trained(batches, model)
    leave_ranks(well=True)
    return found


@pytest.mark.processes
def test_training_on_shares_is_training_on_the_batches():
    data = _Drawn(9)  # a last batch of one sample, of which a replica has nothing
    model = _model()
    alone = _trained(shared_loader(_loader(data=data), Sharer(0, 1), seed=3), model)
    for found in on_ranks(_trains_on_shares, 2, data):
        assert found == pytest.approx(alone, rel=1e-12)  # sums of float64 in another order
