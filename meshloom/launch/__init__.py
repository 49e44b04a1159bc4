"""Places ranks on devices: starts rank processes, joins those of other launchers, or simulates ranks here.

    meshloom train FILE        choose_devices -> run_ranks ----starts----> N times the same command, each is_rank()
    torchrun / srun / k8s      ------------------------------starts----->  N times the same command, each is_rank()
                                                                                |
    python FILE, simulated     ----------------------------------------->  open_world -> World

While `run_ranks` runs there are the launcher, N ranks, each the leader of a session (and so of a process
group, to which its data workers belong), and a guard: a few lines of Python that hold a pipe from the
launcher and kill the groups when it closes, because a launcher that is killed with -9 cannot. Each rank holds
a pipe to the launcher, on which it reports that it is joining, has joined, or has failed and why. Its current
activity it writes to a page of memory that the launcher reads (`comm/liveness/activity.py`). The launcher
hosts the store in which ranks meet, on a port that the kernel picks.

    environment.py   environment variables; alone reads them   opening.py       open_world: which of the next two
    devices.py       the choice of devices and its reason      joining.py       joins the other rank processes
    world.py         LocalRank, World: what is opened          one_process.py   simulates all ranks in this process
    connecting.py    the groups of a rank                      transport.py     transports of groups, and why
    failure.py       what ended a process, in one message      events.py        a rank's reports to its launcher
    names.py         how ranks and counts are written          allocator.py     keeps freed memory for the next step
    role.py          the role of a server or worker            processes/       starts, watches and ends processes
    first_of_host.py one process of a host goes first          child_environment.py   what processes started here find
"""
