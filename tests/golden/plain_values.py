"""Golden values that need no run: schedules, chunks, samples, keys, plans, names."""

from __future__ import annotations

import argparse
from dataclasses import replace

import meshloom as ml
from meshloom.cli.arguments import parser
from meshloom.core import random as keys
from meshloom.core.exchanges import COMPRESSIONS, EXCHANGES
from meshloom.core.plan import DEFAULTS
from meshloom.core.plan_text import text_of
from meshloom.core.precisions import PRECISIONS
from meshloom.core.schedules import SCHEDULES
from meshloom.data.map_data import Batches
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.timing import Durations
from tests.golden.exact_jobs import JOBS


def schedules() -> dict[str, str]:
    """The actions of every rank: p ranks, m microbatches."""
    found: dict[str, str] = {}
    for name, entry in SCHEDULES.items():
        for p, m in ((2, 2), (2, 3), (3, 6), (4, 8)):
            for stages in (entry.stages_per_rank, *([3] if entry.any_number else [])):
                schedule = make_schedule(name, p, m, stages)
                found[f"{name}, {p} ranks, {m} microbatches, {stages} stages each"] = str(schedule).partition(
                    "\n"
                )[2]
    for p, m in ((2, 3), (3, 6), (4, 8)):
        uneven = [1.0 + stage * stage % 3 for stage in range(p)]
        times = Durations(forward=uneven, input_gradient=uneven[::-1], weight_gradient=uneven, transfer=0.25)
        schedule = make_schedule("found", p, m, durations=times)
        found[f"found, {p} uneven ranks, {m} microbatches"] = str(schedule).partition("\n")[2]
    return found


def chunks() -> dict[str, str]:
    """Samples of each chunk, of each replica."""
    plans = (
        "dp=1", "dp=2", "dp=3", "dp=4", "dp=2,microbatches=2", "dp=3,microbatches=4", "dp=3,shares=4+2+1", "dp=4,shares=3+3+3+1,microbatches=2",
        "dp=2,shares=1+0", "pp=2,microbatches=4", "dp=8", "dp=2,shares=measured",
    )  # fmt: skip
    found: dict[str, str] = {}
    for text in plans:
        plan = ml.Plan.parse(text)
        for samples in (1, 2, 7, 8, 66):
            sizes, m = plan.sizes(samples), plan.microbatches
            rows = [" ".join(map(str, sizes[start : start + m])) for start in range(0, len(sizes), m)]
            found[f"{text}, {samples} samples"] = " | ".join(rows)
    return found


def samples() -> dict[str, str]:
    """The indexes of the batches, in order."""
    base = JOBS["mlp"]
    jobs = {
        "in order": replace(base, shuffle=False),
        "shuffled": base,
        "another seed": replace(base, seed=7),
        "drop_last": replace(base, drop_last=True),
    }
    found: dict[str, str] = {}
    for name, job in jobs.items():
        batches = Batches(job, 21)
        for step in range(7):
            epoch, indices = batches.of(step)
            found[f"{name}, 21 samples, step {step}"] = f"epoch {epoch}: {' '.join(map(str, indices))}"
    return found


def seeds() -> dict[str, str]:
    """Seeds of what is drawn, and the chain of keyed draws."""
    found: dict[str, int] = {}
    for seed in (0, 1, 2**31):
        found[f"model_seed({seed})"] = keys.model_seed(seed)
        for step, chunk in ((0, 0), (0, 1), (1, 0), (99, 3)):
            of_chunk = keys.chunk_seed(seed, step, chunk)
            found[f"chunk_seed({seed}, {step}, {chunk})"] = of_chunk
            found[f"evaluation_seed({seed}, {step}, {chunk})"] = keys.evaluation_seed(seed, step, chunk)
            found[f"sample_seed({seed}, {step}, {chunk})"] = keys.sample_seed(seed, step, chunk)
            for draw in range(3):
                of_chunk = keys.derive(of_chunk, "next")
                found[f"keyed draw {draw} of chunk_seed({seed}, {step}, {chunk})"] = of_chunk
    return {name: str(value) for name, value in found.items()}


def plans() -> dict[str, str]:
    """Texts as they are read, and as they are written; both forms, the mesh, and what is exempt from the promise."""
    texts = (
        "dp=1", "dp=4", "dp=2,pp=2,tp=2", "tp=2,dp=2", " dp = 2 , zero = 1 ", "dp=2,zero=3,microbatches=2", "dp=4,zero=3,zero_within=2", "dp=2,overlap=false",
        "dp=2,bucket_bytes=1024", "tp=2,tp_placements=up:column+down:row", "memory_bytes=8GiB", "pp=2,schedule=gpipe", "pp=2,schedule=interleaved,virtual_stages=3",
        "pp=2,schedule=zb-v,microbatches=4", "pp=3,cuts=blocks.2+blocks.4", "recompute=full", "dp=2,recompute=selective", "compile=true", "compile=false",
        "dp=4,exchange=ring", "dp=4,exchange=ring,zero=1", "dp=4,exchange=server,servers=2",
        "dp=4,exchange=async", "dp=4,exchange=async,staleness=0", "dp=4,exchange=async,staleness=3,rate_by_age=true", "dp=4,exchange=async,staleness=inf",
        "dp=2,exchange=local_sgd,local_steps=8", "dp=2,exchange=diloco,local_steps=8,outer_learning_rate=1,outer_momentum=0.5", "dp=2,compress=bf16",
        "dp=2,compress=powersgd", "dp=2,compress=topk:0.10", "dp=2,reduce=bf16", "dp=2,reduce=float32", "dp=4,shares=6+6+6+2", "dp=2,shares=measured",
        "precision=bf16-mixed", "precision=fp16-mixed", "dp=2,precision=bf16", "dp=2,sync_batch_norm=true", "keyed_draws=true",
        "offload=optimizer", "dp=2,microbatches=1,zero=0",
    )  # fmt: skip
    found: dict[str, str] = {}
    for text in texts:
        plan = ml.Plan.parse(text)
        mesh = plan.mesh
        found[text.strip()] = "\n".join(
            [
                str(plan),
                plan.to_json(),
                f"{mesh.size} ranks, {plan.num_chunks} chunks, {plan.num_stages} stages, exempt: {plan.exempt or 'no'}",
            ]
        )
    return found


def names() -> dict[str, str]:
    """What users write, and what they read: public names, settings and their defaults, values, verbs and their flags, ranks."""
    found = {"public names": "\n".join(ml.__all__)}
    found |= {f"setting {name}": text_of(value) for name, value in DEFAULTS.items()}
    registries = {
        "exchange": EXCHANGES,
        "schedule": SCHEDULES,
        "compress": COMPRESSIONS,
        "precision": PRECISIONS,
    }
    found |= {f"values of {name}": " ".join(registry) for name, registry in registries.items()}
    verbs = next(each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    for verb, own in verbs.choices.items():
        flags = [
            " ".join(each.option_strings) or f"({each.dest})" for each in own._actions if each.dest != "help"
        ]
        found[f"meshloom {verb}"] = "\n".join(flags)
    mesh = ml.Plan.parse("dp=2,pp=2,tp=2").mesh
    found["ranks of dp=2,pp=2,tp=2"] = "\n".join(f"{rank}: {mesh.place(rank)}" for rank in range(mesh.size))
    return found
