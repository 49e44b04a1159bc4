"""What code of the user that is not torch's depends on while a loss is computed: the step, the modes of modules, and what `random` and numpy draw."""
