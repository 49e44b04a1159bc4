"""Job files whose models are to be described, for tests of the command line."""

from __future__ import annotations

from tests.test_describe import Stack, job_of

job = job_of(Stack)
