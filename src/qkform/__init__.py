"""qkform: the query-key form W_qk = W_Q W_K^T of self-attention, measured."""
from qkform.form import BilinearForm
