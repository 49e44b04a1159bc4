"""Asynchronous training as state machines without clock, input or output, for a simulation and for processes.

                 Join, Leave                 Apply, SendParameters, TakeSnapshot, DropPush, Restore
    worker.py  ---------------->  head.py  --------------------------------------------------->  store.py (server 0 .. K-1)
               <----------------           <---------------------------------------------------
                 Done                        PushStaged, SnapshotKept, ServerReport
               ------------------------------ Push, a part to every server ------------------->
               <----------------------------- ParametersPart, one of every server -------------

    messages.py   the messages between them            clocks.py    how far workers are apart (bounded staleness)
    head.py       decides who computes what, in order  leases.py    which worker computes which share
    store.py      one server's part of the parameters  events.py    what the head reports
    worker.py     one worker                           circumstances.py   speeds, latencies and incidents
    virtual.py    runs all of them on a virtual clock

The head runs in the process of server 0. Each machine's `receive(message)` returns the messages that it
sends, as (address, message) pairs. Messages between two machines must arrive once, in the order in which they
were sent; they may be lost only when a connection ends.
"""
