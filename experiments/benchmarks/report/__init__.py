"""Write the results of benchmarks, and pictures of real runs, into the pages."""
