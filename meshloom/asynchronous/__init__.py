"""Asynchronous training of a job: the state machines of `exchange/elastic/`, with parameters, gradients and data.

division.py     which server holds which elements       shares.py       the data of one push
parameters.py   what a server holds, and its updates    replica.py      the model on which workers compute
checkpoints.py  where a run begins, and what it saves   inspection.py   evaluates and saves snapshots
settings.py     what a run is told                      account.py      what it has come to
options.py      the same on the command line           team.py         a worker of several ranks

run.py          a run on simulated devices, from its start or a checkpoint to its end
processes.py    a run on processes, as its launcher sees it
serving.py      a server's process                      working.py      a worker's process
playing.py      which of the two this process is        greetings.py    how a worker gets in
codec.py        messages as headers and tensors         outbox.py       messages that wait for a peer
snapshots.py    a server's files                       reports.py      what a server tells its launcher
looking.py      snapshots looked at beside training
"""
