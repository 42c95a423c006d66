"""What the bytes of packed values look like, for the writing and the reading side.

Layout: magic, length of the text, the text (JSON), then raw bytes that the text points into.

In the text None, bool, small int, finite float, str and dict with str keys are JSON's own; a JSON array
is always tagged: ["l", ...] is a list, ["t", ...] a tuple, and so on: the table of encoders in `values`
and that of decoders in `values_reading` name each tag.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

MAGIC = b"KSV1"
HEAD = struct.Struct("<4sI")
DOUBLE = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")
RANDOM_VERSION, RANDOM_WORDS = 3, 625
NUMPY_DTYPE = re.compile(r"[<>=|][?biufcmMSU]\d*(\[\w+\])?")
FACTORIES: Mapping[str, Callable[[], Any] | None] = {
    "none": None,
    "list": list,
    "int": int,
    "float": float,
    "dict": dict,
    "set": set,
    "str": str,
    "bool": bool,
}
DTYPES = {str(item)[6:]: item for item in vars(torch).values() if isinstance(item, torch.dtype)}
FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}
