"""The parts of a model, one family a folder, one part a file."""
