"""The survey: every model type of the installed transformers, held against its own forward pass."""
