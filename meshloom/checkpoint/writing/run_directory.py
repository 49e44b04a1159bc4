"""The directory that a run saves to, checked before its first step: it is writable, and no checkpoint of an
earlier run is lost unintentionally."""

from __future__ import annotations

from pathlib import Path

from meshloom.checkpoint.format import committed, step_directories, stray_file
from meshloom.checkpoint.writing.saving import try_saving
from meshloom.comm.group import Group
from meshloom.comm.objects import collect, share
from meshloom.core.errors import CheckpointError


def open_directory(
    directory: Path | None, group: Group, *, resume: Path | None, overwrite: bool
) -> list[Path]:
    """The checkpoints of an earlier run that this run's first checkpoint replaces. Every rank of `group`
    calls it.

    directory: None: nothing is saved. resume: the checkpoint that the run continues from. overwrite: whether
    an earlier run's checkpoints may be replaced. Raises the same `CheckpointError` on every rank if they may
    not, or if some rank cannot write.
    """
    everyone = collect(group, None if directory is None else str(directory.absolute()))
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise CheckpointError(
                f"Rank {rank} saves to {theirs} and rank 0 to {everyone[0]}. Give all ranks one directory that they share."
            )
    if directory is None:
        if overwrite:
            raise CheckpointError(
                "--overwrite (overwrite=True) is about checkpoints in --out (out=), which this run does not have. Leave it out."
            )
        return []
    goes_on = resume is not None and directory.resolve() in (resume.resolve(), resume.resolve().parent)
    if goes_on and overwrite:
        raise CheckpointError(
            f"--resume {resume} goes on with the checkpoints in {directory}, and --overwrite replaces them. Leave one of them out."
        )
    earlier = step_directories(directory) if group.rank == 0 and not goes_on else []
    refused = (
        f"Nothing can be saved: {stray}." if group.rank == 0 and (stray := stray_file(directory)) else ""
    )
    if earlier and not overwrite and not refused:
        refused = _refusal(directory, earlier)
    if refused := share(group, refused):
        raise CheckpointError(refused)
    try_saving(directory, group)
    return earlier


def _refusal(directory: Path, earlier: list[Path]) -> str:
    newest = (committed(directory) or earlier[::-1])[0]
    return (
        f"{directory} holds checkpoints of an earlier run, the newest of step {int(newest.name.rpartition('-')[2])}. Go on from it with "
        f"--resume {directory} (resume=), or begin anew with --overwrite (overwrite=True), which removes them once this run has saved its first."
    )
