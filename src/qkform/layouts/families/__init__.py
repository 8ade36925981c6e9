"""Families as data: each .toml file says where its members keep Q and K. `rules` reads them."""
