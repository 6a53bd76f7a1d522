"""`torch.ops.pagegraft.paged_attention`: the op for PyTorch, on CPU by our kernel and on Ascend by the built operator.

torch is optional. Importing this module does not import it; `load` does, without letting it load device backends by
itself (torch_npu's backend fails inside `import torch` where CANN is missing).
"""

from .npu import require_npu
from .op import import_torch, load, schema

__all__ = ["import_torch", "load", "require_npu", "schema"]
