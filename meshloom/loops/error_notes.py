"""What is said beside an error that is not ours, where it is one of those that ranks of a script bring about."""

from __future__ import annotations

import re
import traceback

from torch.serialization import __file__ as _LOADING

from meshloom.core.errors import CollectiveError, MeshloomError
from meshloom.loops.taken_shares import bound, newest


def note_of(error: BaseException) -> str | None:
    """The way out; None: there is none of ours."""
    if isinstance(error, CollectiveError):
        return (
            "Every rank of a script calls the model, its state and ml.save alike: `if ml.main:` goes around what prints and writes, and what decides "
            "(if, break, except) must come from ml.mean."
        )
    if isinstance(error, MeshloomError):
        return None
    if "initialize the default process group twice" in str(error):
        return "meshloom has made it: leave init_process_group out of the script. torch.distributed works without."
    if isinstance(error, FileNotFoundError | FileExistsError) or _is_of_loading(error):
        return (
            "Every rank runs this line: `with ml.main_first():` goes around what makes or removes files, and ml.save(...), in place of torch.save, "
            "goes on when its file is there."
        )
    if type(error) not in (RuntimeError, ValueError, IndexError):  # as torch tells of sizes
        return None
    for share in (bound(), newest()):
        samples = int(sum(share.sizes)) if share else 0
        if share and len({*re.findall(r"\d+", str(error))} & {str(share.rows), str(samples)}) == 2:
            return (
                f"This replica has {share.rows} of the batch's {samples} samples: ml.share(x) gives its part of a tensor of the whole batch, ml.gather(x) has "
                "the rows of all replicas."
            )
    return None


def _is_of_loading(error: BaseException) -> bool:
    return any(each.filename == _LOADING for each in traceback.extract_tb(error.__traceback__))
