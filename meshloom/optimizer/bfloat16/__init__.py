"""Parameters in bfloat16: the job that has them, and float32 copies of what a rank updates, which keep their updates exact."""
