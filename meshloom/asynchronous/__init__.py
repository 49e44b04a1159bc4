"""Asynchronous training of a job: the state machines of `exchange/elastic/`, with parameters, gradients and data.

division.py     which server holds which elements       shares.py    the data of one push
parameters.py   what a server holds, and its updates    replica.py   the model on which workers compute
team.py         the same, divided over the ranks of a worker
run.py          a run on simulated devices, from its start or a checkpoint to its end
"""
