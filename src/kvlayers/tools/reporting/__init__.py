"""Reports: one self-contained HTML file with tables, plots, and the conditions of the measurement."""
