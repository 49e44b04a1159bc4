"""Plain values on which everything else depends: the job, the plan, the mesh, errors, units."""
