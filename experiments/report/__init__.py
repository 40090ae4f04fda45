"""Tables, plots, progress bars and JSON files."""
