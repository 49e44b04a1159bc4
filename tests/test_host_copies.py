"""Host copies are the tensors themselves on the CPU, and are otherwise copied back to where they belong."""

from __future__ import annotations

import torch

from meshloom.comm.torch.host_copies import HostCopies


def test_cpu_tensors_are_not_copied():
    copies, tensor = HostCopies(), torch.zeros(3)
    assert copies.read(tensor) is tensor
    for host in (
        copies.changed(tensor),
        copies.written(tensor),
        copies.written(tensor, apart_from=torch.zeros(3)),
    ):
        assert host.data_ptr() == tensor.data_ptr()
    copies.arrive()
    copies.bring_back()
    copies.follow()


def test_what_is_written_does_not_touch_what_is_read():
    whole = torch.arange(6.0)
    copies, part = HostCopies(), whole[2:4]
    host = copies.written(whole, apart_from=[torch.zeros(1), part])
    host.fill_(7.0)
    assert part.tolist() == [2.0, 3.0]
    copies.bring_back()
    assert whole.tolist() == [7.0] * 6


def test_disjoint_parts_of_one_storage_do_not_overlap():
    whole = torch.zeros(4, 4)
    assert HostCopies().written(whole[:2], apart_from=whole[2:]).data_ptr() == whole.data_ptr()
    columns = HostCopies().written(
        whole[:, :2], apart_from=whole[:, 2:]
    )  # interleaved: taken for overlapping
    assert columns.data_ptr() != whole.data_ptr()


def test_lists_are_concatenated_and_split_again():
    copies = HostCopies()
    parts = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T, torch.empty(0), torch.tensor(5.0)]
    assert copies.joined(parts).tolist() == [1.0, 3.0, 2.0, 4.0, 5.0]
    copies.parted(parts).copy_(torch.arange(5.0))
    copies.bring_back()
    assert [part.tolist() for part in parts] == [[[0.0, 1.0], [2.0, 3.0]], [], 4.0]
