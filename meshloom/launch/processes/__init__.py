"""Processes of a run: started, watched, ended.

child.py         the one way in which a process is started   guard.py         ends the ranks of a launcher that was killed
rank_process.py  one rank, as the launcher sees it           hang.py          which rank hangs, if one does
children.py      the processes started here, together        signals.py       signals that are noted
launcher.py      run_ranks: starts, watches, ends the ranks of a mesh
elastic.py       servers and workers of an asynchronous plan, and servers again
"""
