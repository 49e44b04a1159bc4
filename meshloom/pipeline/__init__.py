"""Pipeline parallelism: a program's stages, their schedules, and the runtime."""
