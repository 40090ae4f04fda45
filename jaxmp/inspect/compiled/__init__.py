"""The parts that the tools of inspect share to read compiled programs."""
