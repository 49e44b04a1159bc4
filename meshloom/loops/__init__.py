"""A loop of one's own on many devices: every rank runs the whole script, and `parallel()` makes its modules one model.

ranks.py            the mesh as this process sees it          agreement.py       what ranks must have alike is compared
parallel.py         a module's calls ask its execution        means.py           mean, sum and gather of the global batch
execution.py        the contract of executions                saving.py          one file for all ranks
module_copies.py    dp                                        loader.py, share.py, taken_shares.py    shares of batches
sharded_module.py   zero=1 to 3, with gathering.py            part_*.py, made_parts.py, flat_parts.py    parts of tensors
divided_module.py   tp and pp, with captured_forward.py, pipelined_call.py, module_share.py; gathering.py under zero, too
divided_within.py   tp and pp of modules within one that runs as written
"""
