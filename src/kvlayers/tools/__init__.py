"""Tools that people run: commands, the demo, measuring, calibration and reports."""
