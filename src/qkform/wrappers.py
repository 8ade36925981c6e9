"""What compiling, sharding, checkpointing and adapters put into the path of a module, in memory and in files."""

from __future__ import annotations

# Each is a part of a path that its wrapper's attribute adds; none is the name of a module that models have.
WRAPPERS: tuple[str, ...] = (
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",  # FullyShardedDataParallel
    "_fpw_module",  # the same, older
    "_checkpoint_wrapped_module",  # activation checkpointing
    "_forward_module",  # Lightning's strategies
    "base_layer",  # adapters
)
