"""Models without a dtype in their code. jaxmp sets their precision."""
