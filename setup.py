"""The compiled part of the package: without a compiler the installation succeeds, and ranks of one machine talk over Gloo."""

from setuptools import Extension, setup

NATIVE = "meshloom/comm/native"

setup(
    ext_modules=[
        Extension(
            "meshloom.comm._engine",
            sources=[f"{NATIVE}/module.c", f"{NATIVE}/engine.c", f"{NATIVE}/reduce.c"],
            depends=[f"{NATIVE}/engine.h", f"{NATIVE}/reduce.h"],
            # A product may not be fused with a sum: results must not depend on the processor.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
