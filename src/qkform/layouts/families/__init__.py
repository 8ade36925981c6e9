"""Families of models as data: each .toml file says where its members keep Q and K. `qkform.layouts.rules` reads them."""
