"""Write the results of benchmarks as tables and pages."""
