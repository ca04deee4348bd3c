"""Statistics of a linear module's inputs, gathered as calibration data streams by."""
