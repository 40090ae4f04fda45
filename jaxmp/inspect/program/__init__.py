"""The parts that the tools of inspect share to read programs, and the findings of an audit."""
