"""The equality matrix: sixty models, chosen by feature, times the settings of plans and jobs, any two of which meet.

    models/       the models, a file for each family
    settings.py   the settings, their values, and which of these go together
    cells.py      the cells of a model: few that have every value, and many in which any two values meet
    running.py    runs a cell: what verification says, bytes, and whether the plan did something
    plain.py      a training loop that shares nothing with verification, for twelve of the cells

`make test` runs a few cells of each of the first twenty models, `make test-all` all cells.
"""
