"""Tables, pictures, progress, and the figures of the README."""
