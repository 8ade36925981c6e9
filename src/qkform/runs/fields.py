"""The names in a record: its schema, its file, and the fields that are measured. docs/tracking.md explains them."""

SCHEMA = "qkform.run/1"
NAME = "record.jsonl"

# What a layer, and a head under "heads", is measured by; null where it is not defined or not measured.
MEASURES = (
    "symmetry",  # [-1, 1], of the layer's sum over heads, as a scan gives it
    "symmetry_z",
    "null_sd",  # standard deviation of the symmetry of random weights with this spectrum; their mean is 1/d_model
    "directionality",  # [-1, 1]
    "norm",  # >= 0
    "entropy",  # nats, mean over the probe's rows; of a layer: mean over heads
    "normalised_entropy",  # [0, 1]
    "largest",  # (0, 1], mean over rows of the largest weight
)
SELF_NORM = "self_norm"  # of heads whose self score is decoupled
CONFLICT = ("cosine", "null_mean", "null_sd", "excess", "share")  # per head, where conflict was asked for
