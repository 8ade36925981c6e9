"""`from_config`: a new Hugging Face model with the changes that its config records, made anew from its own weights."""

from __future__ import annotations

import copy
from typing import Any

from qkform.errors import SurgeryError
from qkform.surgery.interface import NAME
from qkform.surgery.loading import restore


def from_config(model_class: Any, config: Any, **kwargs: Any) -> Any:
    """`model_class.from_config(config, ...)` with what `config.qkform` records applied to the new weights, in order.

    transformers builds the standard model from such a config, and says nothing. Here every recorded change is made
    again as it was: the same arm, start, seed and kind of attention, at the same places. A model without a record is
    built as ever. The config is copied.

    model_class     one of transformers' model classes, or of its Auto classes
    config          of a model that was changed, or read from its folder: AutoConfig.from_pretrained("folder")
    kwargs          as of the Auto classes' from_config: attn_implementation, dtype, trust_remote_code

    SurgeryError where the record cannot be applied anew: of a newer qkform, of attentions that the model does not
    have, or of `decouple_(init="fit")`, which needs a batch and a trained model. Weights come from `from_pretrained`.

    >>> new = from_config(AutoModelForMaskedLM, changed.config)     # doctest: +SKIP
    """
    build = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", None)
    if build is None or not hasattr(model_class, "from_pretrained"):
        raise SurgeryError(
            f"{model_class!r:.80} is no model class; expected one of transformers, or an Auto class"
        )
    if not hasattr(config, "to_dict"):
        raise SurgeryError(
            f"config is {config!r:.80}; expected a config of transformers, as AutoConfig.from_pretrained gives it"
        )
    config = copy.deepcopy(config)
    _forget_implementation(config)
    model = build(config, **kwargs)
    restore(model, anew=True)
    return model


def _forget_implementation(config: Any) -> None:
    """A changed model's config, and those inside it, name ours; the new model's own choice is to stand below it."""
    for each in [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]:
        if getattr(each, "_attn_implementation_internal", None) == NAME:
            each._attn_implementation_internal = None
