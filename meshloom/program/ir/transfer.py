"""Programs as bytes, for other ranks and the cache: a header of JSON, then the constants. Nothing is pickled.

magic | hash of the rest (16 bytes) | length of the header (8 bytes) | header | constants (safetensors)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils._pytree import TreeSpec, treespec_loads

from meshloom.core.errors import CaptureError
from meshloom.program.ir.contexts import Context
from meshloom.program.ir.encoding import (
    decoded,
    decoded_context,
    decoded_node,
    decoded_tensor,
    encoded,
    encoded_context,
    encoded_node,
    encoded_structure,
    encoded_tensor,
)
from meshloom.program.ir.lines import WAY_OUT, SourceLine
from meshloom.program.ir.nodes import Input, Variable
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import bits_of, dense_parts, from_parts, is_sparse

_MAGIC = b"meshloom program 2\n"
_HASH_BYTES = 16
_LENGTH_BYTES = 8


def pack(program: Program) -> bytes:
    """The program as bytes. Raises `CaptureError` for what cannot be sent: an operator without a name, an
    unusual return type of the loss."""
    contexts: dict[Context, int] = {}
    lines: dict[SourceLine, int] = {}
    nodes = [encoded_node(node, contexts, lines) for node in program.nodes]
    header = {
        "parameters": [encoded_tensor(each) for each in program.parameters.values()],
        "buffers": [encoded_tensor(each) for each in program.buffers.values()],
        "constants": {name: _description(name, each) for name, each in program.constants.items()},
        "inputs": [encoded_tensor(each) for each in program.inputs],
        "contexts": [encoded_context(each) for each in contexts],
        "lines": [[each.file, each.number, each.function] for each in lines],
        "nodes": nodes,
        "outputs": encoded(program.outputs),
        "out_spec": _dumped(program.out_spec),
        "updates": {name: each.name for name, each in program.updates.items()},
        "in_place": sorted(program.in_place),
        "device": str(program.device),
        "training": program.training,
        "precision": encoded(program.precision),
        "opaque": dict(program.opaque),
        "by_shapes": program.by_shapes,
        "others": dict(program.others),
    }
    text = json.dumps(header, allow_nan=False).encode()
    constants = {} if program.by_shapes else program.constants
    # safetensors supports neither strides nor all of torch's dtypes, nor tensors that share memory
    values = {
        f"{name}:{number}": bits_of(part).clone()
        for name, each in constants.items()
        for number, part in enumerate(dense_parts(each))
    }
    body = len(text).to_bytes(_LENGTH_BYTES, "little") + text + save(values)
    return _MAGIC + hashlib.blake2b(body, digest_size=_HASH_BYTES).digest() + body


def unpack(data: bytes) -> Program:
    """The program of these bytes, with its constants on the CPU. Raises `CaptureError` if they are damaged or
    need operators that are not registered here."""
    start = len(_MAGIC) + _HASH_BYTES
    body = data[start:]
    if data[:start] != _MAGIC + hashlib.blake2b(body, digest_size=_HASH_BYTES).digest():
        raise CaptureError(
            f"These {len(data)} bytes are no program, or a damaged one. Pack it again, with the same version of meshloom."
        )
    stop = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    try:
        return _program(json.loads(body[_LENGTH_BYTES:stop]), load(body[stop:]))
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"A program of {len(data)} bytes cannot be read here ({type(error).__name__}: {error}). Use one version of meshloom and torch."
        ) from error


def _program(header: Mapping[str, Any], values: Mapping[str, Tensor]) -> Program:
    contexts = [decoded_context(each) for each in header["contexts"]]
    lines = [SourceLine(*each) for each in header["lines"]]
    return Program(
        parameters={each["name"]: decoded_tensor(Variable, each) for each in header["parameters"]},
        buffers={each["name"]: decoded_tensor(Variable, each) for each in header["buffers"]},
        constants={name: _constant(name, each, values) for name, each in header["constants"].items()},
        inputs=tuple(decoded_tensor(Input, each) for each in header["inputs"]),
        nodes=tuple(decoded_node(each, contexts, lines) for each in header["nodes"]),
        outputs=decoded(header["outputs"]),
        out_spec=treespec_loads(header["out_spec"]),
        updates={name: decoded({"ref": each}) for name, each in header["updates"].items()},
        in_place=frozenset(header["in_place"]),
        device=torch.device(header["device"]),
        training=header["training"],
        precision=decoded(header["precision"]),
        opaque=header["opaque"],
        by_shapes=header["by_shapes"],
        others=header["others"],
    )


def _description(name: str, constant: Tensor) -> dict[str, Any]:
    if type(constant) is not Tensor or constant.layout not in (torch.strided, torch.sparse_coo):
        raise CaptureError(
            f"Constant {name} of the program is a {type(constant).__name__} of layout {constant.layout}, which cannot be sent. {WAY_OUT}"
        )
    return {
        "parts": [
            {**encoded(each.dtype), "shape": list(each.shape), "stride": list(each.stride())}
            for each in dense_parts(constant)
        ],
        "shape": list(constant.shape),
        "coalesced": constant.is_coalesced() if is_sparse(constant) else None,
    }


def _constant(name: str, description: Mapping[str, Any], values: Mapping[str, Tensor]) -> Tensor:
    parts = [_part(each, values.get(f"{name}:{number}")) for number, each in enumerate(description["parts"])]
    coalesced = description["coalesced"]
    return parts[0] if coalesced is None else from_parts(parts, description["shape"], coalesced=coalesced)


def _part(description: Mapping[str, Any], value: Tensor | None) -> Tensor:
    dtype: torch.dtype = decoded({"dtype": description["dtype"]})
    shape, stride = description["shape"], description["stride"]
    if value is None:  # captured by shapes
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    part = torch.empty_strided(shape, stride, dtype=dtype)
    return part.copy_(value.view(dtype).view(shape)) if value.numel() else part


def _dumped(spec: TreeSpec) -> str:
    """The structure of the outputs."""
    text = encoded_structure(spec)
    if text is None:
        raise CaptureError(
            f"The loss returns {' '.join(str(spec).split())}, which cannot be sent to another rank. Return tensors, numbers, and tuples, lists or dicts of them."
        )
    return text
