"""Parameters in bfloat16: the job that has them, and what keeps their updates exact, float32 copies of what a rank updates
or rounding by chance."""
