"""Stage boundaries in a program, and the programs of the stages."""
