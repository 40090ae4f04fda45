"""Tables, plots, progress bars, and the measured figures in the README."""
