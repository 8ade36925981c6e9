"""Training on real text, with the query-key form recorded and changed."""
