"""Programs of a job, each captured once and kept on disk for later starts."""
