"""What wraps a module for training and leaves its name in the paths of the model's tensors."""

from __future__ import annotations

# Each is a part of a path that its wrapper's attribute adds; none is the name of a module that models have.
WRAPPERS = (
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",  # FullyShardedDataParallel
    "_fpw_module",  # the same, older
    "_checkpoint_wrapped_module",  # activation checkpointing
    "_forward_module",  # Lightning's strategies
)
DATA_PARALLEL = "module"  # DistributedDataParallel, DeepSpeed; models may have modules of this name too
ADAPTED = "base_layer"  # of peft: no wrapper like the others, for the model computes with another weight
