"""Asynchronous training: workers compute gradients at parameters of their own age, every push is an update.

protocol/        who computes what, and in which order all is done, as state machines without a clock
messaging/       what carries their messages between processes that come and go
state/           what servers hold, what workers compute with, snapshots and checkpoints
roles/           a server's and a worker's process

run.py               a run on simulated devices
processes.py         a run on processes, in its launcher
received_reports.py  what servers report to the launcher
start_role.py        a process as a server or a worker
account.py           updates, ages and losses of a run
options.py           options of the command line
"""
