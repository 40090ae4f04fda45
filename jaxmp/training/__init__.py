"""Train state, train step and evaluation step."""
