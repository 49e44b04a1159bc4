"""Where a program is cut into stages, and the programs of the stages."""
