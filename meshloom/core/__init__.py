"""Plain values that everything stands on: the job, the plan, the mesh, errors, units."""
