"""Asynchronous training of a job: workers compute gradients at parameters of their own age, servers update
with every push.

protocol/        who computes what, and in which order all is done, as state machines without a clock
messaging/       what carries their messages between processes that come and go
state/           what servers hold, what workers compute with, snapshots and checkpoints
roles/           a server's and a worker's process, and a worker of several ranks

run.py           a run on simulated devices, from its start or a checkpoint to its end
processes.py     a run on processes, as its launcher sees it
start_role.py    which of the two this process is
account.py       what a run has come to
options.py       what it is told on the command line
"""
