"""Processes of a run: started, watched, ended.

launcher.py      run_ranks: starts, watches, ends          guard.py         the process that outlives a killed launcher
rank_process.py  one rank, as the launcher sees it         hang.py          which rank hangs, if one does
children.py      processes started here: heard, ended      signals.py       signals that are noted
elastic.py       servers and workers of an asynchronous plan, and servers again
worker_team_processes.py  the ranks of a worker that is several
"""
