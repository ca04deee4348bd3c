"""The commands of ``zoo``, a file for each group of them; what is heavy is imported by the command that needs it."""
