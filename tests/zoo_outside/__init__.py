"""A second zoo, written without knowledge of how the first is run, out of what other repositories do: jobs in all fields, unannotated."""
