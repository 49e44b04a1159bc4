"""A cluster is a file whose every constant says where it is from; what is wrong in one is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshloom.clusters.cluster import changed, load, named
from meshloom.clusters.constants import MOST_FITTED, shipped_names
from meshloom.core.errors import MachineError

NAMES = [
    "a100-40gb-pcie", "a100-40gb-sxm", "a100-80gb-sxm", "b200-sxm", "h100-80gb-pcie",
    "h100-80gb-sxm", "h100-96gb-500w", "h200-sxm", "p40-24gb", "v100-32gb-sxm",
]  # fmt: skip


def written(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_ten_clusters_are_there():
    assert shipped_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_constant_is_published_or_fitted_on_named_rows(name: str):
    cluster = named(name)
    assert cluster.gpus == 8 and len(cluster.constants) > 25
    for path, constant in cluster.constants.items():
        assert bool(constant.source) != bool(constant.fitted), path
    fitted = [path for path, constant in cluster.constants.items() if constant.fitted]
    assert 0 < len(fitted) <= MOST_FITTED


def test_sources_say_more_than_a_word():
    """The name of a line of [sources] is no source."""
    for name in NAMES:
        assert all(" " in each.source for each in named(name).constants.values() if each.source)


def test_known_constants():
    device = named("h200-sxm").device
    assert device.peak_flops["bfloat16"] == 989.4e12 and device.memory_bytes_per_second == 4.8e12
    assert named("a100-80gb-sxm").fabric.rails == 8
    # inherited over two files, and changed in the last
    pcie = named("a100-40gb-pcie")
    assert pcie.device.peak_flops == named("a100-80gb-sxm").device.peak_flops
    assert pcie.device.memory_bytes == named("a100-40gb-sxm").device.memory_bytes
    assert pcie.host.links[0] == (0, 1, 1) and named("a100-40gb-sxm").host.links == ()
    assert sum(count for *_, count in named("v100-32gb-sxm").host.links) == 8 * 6 // 2  # six links a GPU


def test_a_file_inherits_and_changes_a_line(tmp_path: Path):
    text = """
        inherit = "h100-80gb-sxm"
        [sources]
        dgx = "our own bill of June"
        [price]
        dollars_per_gpu_hour = { value = 2.5, source = "dgx" }
    """
    mine, theirs = load(written(tmp_path, text), hosts=3), named("h100-80gb-sxm", hosts=3)
    assert mine.dollars_per_gpu_hour == 2.5 and mine.gpus == 24
    assert (mine.device, mine.host, mine.fabric) == (theirs.device, theirs.host, theirs.fabric)
    assert mine.constants["price.dollars_per_gpu_hour"].source == "our own bill of June"
    assert mine.constants["host.gpus"] == theirs.constants["host.gpus"]  # its `dgx` is another


def test_a_file_inherits_one_beside_it(tmp_path: Path):
    written(
        tmp_path,
        'inherit = "h200-sxm"\n[fabric]\nefficiency = { value = 0.5, fitted = "mine.csv: all" }',
        "parent",
    )
    assert load(written(tmp_path, 'inherit = "parent"')).fabric.efficiency == 0.5


def test_the_fabric_is_chosen():
    fabric = named("p40-24gb", hosts=2, fabric="2x100").fabric
    assert (fabric.rails, fabric.rail_bytes_per_second) == (2, 12.5e9)


def test_constants_are_changed_and_the_rest_stays():
    cluster = named("h200-sxm", hosts=4, fabric="4x200")
    other = changed(cluster, {"host.base_seconds": 1e-3, "device.peak_flops.float32": 5e13})
    assert (other.host.base_seconds, other.device.peak_flops["float32"]) == (1e-3, 5e13)
    assert (other.hosts, other.fabric, other.device.memory_bytes) == (
        4,
        cluster.fabric,
        cluster.device.memory_bytes,
    )
    assert changed(cluster, {}) == cluster
    with pytest.raises(MachineError, match="h200-sxm has no constant host.speed. It has device.memory_bytes"):
        changed(cluster, {"host.speed": 1.0})


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(MachineError) as caught:
        load(written(folder, text))
    return str(caught.value)


def test_an_unknown_name_lists_the_names():
    with pytest.raises(
        MachineError, match=r"There is no cluster 'h100-80gb-sxn'. Did you mean h100-80gb-sxm\?"
    ) as caught:
        named("h100-80gb-sxn")
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("fabric", ["fast", "8", "x400", "8x", "0x400", "8x-400", "8 x 400", "8x4e2"])
def test_rails_are_numbers(fabric: str):
    with pytest.raises(
        MachineError, match=f"fabric={fabric} is not RAILSxGIGABITS of a host. Write 8x400 for eight rails"
    ):
        named("h200-sxm", hosts=2, fabric=fabric)


def test_hosts_without_a_fabric():
    with pytest.raises(
        MachineError, match="p40-24gb has no fabric of its own to join 2 hosts. Give one, like fabric=8x400."
    ):
        named("p40-24gb", hosts=2)
    with pytest.raises(MachineError, match="hosts=0 is no number of hosts"):
        named("h200-sxm", hosts=0)


@pytest.mark.parametrize(
    "constant",
    [
        "0.5",
        "{ value = 0.5 }",
        '{ value = 0.5, source = "us", fitted = "a.csv: all" }',
        '{ value = 0.5, why = "so" }',
    ],
)
def test_a_constant_without_a_source(tmp_path: Path, constant: str):
    text = f'inherit = "h200-sxm"\n[sources]\nus = "we say so"\n[fabric]\nefficiency = {constant}'
    assert refusal(tmp_path, text).startswith(
        "fabric.efficiency of mine has no source. Write fabric.efficiency = { value = ..., source = ... }"
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            'efficiency = { value = 0.5, source = "them" }',
            "has the source 'them', which [sources] does not explain",
        ),
        ('efficiency = { value = 0.5, source = "" }', "was fitted on '', which names no rows"),
        ('efficiency = { value = 0.5, fitted = "by eye" }', "was fitted on 'by eye', which names no rows"),
        ('efficiency = { value = 1.5, fitted = "a.csv: all" }', "is 1.5, and a share is at most 1"),
        ('efficiency = { value = 0, fitted = "a.csv: all" }', "is 0, and must be a number above 0"),
        (
            'hop_seconds = { value = "1 us", fitted = "a.csv: all" }',
            "is '1 us', and must be a number above 0",
        ),
        ('speed = { value = 5, fitted = "a.csv: all" }', "The fabric of mine has speed, which is not known"),
        ("efficiency = 5 =", "mine is no TOML"),
    ],
)
def test_a_constant_that_cannot_be(tmp_path: Path, line: str, sentence: str):
    assert sentence in refusal(tmp_path, f'inherit = "h200-sxm"\n[fabric]\n{line}')


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("links = { value = [[0, 1]], fitted = 'a.csv: all' }", "Write [[GPU, GPU, HOW MANY], ...]."),
        ("links = { value = 3, fitted = 'a.csv: all' }", "Write [[GPU, GPU, HOW MANY], ...]."),
        ("links = { value = [[0, 8, 1]], fitted = 'a.csv: all' }", "do not join two of 8 GPUs"),
        ("links = { value = [[5, 5, 1]], fitted = 'a.csv: all' }", "do not join two of 8 GPUs"),
        ("links = { value = [[0, 1, 1]], fitted = 'a.csv: all' }", "need a rate"),
        ("in_switch_ranks = { value = 5, fitted = 'a.csv: all' }", "need a rate"),
        ("gpus = { value = 8.0, fitted = 'a.csv: all' }", "is 8.0, and must be a whole number above 0"),
        (
            "peak_flops.int8 = { value = 1, fitted = 'a.csv: all' }",
            "host.peak_flops.int8 of mine is no constant of a cluster",
        ),
    ],
)
def test_links_that_cannot_be(tmp_path: Path, line: str, sentence: str):
    assert sentence in refusal(tmp_path, f'inherit = "a100-80gb-sxm"\n[host]\n{line}')


def test_what_is_missing_is_named(tmp_path: Path):
    assert "The fabric of mine lacks efficiency, hop_seconds, whole_host_efficiency" in refusal(tmp_path, "")


def test_a_section_that_is_none(tmp_path: Path):
    text = 'inherit = "h200-sxm"\n[rack]\nunits = { value = 42, fitted = "a.csv: all" }'
    assert refusal(tmp_path, text).startswith("rack.units of mine is no constant of a cluster.")


def test_files_that_inherit_in_a_circle(tmp_path: Path):
    written(tmp_path, 'inherit = "mine"', "other")
    assert "mine inherits other inherits mine: that never ends" in refusal(tmp_path, 'inherit = "other"')
    assert "There is no cluster 'nobody'" in refusal(tmp_path, 'inherit = "nobody"')
    with pytest.raises(MachineError, match="There is no cluster file"):
        load(tmp_path / "absent.toml")


def test_too_many_fitted_constants(tmp_path: Path):
    fitted = "\n".join(
        f'dtype{number} = {{ value = 1e12, fitted = "a.csv: all" }}' for number in range(MOST_FITTED)
    )
    sentence = refusal(tmp_path, f'inherit = "h200-sxm"\n[device.peak_flops]\n{fitted}')
    assert "more than 20. Take published values for some of" in sentence
