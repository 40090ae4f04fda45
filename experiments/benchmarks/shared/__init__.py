"""Code that benchmarks share: common flags, the record of a result, and the train steps of each library."""
