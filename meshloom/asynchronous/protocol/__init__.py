"""Asynchronous training as state machines: no clock, no input or output of their own, so that a simulation
and real processes run the same ones.

                 Join, Leave                 Apply, Give, Keep, Drop, Restore
    worker.py  ---------------->  head.py  ------------------------------------>  store.py (server 0 .. K-1)
               <----------------           <------------------------------------
                 Rejoin, Done                Staged, Kept, Back
               ------------------------------ Push, a part to every server ---->
               <----------------------------- Part, one of every server --------

    messages.py   what they say to each other          clocks.py    how far workers are apart (bounded staleness)
    head.py       decides: who computes what, order    ledger.py    which shares of the data are done, out, or free
    store.py      one server's part of the parameters  virtual.py   runs all of them on a virtual clock
    worker.py     one worker's part in it              circumstances.py   what happens on it: speeds, latencies, who comes and goes

The head lives in the process of server 0. Each machine's `receive(message)` returns the messages that it
sends, as (address, message) pairs. Messages from one to another must arrive in the order in which they were
sent; they may be lost only where an end of the connection is, and may arrive twice.
"""
