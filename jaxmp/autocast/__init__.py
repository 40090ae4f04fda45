"""Mixed precision for a whole function: each operation in the dtype that suits it, decided on its graph."""
