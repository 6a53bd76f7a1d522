"""Replays the same vectors from their .pb files (serialised TensorProto): replay_pb.py VECTORS LIBRARY

A TensorProto is a row of protobuf fields; the vectors use three: dims (1), data_type (2) and raw_data (9). Reading them
takes no library, which is the point: a C++ runtime can do the same.
"""

from pathlib import Path

import numpy as np
from replay_npy import main

NUMPY = {1: "<f4", 2: "u1", 3: "i1", 6: "<i4", 10: "<f2", 16: "<u2", 17: "u1"}  # by ONNX element type


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def read(path, entry):
    data, at = Path(f"{path}.pb").read_bytes(), 0
    dims, kind, raw = [], 0, b""
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)  # the number itself, or a length
        if key & 7 == 2:
            field, at = data[at : at + value], at + value
            if key >> 3 == 9:
                raw = field
            elif key >> 3 == 1:  # dims may be packed
                end = 0
                while end < len(field):
                    dim, end = varint(field, end)
                    dims.append(dim)
        elif key >> 3 == 1:
            dims.append(value)
        elif key >> 3 == 2:
            kind = value
    if kind != entry["onnx_type"] or dims != entry["shape"]:
        raise SystemExit(f"{path}.pb is not what case.json says")
    return np.frombuffer(raw, NUMPY[kind]).reshape(dims).copy()


if __name__ == "__main__":
    main(read)
