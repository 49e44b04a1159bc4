"""Whether a script's own loop computes under a plan what it computes by itself, on whole batches and as plain copies."""
