"""Puts ranks on devices: starts rank processes, joins those that others started, or keeps all ranks in this
process.

    meshloom train FILE        choose_devices -> run_ranks ----starts----> N times the same command, each is_rank()
    torchrun / srun / k8s      ------------------------------starts----->  N times the same command, each is_rank()
                                                                                |
    python FILE, simulated     ----------------------------------------->  open_world -> World

While `run_ranks` runs there are the launcher, N ranks, each the leader of a session (and so of a process
group, to which its data workers belong), and a guard: a few lines of Python that hold a pipe from the
launcher and kill the groups when it closes, because a
launcher that is killed with -9 cannot. Each rank holds a pipe to the launcher, on which it says that it is
joining, has
joined, or has failed and why; what it is doing it writes to a page of memory that the launcher can read
(`comm/liveness/activity.py`). The store in which ranks meet is the launcher's, on a port that the kernel
picked.

    environment.py   what a process was told; alone reads it   opening.py       open_world: which of the next two
    devices.py       the choice of devices and its reason      joining.py       a rank of several processes, and its parting
    world.py         LocalRank, World: what is opened          one_process.py   all ranks in this process
    connecting.py    the groups of a rank                      transport.py     what ranks talk through, and why
    failure.py       what ended a process, in one message      events.py        a rank's line to its launcher
    names.py         how ranks and counts are written          allocator.py     freed memory is kept for the next step
    role.py          what a server or a worker is told         processes/       starts, watches and ends them
"""
