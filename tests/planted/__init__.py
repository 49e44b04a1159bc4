"""Silent bugs, planted one at a time into the product by patching its code, in every area of a run. What they do follows from
the documents; verification is not told of them."""

import tests.planted.further  # noqa: F401
from tests.planted.areas import (  # noqa: F401  # each module adds its bugs to the list
    around_runs,
    buffers,
    data,
    division,
    evaluation,
    exchange,
    loop,
    optimizer,
    pipelines,
    precision,
    sharded,
    transports,
)
from tests.planted.bugs import BUGS as BUGS
