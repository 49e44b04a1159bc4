"""A job's loss becomes a program that is compared with eager, or is refused."""
