"""A third zoo, of kinds that the others lack, written anew from what public repositories do: see `tests/test_zoo.py`."""
