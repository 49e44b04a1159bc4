"""The compiled part of the package: without a compiler the installation succeeds, and ranks of one machine
talk over Gloo."""

from glob import glob

from setuptools import Extension, setup

NATIVE = "meshloom/comm/shm/native"

setup(
    ext_modules=[
        Extension(
            "meshloom.comm.shm._engine",
            sources=sorted(glob(f"{NATIVE}/*.c")),
            depends=sorted(glob(f"{NATIVE}/*.h")),
            # A product may not be fused with a sum: results must not depend on the processor.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
