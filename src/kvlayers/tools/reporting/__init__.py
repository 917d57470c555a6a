"""Reports as one HTML file that needs nothing else: tables, plots, and where the figures are from."""
