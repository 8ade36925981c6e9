"""The model inside its wrappers, its attentions, and which wrappers a change of parameters would come too late for."""

from __future__ import annotations

from typing import Any

from qkform import sites
from qkform.errors import ConfigError, LayoutError, SurgeryError
from qkform.sites import Sites
from qkform.sites.parameters import is_module, unwrapped

REMEDY = "give a transformers model, or a module that holds nn.MultiheadAttention"

# They register, flatten or replicate the parameters that they find when they wrap a model.
_KEEPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",  # what fully_shard makes of a module
    "DeepSpeedEngine",
)


def keeper(model: Any) -> str | None:
    """What holds the model's parameters for data-parallel or sharded training, as a phrase; None where nothing does."""
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _KEEPERS:
                return f"wrapped by {kind.__name__}"
    if any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters()):
        return "sharded"
    return None


def changeable(model: Any, change: str) -> Any:
    """The model without wrappers, for a change that adds, replaces or removes parameters.

    torch.compile is taken off: it compiles anew what has changed. SurgeryError where the model is wrapped for
    data-parallel or sharded training: the gradients of new parameters would never be reduced.
    """
    if not is_module(model):
        return model
    held = keeper(model)
    if held is not None:
        raise SurgeryError(
            f"the model is {held}, which would not know the parameters that {change} makes or takes away; call it "
            "before the model is wrapped"
        )
    return unwrapped(model)


def understood(model: Any) -> Sites:
    """The attentions of a model; SurgeryError, with what to give instead, for a model of no known kind."""
    try:
        return sites.find(model)
    except (ConfigError, LayoutError) as error:
        reason = str(error).partition(";")[0]
        raise SurgeryError(f"no attention was found in {type(model).__name__}: {reason}; {REMEDY}") from error
