"""One task under several policies, trained and timed side by side: what `experiments.compare` does."""
