"""What benchmarks share: settings, contestants, tables, files."""
