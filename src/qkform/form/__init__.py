"""The query-key form and its scores: pure mathematics, arrays in, arrays out."""

from qkform.form.bilinear import BilinearForm, Signature
from qkform.form.null import null_mean, null_variance

__all__ = ["BilinearForm", "Signature", "null_mean", "null_variance"]
