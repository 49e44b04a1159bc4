"""Published training runs: seconds of a step, and memory. A run's plan is as published; what was not is by the rule that its function states.

Naive: one utilisation of the peak for all runs of a cluster, the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from measured_tables import Clusters, Row, fitted_on, read_table
from published_models import PublishedPart, Shape

from meshloom.clusters.cluster import Cluster, named
from meshloom.core.plan import Plan
from meshloom.planner.on_clusters.step import ClusterStep


@dataclass(frozen=True, kw_only=True)
class Run:
    """samples: of a microbatch. hides_tp: whether what is sent along tp goes beside products. measured: seconds; bytes_measured: 0 where not
    published. missing: why it cannot be expressed."""

    name: str
    shape: Shape
    plan: Plan
    samples: int
    cluster: Cluster
    measured: float
    recompute: str = "none"
    compiled: bool = True
    hides_tp: bool = False
    bytes_measured: float = 0.0
    missing: str = ""

    @property
    def model(self) -> str:
        return f"{self.shape.kind} {self.shape.hidden} x {self.shape.layers}"

    @property
    def flops(self) -> float:
        """6 per parameter and token, and the scores' (Narayanan et al., 2021)."""
        shape, tokens = self.shape, self.plan.dp * self.plan.microbatches * self.samples * self.shape.length
        return tokens * (6 * shape.parameters + 12 * shape.layers * shape.hidden * shape.length)

    def step(self) -> ClusterStep:
        part = PublishedPart(
            self.shape,
            self.cluster,
            self.plan.tp,
            recompute=self.recompute,
            compiled=self.compiled,
            hides_tp=self.hides_tp,
        )
        return part.pricer.step(self.plan, part, self.samples, simulated=True)


def _gpt(line: dict[str, str], kind: str, vocabulary: int, length: int) -> Shape:
    heads = line.get("attention_heads") or line["heads"]
    return Shape(
        kind=kind,
        hidden=int(line["hidden"]),
        heads=int(heads),
        layers=int(line["layers"]),
        vocabulary=vocabulary,
        length=length,
    )


def _on(clusters: Clusters, name: str, hosts: int = 1) -> Cluster:
    return replace(clusters(name), hosts=hosts)


def _schedule(virtual: int) -> dict[str, Any]:
    return {"schedule": "interleaved", "virtual_stages": virtual} if virtual > 1 else {}


def sc21_table_1(folder: Path, clusters: Clusters) -> Iterator[Run]:
    """All blocks computed again; gradients are all-reduced."""
    for line in read_table(folder / "megatron_sc21_table1_weak_scaling.csv"):
        tp, pp, gpus, samples = (int(line[name]) for name in ("tp", "pp", "n_gpus", "microbatch"))
        shape = _gpt(line, "gpt-2021", 51200, 2048)
        dp = gpus // tp // pp
        per = line["layers_per_virtual_stage"]
        virtual = shape.layers // pp // int(per) if per and pp > 1 else 1
        batch = int(line["batch_size_sequences"])
        plan = Plan(
            dp=dp, pp=pp, tp=tp, microbatches=batch // dp // samples, precision="bf16", **_schedule(virtual)
        )
        yield Run(
            name=f"{line['params_billion']}B", shape=shape, plan=plan, samples=samples, cluster=_on(clusters, "a100-80gb-sxm", hosts=gpus // 8),
            measured=float(line["step_time_s_DERIVED"]), recompute="full",
        )  # fmt: skip


def sc21_table_2(folder: Path, clusters: Clusters) -> Iterator[Run]:
    """Rows of tensor and pipeline parallelism, and of ZeRO-3, whose network the paper's own figures do not explain. Virtual stages as in table 1."""
    shapes = {
        "174.6": Shape(kind="gpt-2021", hidden=12288, heads=96, layers=96, vocabulary=51200, length=2048),
        "529.6": Shape(kind="gpt-2021", hidden=20480, heads=128, layers=105, vocabulary=51200, length=2048),
    }
    for line in read_table(folder / "megatron_sc21_table2_zero3_vs_ptd.csv"):
        shape, gpus, samples = shapes[line["params_billion"]], int(line["n_gpus"]), int(line["microbatch"])
        batch = int(line["batch_size"].rstrip("*"))
        inside = int(line["model_parallel_size"])
        tp, pp = (8, inside // 8) if inside > 1 else (1, 1)
        dp = gpus // tp // pp
        settings: dict[str, Any] = {"zero": 3} if inside == 1 else {}
        plan = Plan(dp=dp, pp=pp, tp=tp, microbatches=batch // dp // samples, precision="bf16", **settings)
        days = float(line["days_for_300B_tokens"])
        yield Run(
            name=f"{line['scheme']} {line['params_billion']}B {gpus} GPUs", shape=shape, plan=plan, samples=samples,
            cluster=_on(clusters, "a100-80gb-sxm", hosts=gpus // 8), measured=days * 86400 / (300e9 / batch / 2048), recompute="full",
            missing="the published times imply 12.5 to 17.6 of a rail's 25 GB/s" if inside == 1 else "",
        )  # fmt: skip


def korthikanti_tables(folder: Path, clusters: Clusters) -> Iterator[Run]:
    """Full recomputation, and attention alone together with sequence parallelism, which is how tp divides here in both."""
    for line in read_table(folder / "korthikanti_table3_5_iteration_time.csv"):
        tp, pp, gpus, dp, samples = (int(line[name]) for name in ("tp", "pp", "n_gpus", "dp", "microbatch"))
        batch, shape = int(line["global_batch"]), _gpt(line, "gpt-2021", 51200, 2048)
        plan = Plan(
            dp=dp,
            pp=pp,
            tp=tp,
            microbatches=batch // dp // samples,
            precision="bf16",
            **_schedule(int(line["interleave_m"])),
        )
        for column, recompute in (("full_recompute_s", "full"), ("present_work_s", "attention")):
            if line[column]:
                yield Run(
                    name=f"{line['model']} {gpus} GPUs, {recompute} again", shape=shape, plan=plan, samples=samples,
                    cluster=_on(clusters, "a100-80gb-sxm", hosts=gpus // 8), measured=float(line[column]), recompute=recompute,
                )  # fmt: skip


def megatron_core(folder: Path, clusters: Clusters) -> Iterator[Run]:
    """Rule: microbatches of one sample, or two without pp; two virtual stages where pp > 1 divides the blocks so; nothing again. All communication is
    overlapped there, along tp too."""
    for line in read_table(folder / "megatron_core_h100_weak_scaling.csv"):
        tp, pp, dp, batch, gpus = (
            int(line[name]) for name in ("tp", "pp", "dp", "batch_size_sequences", "n_gpus")
        )
        shape = _gpt(line, "gpt", 131072, 4096)
        samples = 2 if pp == 1 and batch // dp % 2 == 0 else 1
        virtual = 2 if pp > 1 and shape.layers % (2 * pp) == 0 else 1
        plan = Plan(
            dp=dp,
            pp=pp,
            tp=tp,
            microbatches=batch // dp // samples,
            precision="bf16",
            zero=1,
            **_schedule(virtual),
        )
        h, s, v = shape.hidden, shape.length, shape.vocabulary
        flops = 72 * batch * s * shape.layers * h * h * (1 + s / (6 * h) + v / (12 * h * shape.layers))
        yield Run(
            name=line["model"], shape=shape, plan=plan, samples=samples, cluster=_on(clusters, "h100-80gb-sxm", hosts=gpus // 8),
            measured=flops / gpus / (float(line["tflops_per_gpu"]) * 1e12), hides_tp=True,
        )  # fmt: skip


LLAMA_8B = Shape(
    kind="llama", hidden=4096, heads=32, layers=32, vocabulary=128256, length=8192, feed_forward=14336, key_heads=8
)  # fmt: skip
LLAMA_70B = replace(LLAMA_8B, hidden=8192, heads=64, layers=80, feed_forward=28672)
LLAMA_405B = replace(LLAMA_8B, hidden=16384, heads=128, layers=126, feed_forward=53248)


def torchtitan(folder: Path, clusters: Clusters) -> Iterator[Run]:
    """Selective there: every second product again, a third of a forward."""
    for line in read_table(folder / "torchtitan_h100_2024_12.csv"):
        shape = {"8B": LLAMA_8B, "70B": LLAMA_70B, "405B": LLAMA_405B}[line["model"].partition("-")[2]]
        gpus, dp, tp, pp, local = (
            int(line[name]) for name in ("n_gpus", "dp_fsdp", "tp", "pp", "local_batch")
        )
        length = int(line["seq_len"])
        missing = "float8" if line["float8"] == "yes" else "context parallelism" if line["cp"] != "1" else ""
        plan = Plan(dp=dp, tp=tp, pp=pp, zero=3, precision="bf16", microbatches=local if pp > 1 else 1)
        yield Run(
            name=f"{line['model']} {gpus} GPUs, compile {line['compile']}, {line['act_ckpt']}, {length} tokens{', float8' * (line['float8'] == 'yes')}",
            shape=replace(shape, length=length), plan=plan, samples=1 if pp > 1 else local, cluster=_on(clusters, "h100-96gb-500w", hosts=gpus // 8),
            measured=dp * local * length / gpus / float(line["tps_per_gpu"]), recompute="third" if line["act_ckpt"] == "selective" else "full",
            compiled=line["compile"] == "yes", missing=missing, bytes_measured=float(line["memory_gib"]) * 2**30,
        )  # fmt: skip


def simumax_b200(folder: Path, clusters: Clusters) -> Iterator[Run]:
    """Sequences of 4,096 tokens, microbatches of one; gradients in float32, sharded optimizer."""
    for line in read_table(folder / "simumax_b200_real_vs_predicted.csv"):
        words = line["case"].split("_")
        number = {
            word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz"))
            for word in words
            if word[-1].isdigit() and word[0].isalpha()
        }
        is_llama = words[0] == "llama3"
        shape = {"70b": LLAMA_70B, "405b": LLAMA_405B}.get(words[1], LLAMA_70B)
        shape = replace(shape, layers=number["l"], length=number.get("seq", 4096))
        missing = "experts" if not is_llama else "context parallelism" if "cp" in number else ""
        plan = Plan(
            dp=number["dp"],
            tp=number["tp"],
            pp=number["pp"],
            microbatches=number["mbc"],
            zero=1 if number["dp"] > 1 else 0,
            precision="bf16",
        )
        yield Run(
            name=line["case"], shape=shape, plan=plan, samples=1, cluster=_on(clusters, "b200-sxm"), measured=float(line["real_ms"]) / 1e3,
            bytes_measured=float(line["real_alloc_GiB"]) * 2**30, missing=missing,
        )  # fmt: skip


def seconds(runs: Sequence[Run], table: str) -> Iterator[Row]:
    expressed = [run for run in runs if not run.missing]
    utilisation = statistics.median(
        run.flops / run.plan.mesh.size / _peak(run.cluster) / run.measured for run in expressed
    )
    for run in runs:
        if run.missing:
            yield Row(
                name=run.name,
                model=run.model,
                cluster=run.cluster.name,
                measured=run.measured,
                missing=run.missing,
            )
            continue
        naive = run.flops / run.plan.mesh.size / _peak(run.cluster) / utilisation
        yield Row(
            name=run.name, model=run.model, cluster=run.cluster.name, measured=run.measured, predicted=run.step().seconds, naive=naive,
            fitted=fitted_on(run.cluster, table),
        )  # fmt: skip


def memory(folder: Path, clusters: Clusters = named) -> Iterator[Row]:
    """Bytes of tensors, with gradients of twice the size, as Megatron-LM adds them up in float32. Naive: 16 bytes a parameter over tp and pp."""
    for run in simumax_b200(folder, clusters):
        row = Row(
            name=run.name,
            model=run.model,
            cluster=run.cluster.name,
            measured=run.bytes_measured,
            missing=run.missing,
        )
        if run.missing:
            yield row
            continue
        step = run.step()
        naive = 16 * run.shape.parameters / (run.plan.tp * run.plan.pp)
        slices, buckets = step.memory["gradients"], step.memory["exchange"]
        yield replace(row, predicted=step.peak - slices - buckets + 2 * (buckets or slices), naive=naive)


def _peak(cluster: Cluster) -> float:
    return cluster.device.peak_flops["bfloat16"]


def _rows(table: str, runs: Runs, folder: Path, clusters: Clusters = named) -> Iterator[Row]:
    return seconds(list(runs(folder, clusters)), table)


Runs = Callable[[Path, Clusters], Iterator[Run]]
RUNS: dict[str, tuple[Runs, str]] = {
    "SC'21 table 1": (sc21_table_1, "megatron_sc21_table1"),
    "SC'21 table 2": (sc21_table_2, "megatron_sc21_table2"),
    "Korthikanti tables 3 and 5": (korthikanti_tables, "korthikanti_table3_5"),
    "Megatron-Core": (megatron_core, "megatron_core"),
    "torchtitan": (torchtitan, "torchtitan"),
    "B200": (simumax_b200, "simumax_b200"),
}
RUN_TABLES: dict[str, Callable[[Path, Clusters], Iterator[Row]]] = {
    **{name: partial(_rows, table, runs) for name, (runs, table) in RUNS.items()},
    "B200, bytes": memory,
}
